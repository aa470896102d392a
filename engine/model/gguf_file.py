"""The GGUF container, versions 2 and 3: metadata and where each tensor lies, every size checked against the file.

Knows no model. The format: ggml's docs/gguf.md. Read by hand because the `gguf` package's own reader trusts the file
and makes an object of every token of the vocabulary.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from engine.config import ConfigError
from engine.model.weights_file import Entry, MappedFile

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4


@dataclass(frozen=True, slots=True)
class GgufFile:
    """metadata: values as Python's own, arrays as lists. tensors: by ggml's names, shapes as torch has them.

    Raises ConfigError for a file that is none of ours, is cut off or does not fit together.
    """

    file: MappedFile
    metadata: dict[str, Any]
    tensors: dict[str, Entry]

    @classmethod
    def open(cls, path: Path) -> "GgufFile":
        file = MappedFile(path)
        try:
            return cls(file, *_Reader(file).read())
        except (struct.error, ValueError, IndexError, OverflowError) as error:
            file.close()
            raise ConfigError("model", f"{path} is damaged or cut off: {error}") from None
        except ConfigError:
            file.close()
            raise


class _Reader:
    def __init__(self, file: MappedFile) -> None:
        self._path, self._data, self._at = file.path, file.data, 0

    def read(self) -> tuple[dict[str, Any], dict[str, Entry]]:
        if self._data[:4] != b"GGUF":
            raise ConfigError("model", f"{self._path} is not a GGUF file: it does not begin with 'GGUF'")
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
            if begin + offset + size > len(self._data):
                raise ValueError(f"tensor {name} ends behind the end of the file")
            if name in tensors:
                raise ValueError(f"tensor {name} is there twice")
            tensors[name] = Entry(shape, kind, begin + offset, size)
        return metadata, tensors

    def _tensor_info(self) -> tuple[str, tuple[int, ...], str, int, int]:
        name, num_dimensions = self._string(), self._scalar("I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name} has {num_dimensions} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(num_dimensions))[::-1]
        kind, offset = GGMLQuantizationType(self._scalar("I")), self._scalar("Q")
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if min(shape) < 1 or shape[-1] % block:
            raise ValueError(f"tensor {name} has shape {shape} in {kind.name}")
        elements = 1
        for size in shape:
            elements *= size
        return name, shape, kind.name, offset, elements // block * block_bytes

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(self._form(kind))
        kind, count = self._scalar("I"), self._scalar("Q")
        if kind == _STRING:
            if count > len(self._data) // 8:
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
        (value,) = struct.unpack_from("<" + form, self._data, self._at)
        self._at += struct.calcsize("<" + form)
        return value

    def _string(self) -> str:
        return self._take(self._scalar("Q")).decode("utf-8", "replace")

    def _take(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise ValueError(f"a value of {size} bytes ends behind the end of the file")
        data = self._data[self._at : end]
        self._at = end
        return data
