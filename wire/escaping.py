"""Foreign texts for terminals, logs and messages, with control characters and lone surrogates as escapes."""


def escaped(text: str, limit: int | None = None) -> str:
    """Return the text with characters that are not printable as escapes. limit: its maximum length; None: any."""
    kept = text if limit is None else text[: limit + 1]
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in kept)
    return shown if limit is None or len(shown) <= limit else shown[: limit - 3] + "..."
