"""The GGUF container, versions 2 and 3: metadata and the place of each tensor, with every size checked against the
file.

Independent of the model. The format is ggml's docs/gguf.md. This reader replaces that of the `gguf` package, which
trusts the file and makes an object of every token of the vocabulary.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from engine.model.tensor_files import Entry, MappedFile, damaged, tensor_error
from wire.errors import ConfigError

T = TypeVar("T", str, bool, int, float)

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_KINDS: dict[type, str] = {str: "a string", bool: "true or false", int: "an integer", float: "a number", list: "a list"}


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An open GGUF file. metadata: values as Python's types, arrays as lists. tensors: by ggml's names, shapes in
    torch's order.

    Raises ConfigError for a file that has another format, is truncated or is inconsistent.
    """

    file: MappedFile
    metadata: dict[str, Any]
    tensors: dict[str, Entry]

    @classmethod
    def open(cls, path: Path) -> "GgufFile":
        file = MappedFile(path)
        try:
            return cls(file, *_Reader(file).read())
        except ConfigError:
            file.close()
            raise
        except (ValueError, KeyError, OverflowError) as error:
            file.close()
            raise damaged(path, str(error)) from None

    def get(self, key: str, kind: type[T]) -> T | None:
        """Return a value of the metadata, None if it is missing. Raises ConfigError for a value of another kind."""
        value = self.metadata.get(key)
        return None if value is None else self._checked(key, value, kind)

    def get_list(self, key: str, kind: type[T]) -> list[T]:
        """Return a list of the metadata, empty if it is missing. All items have one kind. Raises ConfigError like
        `get`.
        """
        items = self.metadata.get(key, [])
        if not isinstance(items, list):
            raise self._unexpected(key, list, items)
        if items:
            self._checked(key, items[0], kind)
        return items

    def _checked(self, key: str, value: Any, kind: type[T]) -> T:
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
            raise self._unexpected(key, kind, value)
        return value

    def _unexpected(self, key: str, kind: type, value: Any) -> ConfigError:
        return ConfigError("model", f"{self.file.path}: {key}: expected {_KINDS[kind]}, got {str(value)[:40]!r}")


def end_ids(gguf: GgufFile, vocab_size: int) -> list[int]:
    """Return the tokens that end an answer. Raises ConfigError for a token outside the vocabulary."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    found = {key: token_id for key in keys if (token_id := gguf.get(key, int)) is not None}
    for key, token_id in found.items():
        if not 0 <= token_id < vocab_size:
            raise ConfigError("model", f"{gguf.file.path}: {key}: {token_id} is not one of {vocab_size} tokens")
    return sorted(set(found.values()))


class _Reader:
    def __init__(self, file: MappedFile) -> None:
        self._path, self._data, self._at = file.path, file.data, 0

    def read(self) -> tuple[dict[str, Any], dict[str, Entry]]:
        if self._data[:4] != b"GGUF":
            raise ValueError("it does not begin with 'GGUF'")
        self._at = 4
        version, num_tensors, num_values = self._scalar("I"), self._scalar("Q"), self._scalar("Q")
        if version not in (2, 3):
            raise ConfigError("model", f"{self._path} is GGUF version {version}; served are 2 and 3, little-endian")
        metadata = {}
        for _ in range(num_values):
            key = self._string()
            metadata[key] = self._value(self._scalar("I"))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r}")
        begin = -(-self._at // alignment) * alignment
        tensors = {}
        for name, shape, kind, offset, size in infos:
            if name in tensors:
                raise ValueError(f"tensor {name}: appears twice")
            tensors[name] = Entry(name, shape, kind, begin + offset, size)
        self._check_ends(tensors)
        return metadata, tensors

    def _check_ends(self, tensors: dict[str, Entry]) -> None:
        size, last = len(self._data), max((entry.end for entry in tensors.values()), default=0)
        for entry in tensors.values():
            if entry.end > size:
                raise ValueError(f"tensor {entry.name}: ends beyond the end of the file: {size} bytes of {last}")

    def _tensor_info(self) -> tuple[str, tuple[int, ...], str, int, int]:
        name, num_dimensions = self._string(), self._scalar("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name}: {num_dimensions} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(num_dimensions))[::-1]
        number, offset = self._scalar("I"), self._scalar("Q")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            problem = f"unknown type {number}: the file is damaged, or newer than this release"
            raise tensor_error(self._path, name, problem) from None
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if min(shape) < 1 or shape[-1] % block:
            raise ValueError(f"tensor {name}: shape {shape} in {kind.name}")
        return name, shape, kind.name, offset, math.prod(shape) // block * block_bytes

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(self._form(kind))
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind == _STRING:
            if count > len(self._data) // 8:  # each string takes at least the 8 bytes of its length
                raise ValueError(f"an array of {count} strings is longer than the file")
            return [self._string() for _ in range(count)]
        dtype = np.dtype(self._form(kind)).newbyteorder("<")
        values = np.frombuffer(self._take(count * dtype.itemsize), dtype)
        return values.tolist()

    @staticmethod
    def _form(kind: int) -> str:
        if kind not in _SCALARS:
            raise ValueError(f"a value of unknown type {kind}")
        return _SCALARS[kind]

    def _scalar(self, form: str) -> Any:
        (value,) = struct.unpack("<" + form, self._take(struct.calcsize("<" + form)))
        return value

    def _string(self) -> str:
        return self._take(self._scalar("Q")).decode("utf-8", "replace")

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise ValueError(f"a value of its header, at byte {self._at}, ends beyond the end of the file")
        data = self._data[self._at : end]
        self._at = end
        return data
