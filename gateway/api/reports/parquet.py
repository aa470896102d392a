"""Writer of Parquet files, one row group at a time, so that a file of any length takes bounded memory.

It writes what the format calls version 1 data pages: PLAIN values, RLE definition levels, no compression. No library is
used: those that write Parquet weigh 12 to 55 MB, and the smallest needs the whole table in memory.
See https://parquet.apache.org/docs/file-format/ and Thrift's compact protocol.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import groupby
from typing import Any, Literal, NamedTuple

MAGIC = b"PAR1"
CREATED_BY = "loraplex"
Kind = Literal["text", "integer", "money", "time", "flag"]

# The format's physical types and converted types by kind of field; money is a decimal with six places.
_PHYSICAL = {"flag": 0, "integer": 2, "money": 2, "time": 2, "text": 6}
_CONVERTED = {"text": 0, "money": 5, "time": 10}
_MONEY_SCALE, _MONEY_PRECISION = 6, 18
_REQUIRED, _OPTIONAL = 0, 1
_PLAIN, _RLE = 0, 3
_DATA_PAGE, _UNCOMPRESSED = 0, 0
# Types of Thrift's compact protocol.
_I32, _I64, _BINARY, _LIST, _STRUCT = 5, 6, 8, 9, 12


class Field(NamedTuple):
    """Column of a file. kind: "money" takes integers in millionths, "time" aware datetimes. optional: may be None."""

    name: str
    kind: Kind
    optional: bool = False


class ParquetWriter:
    """Writer of one file, whose parts are the values of `begin`, of each `rows`, and of `end`, in this order."""

    def __init__(self, fields: Sequence[Field]) -> None:
        self._fields = fields
        self._length = 0
        self._num_rows = 0
        self._groups: list[bytes] = []

    def begin(self) -> bytes:
        self._length = len(MAGIC)
        return MAGIC

    def rows(self, rows: Sequence[Mapping[str, Any]]) -> bytes:
        """Return a row group. A missing value counts as None."""
        if not rows:
            return b""
        out, chunks, begun = bytearray(), [], self._length
        for field in self._fields:
            page = _page(field, [row.get(field.name) for row in rows])
            header = _page_header(len(rows), len(page))
            chunks.append(_chunk(field, len(rows), self._length, len(header) + len(page)))
            out += header + page
            self._length += len(header) + len(page)
        self._num_rows += len(rows)
        self._groups.append(
            _struct([(1, _LIST, _list(_STRUCT, chunks)), (2, _I64, self._length - begun), (3, _I64, len(rows))])
        )
        return bytes(out)

    def end(self) -> bytes:
        schema = [_struct([(4, _BINARY, "schema"), (5, _I32, len(self._fields))]), *map(_element, self._fields)]
        footer = _struct(
            [
                (1, _I32, 1),
                (2, _LIST, _list(_STRUCT, schema)),
                (3, _I64, self._num_rows),
                (4, _LIST, _list(_STRUCT, self._groups)),
                (6, _BINARY, CREATED_BY),
            ]
        )
        return footer + struct.pack("<I", len(footer)) + MAGIC


def _element(field: Field) -> bytes:
    """Return a column's entry in the schema."""
    found: list[tuple[int, int, Any]] = [
        (1, _I32, _PHYSICAL[field.kind]),
        (3, _I32, _OPTIONAL if field.optional else _REQUIRED),
        (4, _BINARY, field.name),
    ]
    if field.kind in _CONVERTED:
        found.append((6, _I32, _CONVERTED[field.kind]))
    if field.kind == "money":
        found += [(7, _I32, _MONEY_SCALE), (8, _I32, _MONEY_PRECISION)]
    return _struct(found)


def _chunk(field: Field, num_values: int, offset: int, size: int) -> bytes:
    """Return the entry of a column of a row group."""
    meta = _struct(
        [
            (1, _I32, _PHYSICAL[field.kind]),
            (2, _LIST, _list(_I32, [_zigzag(_PLAIN), _zigzag(_RLE)])),
            (3, _LIST, _list(_BINARY, [_text(field.name)])),
            (4, _I32, _UNCOMPRESSED),
            (5, _I64, num_values),
            (6, _I64, size),
            (7, _I64, size),
            (9, _I64, offset),
        ]
    )
    return _struct([(2, _I64, offset), (3, _STRUCT, meta)])


def _page_header(num_values: int, size: int) -> bytes:
    data = _struct([(1, _I32, num_values), (2, _I32, _PLAIN), (3, _I32, _RLE), (4, _I32, _RLE)])
    return _struct([(1, _I32, _DATA_PAGE), (2, _I32, size), (3, _I32, size), (5, _STRUCT, data)])


def _page(field: Field, values: list[Any]) -> bytes:
    levels = b""
    if field.optional:
        runs = b"".join(
            _varint(len(list(run)) << 1) + bytes([is_there])
            for is_there, run in groupby(value is not None for value in values)
        )
        levels = struct.pack("<I", len(runs)) + runs
        values = [value for value in values if value is not None]
    return levels + _plain(field.kind, values)


def _plain(kind: Kind, values: list[Any]) -> bytes:
    if kind == "text":
        encoded = [value.encode("utf-8", "replace") for value in values]
        return b"".join(struct.pack("<I", len(each)) + each for each in encoded)
    if kind == "flag":
        bits = sum(1 << i for i, value in enumerate(values) if value)
        return bits.to_bytes((len(values) + 7) // 8, "little")
    if kind == "time":
        values = [_microseconds(value) for value in values]
    return struct.pack(f"<{len(values)}q", *values)


def _microseconds(moment: datetime) -> int:
    return int(moment.timestamp()) * 1_000_000 + moment.microsecond


def _struct(fields: Iterable[tuple[int, int, Any]]) -> bytes:
    """Return a struct of Thrift: fields as (id, type, value); the values of lists and structs are already encoded."""
    out, last = bytearray(), 0
    for number, kind, value in fields:
        out.append((number - last) << 4 | kind)
        last = number
        if kind in (_I32, _I64):
            out += _zigzag(value)
        else:
            out += _text(value) if kind == _BINARY else value
    return bytes(out) + b"\x00"


def _list(kind: int, items: Sequence[bytes]) -> bytes:
    head = bytes([len(items) << 4 | kind]) if len(items) < 15 else bytes([0xF0 | kind]) + _varint(len(items))
    return head + b"".join(items)


def _text(text: str) -> bytes:
    raw = text.encode()
    return _varint(len(raw)) + raw


def _zigzag(value: int) -> bytes:
    return _varint(value << 1 if value >= 0 else (-value << 1) - 1)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
