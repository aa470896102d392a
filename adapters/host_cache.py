"""The host-memory tier: adapters as torch tensors, least recently used out first, never past a bound in bytes.

Loads run on a few threads of its own, so nothing here blocks the step loop but `add_path`. Safe for threads.
"""

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from adapters.checkpoint import Checkpoint, TensorSpan, open_checkpoint
from adapters.manifest import OUTSIDE, AdapterError, AdapterNotFound, BaseShape
from adapters.store import Store

BaseTensor = Callable[[str], Tensor]
"""The base model's `[vocab, hidden]` embed_tokens or lm_head, in the dtype that is served, on the CPU."""

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoraModule:
    """One projection of one layer: y += scale * (x a^T) b^T. a: `[r, in]`, b: `[out, r]`, in the cache's dtype.

    An embedding's is the same with one-hot x: a's column of the token takes the place of x a^T.
    """

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """An adapter in host memory. rank: the largest of its modules; num_bytes: of its tensors as held here."""

    digest: str
    rank: int
    modules: Mapping[tuple[int, str], LoraModule]
    num_bytes: int

    @property
    def rank_in_layers(self) -> int:
        """The largest rank of its modules in decoder layers; 1 if it has none there."""
        return max((len(m.a) for (layer, _), m in self.modules.items() if layer != OUTSIDE), default=1)


@dataclass(frozen=True, slots=True)
class HostCacheStats:
    num_adapters: int
    num_bytes: int
    max_bytes: int
    loads: int
    evictions: int


class HostCache:
    """Adapters by digest, from a store or from folders named with `add_path`.

    max_bytes bounds the tensors held and being read. Pinned adapters are never evicted; a load that finds no room but
    theirs waits until one is unpinned (its thread too, so the loads behind it may wait). base_tensor: what copies of
    the base model's embedding and head in adapters are compared with; without it such adapters are refused.
    """

    def __init__(
        self,
        store: Store | None,
        base: BaseShape,
        max_bytes: int,
        dtype: torch.dtype,
        num_threads: int = 2,
        base_tensor: BaseTensor | None = None,
        failed: Callable[[], object] = lambda: None,
    ) -> None:
        """failed: called, on the load's own thread, for each load that fails."""
        self._base_tensor, self._failed = base_tensor, failed
        self._store, self._base, self._max_bytes, self._dtype = store, base, max_bytes, dtype
        self._changed = threading.Condition()
        self._resident: OrderedDict[str, HostAdapter] = OrderedDict()  # least recently used first
        self._loads: dict[str, Future[HostAdapter]] = {}
        self._pins: Counter[str] = Counter()
        self._dropped: set[str] = set()
        self._paths: dict[str, Path] = {}
        self._num_bytes = self._num_loads = self._num_evictions = 0
        self._closed = False
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="adapter-load")

    def get(self, digest: str) -> HostAdapter | None:
        """The adapter if it is here; marks it as used."""
        with self._changed:
            return self._touch(digest)

    def fetch(self, digest: str) -> "Future[HostAdapter]":
        """Brings an adapter; calls for one digest share one load and one future, so don't cancel it.

        The future raises AdapterNotFound (no such adapter), AdapterError (one we can't serve, or damaged) or OSError.
        A failure isn't remembered: the next call tries again.
        """
        with self._changed:
            self._dropped.discard(digest)
            adapter = self._touch(digest)
            if adapter is not None:
                done: Future[HostAdapter] = Future()
                done.set_result(adapter)
                return done
            load = self._loads.get(digest)
            if load is None or load.cancelled():
                load = self._loads[digest] = self._threads.submit(self._load, digest)
            return load

    def pin(self, digest: str) -> None:
        """Keeps an adapter from eviction, from now or from its arrival, until as many calls of unpin."""
        with self._changed:
            self._pins[digest] += 1

    def unpin(self, digest: str) -> None:
        """Raises KeyError if it isn't pinned."""
        with self._changed:
            if digest not in self._pins:
                raise KeyError(digest)
            self._pins[digest] -= 1
            if not self._pins[digest]:
                del self._pins[digest]
                if digest in self._dropped:
                    self._evict(digest)
            self._changed.notify_all()

    def drop(self, digest: str) -> None:
        """Forgets an adapter and its folder; its memory goes now, or when it is unpinned. Unknown digests are fine."""
        with self._changed:
            self._paths.pop(digest, None)
            if digest in self._loads or digest in self._pins:
                self._dropped.add(digest)
            else:
                self._evict(digest)
            self._changed.notify_all()

    def add_path(self, path: str | Path) -> str:
        """Makes an adapter folder outside the store known and returns its digest. Reads all of the file.

        The folder must stay as it is: it is read again after an eviction. Raises AdapterError, OSError.
        """
        checkpoint = open_checkpoint(Path(path).absolute())
        self._check(checkpoint)
        with self._changed:
            self._paths[checkpoint.digest] = checkpoint.folder
        return checkpoint.digest

    def stats(self) -> HostCacheStats:
        with self._changed:
            return HostCacheStats(
                len(self._resident), self._num_bytes, self._max_bytes, self._num_loads, self._num_evictions
            )

    def close(self) -> None:
        """Ends the threads; loads under way that wait for room fail with AdapterError."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _load(self, digest: str) -> HostAdapter:
        try:
            checkpoint = self._open(digest)
            size = self._check(checkpoint)
            self._reserve(size)
            try:
                adapter = self._read(checkpoint, size)
            except BaseException:
                with self._changed:
                    self._num_bytes -= size
                    self._changed.notify_all()
                raise
            with self._changed:
                self._resident[digest] = adapter
                self._num_loads += 1
                if digest in self._dropped and digest not in self._pins:
                    self._evict(digest)
                self._changed.notify_all()
            return adapter
        except BaseException:
            self._failed()
            raise
        finally:
            with self._changed:
                del self._loads[digest]
                if digest not in self._resident:
                    self._dropped.discard(digest)

    def _open(self, digest: str) -> Checkpoint:
        with self._changed:
            folder = self._paths.get(digest)
        if folder is None and self._store is not None:
            folder = self._store.path(digest)
        if folder is None:
            raise AdapterNotFound("adapter", f"no adapter with digest {digest}")
        checkpoint = open_checkpoint(folder)
        if checkpoint.digest != digest:
            raise AdapterError("adapter", f"its files have changed since it was named {digest}")
        return checkpoint

    def _check(self, checkpoint: Checkpoint) -> int:
        """Bytes that the adapter takes here. Raises AdapterError for another base model's, or one too large."""
        checkpoint.check_base(self._base)
        spans = [span for module in checkpoint.modules.values() for span in (module.a, module.b)]
        size = sum(span.shape[0] * span.shape[1] for span in spans) * self._dtype.itemsize
        if size > self._max_bytes:
            raise AdapterError("adapter", f"takes {size} bytes of host memory, the limit is {self._max_bytes}")
        return size

    def _reserve(self, size: int) -> None:
        """Evicts until size more bytes fit and counts them; waits for an unpin when only pinned ones are left."""
        with self._changed:
            while self._num_bytes + size > self._max_bytes:
                if self._closed:
                    raise AdapterError("adapter", "the server is shutting down")
                victim = next((digest for digest in self._resident if digest not in self._pins), None)
                if victim is not None:
                    self._evict(victim)
                else:
                    self._changed.wait()
            self._num_bytes += size

    def _read(self, checkpoint: Checkpoint, size: int) -> HostAdapter:
        with checkpoint.weights_path.open("rb") as file:
            for name, span in checkpoint.base_copies.items():
                self._compare(name, self._tensor(file, span), span)
            modules = {
                # b's column of a rank in one piece, as the pages take it.
                key: LoraModule(
                    self._tensor(file, module.a), self._tensor(file, module.b).T.contiguous().T, module.scale
                )
                for key, module in checkpoint.modules.items()
            }
        return HostAdapter(checkpoint.digest, checkpoint.rank, modules, size)

    def _compare(self, name: str, copy: Tensor, span: TensorSpan) -> None:
        if self._base_tensor is None:
            raise AdapterError(span.name, f"a copy of the base model's {name} can't be checked here; save without it")
        if not torch.equal(copy, self._base_tensor(name)):
            raise AdapterError(span.name, f"differs from the base model's {name}; trained embeddings are not served")

    def _tensor(self, file: BinaryIO, span: TensorSpan) -> Tensor:
        data = bytearray(span.end - span.start)
        file.seek(span.start)
        if file.readinto(data) != len(data):  # type: ignore[attr-defined]
            raise AdapterError(span.name, "the file was cut off while it was read")
        tensor = torch.frombuffer(data, dtype=_DTYPES[span.dtype]).view(span.shape)
        if tensor.dtype is not self._dtype:
            tensor = tensor.to(self._dtype)
            if not torch.isfinite(tensor).all():
                raise AdapterError(span.name, f"holds values too large for {self._dtype}")
        return tensor

    def _touch(self, digest: str) -> HostAdapter | None:
        adapter = self._resident.get(digest)
        if adapter is not None:
            self._resident.move_to_end(digest)
        return adapter

    def _evict(self, digest: str) -> None:
        self._dropped.discard(digest)
        adapter = self._resident.pop(digest, None)
        if adapter is not None:
            self._num_bytes -= adapter.num_bytes
            self._num_evictions += 1
