"""Values that a browser keeps and sends back, and that nobody else can make: JSON with a keyed hash."""

import hmac
from collections.abc import Callable
from typing import Any

from gateway.records.cursors import decode_cursor, encode_cursor

Seal = Callable[[str, str], str]
"""Keyed hash of (purpose, text), as `Authenticator.seal`."""


def sealed(seal: Seal, purpose: str, value: Any) -> str:
    """Return a value as a text of URL-safe characters. Each purpose has hashes of its own."""
    text = encode_cursor(value)
    return f"{text}.{seal(purpose, text)}"


def unsealed(seal: Seal, purpose: str, sealed_text: str, kind: Any) -> Any:
    """Return the value of a text that `sealed` made, whose type is `kind`; None for any other text."""
    text, _, signature = sealed_text.partition(".")
    if not hmac.compare_digest(signature.encode("utf-8", "replace"), seal(purpose, text).encode()):
        return None
    return decode_cursor(text, kind)
