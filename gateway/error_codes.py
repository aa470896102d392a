"""Codes of errors in logs and records, and those that name the part that is away."""

from gateway.errors import GatewayError

QUOTA_UNAVAILABLE = "quota_unavailable"
DATABASE_UNAVAILABLE = "database_unavailable"
# Maximum length of an error code in logs and records. The gateway's own codes are shorter.
MAX_CODE = 64


def known_code(code: str) -> str:
    """Return the code, or "other" if it is no identifier of at most MAX_CODE: an engine may send any text."""
    return code if code.isidentifier() and len(code) <= MAX_CODE else "other"


def code_of(error: Exception) -> str:
    """Return an error's code for records, or its kind if it has no code."""
    if isinstance(error, GatewayError):
        return known_code(error.code or error.kind)
    return "internal_error"
