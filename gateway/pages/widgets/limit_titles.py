"""Titles of limits within a sentence."""

from gateway.limits.kinds import KINDS

TITLES = {kind.name: kind.title or kind.name.replace("_", " ") for kind in KINDS}


def limit_title(limit_name: str) -> str:
    """Return a limit's name for people: `tokens per minute`. The request log may have names of former limits."""
    return TITLES.get(limit_name) or limit_name.replace("_", " ")
