"""Titles of limits, and of reasons why requests failed, within a sentence."""

from gateway.limits.kinds import KINDS

TITLES = {kind.name: kind.title or kind.name.replace("_", " ") for kind in KINDS}


def limit_title(limit_name: str) -> str:
    """Return a limit's name for people: `tokens per minute`. The request log may have names of former limits."""
    return TITLES.get(limit_name) or limit_name.replace("_", " ")


def code_title(code: str) -> str:
    """Return an error code for people: `invalid request error`."""
    return code.replace("_", " ")


def reason_title(code: str, limit_name: str) -> str:
    """Return the limit that refused a request, or the error code without one, for people."""
    return limit_title(limit_name) if limit_name else code_title(code)
