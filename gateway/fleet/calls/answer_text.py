"""Upper bound of a whole answer's tokens by the length of its text, for answers without a usable count."""

from typing import Any

import msgspec

from gateway.fleet.calls.answers import GENERATED, JSON_ERRORS, LARGE_BYTES, Fields


class _Choice(msgspec.Struct):
    text: Any = None
    message: Any = None


_choices = msgspec.json.Decoder(list[_Choice] | None)


def most_tokens(answer: Fields) -> int:
    """Return the largest number of tokens that an answer's text can have.

    A token has a byte at least, except for the end of each choice. The text of a large answer is not decoded, so all
    bytes of its choices count.
    """
    raw = memoryview(answer.get("choices", b""))
    if raw.nbytes > LARGE_BYTES:
        return raw.nbytes
    try:
        choices = _choices.decode(raw) or []
    except JSON_ERRORS:
        return raw.nbytes
    return sum(1 + _size(choice.text) + _message_size(choice.message) for choice in choices)


def _message_size(message: Any) -> int:
    return sum(_size(message.get(name)) for name in GENERATED) if isinstance(message, dict) else 0


def _size(value: Any) -> int:
    """Return the bytes of a text, or of another value's JSON."""
    if value is None:
        return 0
    return len(value.encode("utf-8", "replace")) if isinstance(value, str) else len(msgspec.json.encode(value))
