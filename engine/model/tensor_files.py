"""Tensor files in mapped memory, whose pages are released to the system as soon as they are copied.

The reader of a format checks the file's header against the file's size, then returns the place of each tensor. A model
is never in memory twice: not as file pages beside tensors, and not as a whole in another dtype. Numbers that are NaN or
infinite are refused where they are read. Errors about a tensor are `FILE: tensor NAME: problem`.
"""

import math
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from adapters.safetensors_header import Entry, HeaderError, read_header
from kernels.dtypes import FILE_DTYPES, RAW_DTYPES
from kernels.weights import LinearWeights
from wire.errors import ConfigError

CHUNK_BYTES = 32 << 20
NOT_FINITE = "holds NaN or infinity"
_MAX_HEADER_BYTES = 256 << 20


class WeightsFile(Protocol):
    """A file of tensors under the names of a Hugging Face checkpoint."""

    @property
    def path(self) -> Path: ...

    @property
    def entries(self) -> Mapping[str, Entry]: ...

    def own_name(self, name: str) -> str:
        """Return the file's own name for a tensor, present or missing."""
        ...

    def read(self, name: str, out: Tensor) -> None:
        """Copy a tensor into `out`, of its shape and any dtype and device. Raises ConfigError for damaged data."""
        ...

    def stored(self, name: str) -> LinearWeights | None:
        """Return a matrix in a scheme of `kernels.weights` if the file stores it in one, else None. Raises ConfigError
        for damaged data.
        """
        ...

    def raw(self, name: str) -> Tensor:
        """Return a tensor as it is stored, on the host. Raises ConfigError for a dtype that is not served."""
        ...

    def close(self) -> None: ...


def damaged(path: Path, problem: str) -> ConfigError:
    return ConfigError("model", f"{path} is damaged or cut off: {problem}")


def tensor_error(path: Path, name: str, problem: str, field: str = "model") -> ConfigError:
    """Return the error about a tensor. name: the file's own."""
    return ConfigError(field, f"{path}: tensor {name}: {problem}")


def is_finite(values: Tensor) -> bool:
    """Return whether no value is NaN or infinite, without a temporary tensor of their size."""
    if values.dtype == torch.float8_e4m3fn:  # it has no infinity; its NaNs are the bytes 0x7f and 0xff
        return bool(values.view(torch.int8).max() < 0x7F and values.view(torch.uint8).max() < 0xFF)
    return not values.is_floating_point() or all(math.isfinite(end) for end in torch.aminmax(values))


class MappedFile:
    """The bytes of a file. Raises ConfigError for a file that cannot be opened or is empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                if not os.fstat(file.fileno()).st_size:
                    raise damaged(path, "it is empty")
                # Copy-on-write, because torch requires writable memory. Nothing writes to it.
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise ConfigError("model", f"{path} cannot be read: {error.strerror}") from None
        if self.data[:20] == b"version https://git-":
            raise ConfigError("model", f"{path} is a Git LFS pointer and not the file itself: run git lfs pull")

    def rows(self, entry: Entry) -> Iterator[tuple[int, int, Tensor]]:
        """Yield a tensor's bytes some rows at a time: first row, end row (exclusive), uint8 `[rows, bytes of a row]`.

        The pages of the yielded rows are released to the system when the next rows are requested. Raises ConfigError
        for numbers that are NaN or infinite.
        """
        dtype = RAW_DTYPES.get(entry.dtype)
        num_rows = entry.shape[0] if entry.shape else 1
        row_bytes = entry.num_bytes // num_rows
        step = max(1, CHUNK_BYTES // row_bytes)
        for first in range(0, num_rows, step):
            last = min(first + step, num_rows)
            start, size = entry.start + first * row_bytes, (last - first) * row_bytes
            data = torch.frombuffer(self.data, dtype=torch.uint8, count=size, offset=start)
            if dtype is not None and not is_finite(data.view(dtype)):
                raise tensor_error(self.path, entry.name, NOT_FINITE)
            yield first, last, data.view(-1, row_bytes)
            self._release(start, start + size)

    def _release(self, start: int, end: int) -> None:
        if hasattr(mmap, "MADV_DONTNEED"):
            start -= start % mmap.PAGESIZE
            self.data.madvise(mmap.MADV_DONTNEED, start, end - start)

    def close(self) -> None:
        with suppress(BufferError):  # a traceback may hold a view; the map is freed with it
            self.data.close()


class SafetensorsFile:
    """A `.safetensors` file. Raises ConfigError if it is truncated or damaged, or if a tensor's dtype is not served."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = MappedFile(path)
        self.entries = self._read_header()

    def own_name(self, name: str) -> str:
        return name

    def read(self, name: str, out: Tensor) -> None:
        entry = self.entries[name]
        dtype = self._dtype(entry, FILE_DTYPES)
        if out.is_meta:  # a model's size does not depend on the values
            return
        out = out.view(entry.shape[0], -1)
        for first, last, data in self._file.rows(entry):
            out[first:last].copy_(data.view(dtype))

    def stored(self, name: str) -> LinearWeights | None:
        return None

    def raw(self, name: str) -> Tensor:
        entry = self.entries[name]
        dtype = self._dtype(entry, RAW_DTYPES)
        parts = [data.clone() for _, _, data in self._file.rows(entry)] if entry.num_bytes else []
        data = torch.cat(parts).flatten() if parts else torch.empty(0, dtype=torch.uint8)
        return data.view(dtype).view(entry.shape)

    def close(self) -> None:
        self._file.close()

    def _dtype(self, entry: Entry, served: Mapping[str, torch.dtype]) -> torch.dtype:
        """Return a tensor's dtype. Raises ConfigError for one that is not served."""
        if entry.dtype not in served:
            problem = f"dtype {entry.dtype} is not served; expected one of {', '.join(served)}"
            raise tensor_error(self.path, entry.name, problem)
        return served[entry.dtype]

    def _read_header(self) -> dict[str, Entry]:
        path, data = self._file.path, self._file.data
        try:
            return {entry.name: entry for entry in read_header(data, len(data), _MAX_HEADER_BYTES)}
        except HeaderError as error:
            if error.tensor is not None:
                raise tensor_error(path, error.tensor, error.problem) from None
            raise ConfigError("model", f"{path}: {error.problem}") from None
