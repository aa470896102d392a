"""Headers of safetensors files, checked against the file: uploads of adapters and checkpoints of base models.

Needs no torch, so that the gateway reads uploads. The format is https://huggingface.co/docs/safetensors.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

from adapters.manifest import quoted

# Bytes of a number, by the format's names. The size of a tensor of another dtype is not compared with its shape.
DTYPE_BYTES = {
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}
# Largest size or place in a header; no file is longer.
_MAX_SIZE = (1 << 48) - 1


class HeaderError(Exception):
    """A file that is not a safetensors file, is cut off or is inconsistent. tensor: None for the file as a whole."""

    def __init__(self, problem: str, tensor: str | None = None) -> None:
        super().__init__(problem)
        self.problem, self.tensor = problem, tensor


class JsonError(ValueError):
    """A text that is not JSON, or has a key twice in one object."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in its file. name, dtype: the file's own. start, num_bytes: its place in the file, in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    num_bytes: int

    @property
    def end(self) -> int:
        return self.start + self.num_bytes


class Readable(Protocol):
    """An open file or a mapped one."""

    def read(self, size: int, /) -> bytes: ...


def read_header(
    file: Readable, size: int, max_bytes: int, check_served: Callable[[str, Any, Any], None] | None = None
) -> list[Entry]:
    """Return all tensors of a safetensors file in the order of their data, which must fill the file without a gap.

    file: at its beginning. size: the file's, in bytes. max_bytes: size of the longest header that is parsed, a multiple
    of 1 MiB. check_served: receives each tensor's name, dtype and shape as the header states them, before they are
    checked, and raises the caller's error for a tensor that the caller does not serve. Raises HeaderError.
    """
    begin, header = _read_json(file, size, max_bytes)
    entries = []
    for name, value in header.items():
        if not isinstance(value, dict):
            raise HeaderError("expected an object with dtype, shape and data_offsets", name)
        if check_served is not None:
            check_served(name, value.get("dtype"), value.get("shape"))
        entries.append(_entry(name, value, begin))
    entries.sort(key=lambda entry: (entry.start, entry.end))
    position = begin
    for entry in entries:
        if entry.start != position:
            raise HeaderError("its data overlaps another tensor's or leaves a gap", entry.name)
        position = entry.end
    if position != size:
        raise HeaderError(f"its tensors end at byte {position}, the file at {size}; is it cut off?")
    return entries


def are_sizes(value: Any) -> TypeGuard[list[int]]:
    """Return whether a header's value is a list of numbers that may be sizes or places in a file."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item <= _MAX_SIZE for item in value)


def parse_json(raw: bytes) -> Any:
    """Return the value of a JSON text in UTF-8. Raises JsonError, also for a key that appears twice."""
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except JsonError:
        raise
    except (ValueError, RecursionError) as error:
        raise JsonError(f"is not valid JSON: {error}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise JsonError(f"the key {quoted(key)} appears twice")
        result[key] = value
    return result


def _read_json(file: Readable, size: int, max_bytes: int) -> tuple[int, dict[str, Any]]:
    """Return the first byte of the tensors' data and the header without its metadata. Raises HeaderError."""
    start = file.read(8)
    if not size:
        raise HeaderError("the file is empty")
    if len(start) < 8:
        raise HeaderError("is not a safetensors file: too short")
    length = int.from_bytes(start, "little")
    if length > min(max_bytes, size - 8):
        raise HeaderError(
            f"is not a safetensors file: its header is longer than the file or than {max_bytes >> 20} MiB"
        )
    try:
        header = parse_json(file.read(length))
    except JsonError as error:
        raise HeaderError(str(error)) from None
    if not isinstance(header, dict):
        raise HeaderError("is not a safetensors file: its header is not an object")
    header.pop("__metadata__", None)
    return 8 + length, header


def _entry(name: str, value: dict[str, Any], begin: int) -> Entry:
    """Return a tensor. begin: the first byte of all tensors' data. Raises HeaderError."""
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str):
        raise HeaderError(f"expected the name of a dtype, got {quoted(dtype)}", name)
    if not are_sizes(shape):
        raise HeaderError(f"expected a shape of whole numbers from 0 to {_MAX_SIZE}, got {quoted(shape)}", name)
    if not _fit(offsets, shape, DTYPE_BYTES.get(dtype)):
        raise HeaderError(f"its data_offsets {quoted(offsets)} do not fit shape {quoted(shape)} in {dtype}", name)
    start, end = offsets
    return Entry(name, tuple(shape), dtype, begin + start, end - start)


def _fit(offsets: Any, shape: list[int], width: int | None) -> TypeGuard[list[int]]:
    """Return whether a tensor's offsets are its start and end. width: bytes of one of its numbers, None if unknown."""
    if not are_sizes(offsets) or len(offsets) != 2:
        return False
    num_bytes = offsets[1] - offsets[0]
    return num_bytes >= 0 if width is None else num_bytes == math.prod(shape) * width
