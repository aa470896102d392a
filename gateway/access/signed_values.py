"""Signed values, which a browser keeps and sends back: JSON with an HMAC, so that nobody else can make them."""

import hmac
from collections.abc import Callable
from typing import Any

from gateway.records.cursors import decode_cursor, encode_cursor

KeyedHash = Callable[[str, str], str]
"""HMAC of (purpose, text), as `Authenticator.keyed_hash`."""


def signed(keyed_hash: KeyedHash, purpose: str, value: Any) -> str:
    """Return a value as a text of URL-safe characters. Each purpose has hashes of its own."""
    text = encode_cursor(value)
    return f"{text}.{keyed_hash(purpose, text)}"


def verified(keyed_hash: KeyedHash, purpose: str, signed_text: str, kind: Any) -> Any:
    """Return the value of a text that `signed` made, whose type is `kind`; None for any other text."""
    text, _, signature = signed_text.partition(".")
    if not hmac.compare_digest(signature.encode("utf-8", "replace"), keyed_hash(purpose, text).encode()):
        return None
    return decode_cursor(text, kind)
