"""Titles of limits within a sentence."""

# Those that differ from the limits' names.
TITLES = {
    "max_concurrent": "concurrent requests",
    "max_concurrent_tokens": "concurrent tokens",
    "max_concurrent_uploads": "concurrent uploads",
}


def limit_title(limit_name: str) -> str:
    """Return a limit's name for people: `tokens per minute`."""
    return TITLES.get(limit_name) or limit_name.replace("_", " ")
