"""Codes of errors in logs and records."""

from gateway.errors import GatewayError

# Maximum length of an error code in logs and records. The gateway's own codes are shorter.
MAX_CODE = 64


def known_code(code: str) -> str:
    """Return the code, or "other" for an engine's arbitrary text in its place."""
    return code if code.isidentifier() and len(code) <= MAX_CODE else "other"


def code_of(error: Exception) -> str:
    """Return the code of an error for records: an error without one has its kind."""
    if isinstance(error, GatewayError):
        return known_code(error.code or error.kind)
    return "internal_error"
