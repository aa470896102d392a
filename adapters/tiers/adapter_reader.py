"""Reader of adapter files into tensors of the served dtype, and the types of adapters in host memory."""

import hashlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import BinaryIO

import torch
from torch import Tensor

from adapters.checkpoint import AdapterCheckpoint, TensorSpan
from adapters.manifest import NO_LAYER, AdapterError
from kernels.dtypes import FILE_DTYPES

# Function that returns the base model's `[vocab, hidden]` embed_tokens or lm_head, in the served dtype, on the CPU.
BaseTensor = Callable[[str], Tensor]
# Copies of base weights in adapters are read and compared in pieces of this many bytes.
PIECE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class LoraModule:
    """LoRA on a projection of a layer: y += scale * (x a^T) b^T. a: `[r, in]`, b: `[out, r]`, in the cache's dtype.

    The x of an embedding is one-hot, so the token's column of a takes the place of x a^T.
    """

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """An adapter in host memory. rank: the largest of its modules; num_bytes: size of its tensors in this cache;
    invocation: see `AdapterManifest`.
    """

    digest: str
    rank: int
    modules: Mapping[tuple[int, str], LoraModule]
    num_bytes: int
    invocation: tuple[int, ...] = ()

    @property
    def rank_in_layers(self) -> int:
        """Return the largest rank of its modules in decoder layers; 1 if it has none there."""
        return max((len(m.a) for (layer, _), m in self.modules.items() if layer != NO_LAYER), default=1)


class AdapterReader:
    """Reader of adapters. Thread-safe.

    base_tensor: returns the base model's embedding or head, to which an adapter's copy is compared; without it,
    adapters with a copy are refused.
    """

    def __init__(self, dtype: torch.dtype, base_tensor: BaseTensor | None = None) -> None:
        self._dtype, self._base_tensor = dtype, base_tensor
        self._base_hashes: dict[str, bytes] = {}
        self._base_lock = threading.Lock()

    def read(self, checkpoint: AdapterCheckpoint, size: int) -> HostAdapter:
        """Return an adapter's tensors. size: their bytes in this dtype. Raises AdapterError, OSError."""
        with checkpoint.weights_path.open("rb") as file:
            for name, span in checkpoint.base_copies.items():
                self._compare(name, file, span)
            modules = {
                # Make each rank's column of b contiguous, as the pages store it.
                key: LoraModule(
                    self._tensor(file, module.a), self._tensor(file, module.b).T.contiguous().T, module.scale
                )
                for key, module in checkpoint.modules.items()
            }
        return HostAdapter(checkpoint.digest, checkpoint.rank, modules, size, checkpoint.manifest.invocation)

    def _compare(self, name: str, file: BinaryIO, span: TensorSpan) -> None:
        """Compare a copy of the base model's embedding or head by hash, in pieces, so that neither is held whole."""
        if self._base_tensor is None:
            raise AdapterError(span.name, f"cannot be compared with the base model's {name} here; save without it")
        dtype, found = FILE_DTYPES[span.dtype], hashlib.sha256()
        for start in range(span.start, span.end, PIECE_BYTES):
            piece = self._read_bytes(file, span, start, min(start + PIECE_BYTES, span.end))
            found.update(_raw(torch.frombuffer(piece, dtype=dtype).to(self._dtype)))
        if found.digest() != self._base_hash(name):
            raise AdapterError(span.name, f"differs from the base model's {name}; trained embeddings are not served")

    def _base_hash(self, name: str) -> bytes:
        """Return the hash of the base model's tensor, computed once, because the tensor itself takes gigabytes."""
        assert self._base_tensor is not None
        with self._base_lock:
            if name not in self._base_hashes:
                found = hashlib.sha256()
                for piece in self._base_tensor(name).flatten().split(PIECE_BYTES):
                    found.update(_raw(piece))
                self._base_hashes[name] = found.digest()
            return self._base_hashes[name]

    def _read_bytes(self, file: BinaryIO, span: TensorSpan, start: int, end: int) -> bytearray:
        data = bytearray(end - start)
        file.seek(start)
        if file.readinto(data) != len(data):  # type: ignore[attr-defined]
            raise AdapterError(span.name, "the file was cut off while it was read")
        return data

    def _tensor(self, file: BinaryIO, span: TensorSpan) -> Tensor:
        data = self._read_bytes(file, span, span.start, span.end)
        tensor = torch.frombuffer(data, dtype=FILE_DTYPES[span.dtype]).view(span.shape)
        if tensor.dtype is self._dtype:
            return tensor
        tensor = tensor.to(self._dtype)
        # Other dtypes hold every finite value that an adapter may have (`adapters.checkpoint`). The check takes four
        # times as long as the conversion.
        if self._dtype is torch.float16 and not torch.isfinite(tensor).all():
            raise AdapterError(span.name, f"holds values too large for {self._dtype}")
        return tensor


def _raw(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor's values in order. Negative zeros become zeros, because the two compare equal."""
    return (tensor + 0).contiguous().view(torch.uint8).numpy().data
