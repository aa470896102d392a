"""Texts of servers, files and other people, made safe for a terminal."""


def printable(text: str) -> str:
    """Return the text with line ends and other characters that control a terminal as escapes."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
