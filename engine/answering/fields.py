"""Encoding of a whole answer with the byte lengths of its fields, by which a gateway copies large fields unread."""

import msgspec
from msgspec import UNSET, Struct


def encode_fields(answer: Struct) -> tuple[bytearray, dict[str, int]]:
    """Return the answer's JSON, and the byte length of each field's value by name, in order.

    The lengths come from the encoder, not from a search of the text, which a prompt or a completion could mislead.
    """
    body, lengths = bytearray(b"{"), dict[str, int]()
    encoder = msgspec.json.Encoder()
    for name in answer.__struct_fields__:
        if (value := getattr(answer, name)) is UNSET:
            continue
        body += b'%s"%s":' % (b"," if lengths else b"", name.encode())
        start = len(body)
        # Into the body itself, because a copy of a large field takes as much memory again.
        encoder.encode_into(value, body, start)
        lengths[name] = len(body) - start
    body += b"}"
    return body, lengths
