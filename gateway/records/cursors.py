"""Cursors of lists: the position of a page's last row, as text that a client sends back and can alter.

The encoding serves signed values too (gateway/access/signed_values.py).
"""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from datetime import datetime
from typing import Any

import msgspec


def encode_cursor(position: Any) -> str:
    """Return a position as a cursor, opaque to clients."""
    return urlsafe_b64encode(msgspec.json.encode(position)).decode().rstrip("=")


def decode_cursor(cursor: str, kind: Any) -> Any:
    """Return a cursor's position, whose type is `kind`. Raises ValueError for any other text."""
    try:
        return msgspec.json.decode(urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)), type=kind)
    except msgspec.MsgspecError as error:
        raise ValueError("expected a cursor of this list") from error


def check_moment(at: datetime) -> None:
    """Raise ValueError for a time that the databases cannot store or compare: without a zone, or too far away."""
    if at.tzinfo is None or not 1970 <= at.year < 9000:
        raise ValueError("expected a time with its zone, from 1970 on")
