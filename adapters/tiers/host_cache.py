"""Host-memory tier of adapters: torch tensors, evicted in least-recently-used order, within a limit in bytes.

Loads run on a few threads that tenants share fairly, so only `add_path` blocks its caller. Thread-safe.
"""

import errno
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path

import torch

from adapters.checkpoint import AdapterCheckpoint
from adapters.fair_threads import FairThreads, Yielding
from adapters.manifest import NO_LAYER, AdapterError, AdapterNotFound, BaseShape
from adapters.store import AdapterStore
from adapters.tiers.adapter_reader import AdapterReader, BaseTensor, HostAdapter
from adapters.tiers.device_size import refusal
from adapters.tiers.failed_loads import FailedLoads
from adapters.tiers.mixing import Mixtures, PartHeader, check_parts, mix
from adapters.tiers.state import HostCacheStats, LoadResult
from adapters.verified_files import VerifiedFiles
from wire.bounded_dict import BoundedDict
from wire.mixtures import Mixture

# Queued loads in all and per tenant; more are refused.
MAX_PENDING, MAX_PENDING_PER_TENANT = 1024, 64
# Maximum wait of a load, which occupies a thread, for an adapter in use to be unpinned.
ROOM_SECONDS = 30.0
# Number of digests whose last requesting tenant is remembered.
MAX_ASKED = 4096
LIMITLESS = 1 << 62
# A heavy tenant's loads run at low priority.
YIELDING = Yielding()
# Queue of `register` among those of the tenants; no tenant has this name.
FOLDERS = "\n"


class HostCache:
    """Adapters by digest, from a store or from folders registered with `add_path`.

    max_bytes limits the tensors held and being read; None: `limit_to` sets it. Pinned adapters are never evicted. A
    load that could only evict pinned adapters waits on its thread, for at most ROOM_SECONDS. So if other tenants' loads
    occupy all threads, they delay a tenant's load by at most that and one read. base_tensor: returns the base model's
    embedding or head, to which an adapter's copy is compared; without it, adapters with a copy are refused.
    """

    def __init__(
        self,
        store: AdapterStore | None,
        base: BaseShape,
        max_bytes: int | None,
        dtype: torch.dtype,
        num_threads: int = 3,
        base_tensor: BaseTensor | None = None,
        ended: Callable[[LoadResult, float], object] = lambda *_: None,
        yielding: Yielding = YIELDING,
    ) -> None:
        """ended: called on the load's thread with each load's result and the seconds since its start. yielding: how
        a heavy tenant's loads yield to the steps.
        """
        self._reader, self._ended = AdapterReader(dtype, base_tensor), ended
        self._store, self._base, self._max_bytes, self._dtype = store, base, max_bytes or 0, dtype
        self._changed = threading.Condition()
        self._resident: OrderedDict[str, HostAdapter] = OrderedDict()  # least recently used first
        self._loads: dict[str, Future[HostAdapter]] = {}
        self._pins: Counter[str] = Counter()
        self._dropped: set[str] = set()
        self._paths: dict[str, Path] = {}
        self._num_bytes = self._num_loads = self._num_evictions = 0
        self.version = 0  # changes with the set of adapters held
        self._closed = False
        self._max_rank = self._max_embedding_head_bytes = LIMITLESS
        # Number of calls of `fetch` that wait for each digest's load, by tenant, and the last tenant of each digest.
        self._askers: dict[str, Counter[str]] = {}
        self._asked = BoundedDict[str, str](MAX_ASKED)
        self._failed = FailedLoads()
        self._verified = VerifiedFiles()
        self._mixtures = Mixtures(self._max_bytes)
        self._has_reservation: Callable[[str], bool] = lambda _: False
        self._threads = FairThreads(
            num_threads,
            "adapter-load",
            max_pending=MAX_PENDING,
            max_pending_per_tenant=MAX_PENDING_PER_TENANT,
            yielding=yielding,
        )

    def limit_to(self, max_bytes: int) -> None:
        """Set the limit of the tensors held, before the first load, unless the constructor got one."""
        with self._changed:
            if not self._max_bytes:
                self._max_bytes, self._mixtures = max_bytes, Mixtures(max_bytes)

    def refuse_beyond(self, *, max_rank: int, max_embedding_head_bytes: int) -> None:
        """Refuse, before they are read, adapters that the device tier could not place.

        max_embedding_head_bytes: bytes of tensors on embed_tokens and lm_head.
        """
        self._max_rank, self._max_embedding_head_bytes = max_rank, max_embedding_head_bytes

    def keep_reserved(self, has_reservation: Callable[[str], bool]) -> None:
        """Keep a mixture with a device reservation when its tenant's other mixtures need room.

        Otherwise each of them evicts it, and its reserved pages stay empty while it is made again. A tenant has one
        reservation. has_reservation: tells this by the digest; called on any thread.
        """
        self._has_reservation = has_reservation

    def get(self, digest: str) -> HostAdapter | None:
        """Return the adapter if it is in the cache, and mark it as used."""
        with self._changed:
            return self._touch(digest)

    def fetch(
        self, digest: str, tenant_id: str = "", weight: float | None = None, *, bounded: bool = True
    ) -> "Future[HostAdapter]":
        """Load an adapter. Calls for one digest share one load and one future: call `stop_waiting`, never cancel it.

        The future raises AdapterNotFound (no such adapter), AdapterError (cannot be served, or damaged) or OSError. The
        last two are remembered: see `FailedLoads`. tenant_id: the tenant whose queue the load joins, and that pays for
        the load if its turn comes first. weight, bounded: see `FairThreads.submit`. Raises TooManyPending unless
        `bounded` is false.
        """
        with self._changed:
            self._dropped.discard(digest)
            adapter, error = self._touch(digest), self._failed.get(digest)
            if adapter is not None or error is not None:
                done: Future[HostAdapter] = Future()
                if adapter is not None:
                    done.set_result(adapter)
                elif error is not None:
                    done.set_exception(error.with_traceback(None))
                return done
            load = self._loads.get(digest)
            if load is None or load.done():  # done without a run: cancelled, or no thread could be started
                work = partial(self._load, digest)
                load = self._loads[digest] = self._threads.submit(tenant_id, work, bounded=bounded, weight=weight)
                self._askers[digest] = Counter()
            else:
                self._threads.share(tenant_id, load, weight=weight)
            self._askers[digest][tenant_id] += 1
            self._asked.put(digest, tenant_id)
            return load

    def stop_waiting(self, digest: str, tenant_id: str, load: "Future[HostAdapter]") -> None:
        """Undo the `fetch` of this tenant that returned `load`.

        A load that has not begun leaves the queue of a tenant without other waiting calls, and is dropped if no tenant
        has any.
        """
        with self._changed:
            if self._loads.get(digest) is not load:
                return
            askers = self._askers[digest]
            askers[tenant_id] -= 1
            if askers[tenant_id]:
                return
            del askers[tenant_id]
            if askers:
                self._threads.withdraw(tenant_id, load)
            elif load.cancel() or load.done():  # done without a run: no thread could be started
                del self._loads[digest], self._askers[digest]
                self._dropped.discard(digest)

    def pin(self, digest: str) -> None:
        """Protect an adapter from eviction until `unpin` has been called as often as `pin`. The adapter need not be
        loaded yet.
        """
        with self._changed:
            self._pins[digest] += 1

    def unpin(self, digest: str) -> None:
        """Undo one `pin`. Raises KeyError if the adapter is not pinned."""
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
        """Remove an adapter and its folder; its memory is freed now, or when it is unpinned.

        Ignores unknown digests.
        """
        with self._changed:
            self._paths.pop(digest, None)
            if digest in self._loads or digest in self._pins:
                self._dropped.add(digest)
            else:
                self._evict(digest)
            self._changed.notify_all()

    def add_path(self, path: str | Path) -> str:
        """Register an adapter folder outside the store and return its digest. Reads the whole file.

        The folder must not change, because it is read again after an eviction. Raises AdapterError, OSError.
        """
        checkpoint = self._verified.name(Path(path).absolute())
        self._check(checkpoint)
        with self._changed:
            self._paths[checkpoint.digest] = checkpoint.folder
            self._failed.forget(checkpoint.digest)
        return checkpoint.digest

    def register(self, path: str) -> "Future[str]":
        """Call `add_path` on a loading thread, at low priority if it takes long, so that steps keep the cores."""
        return self._threads.submit(FOLDERS, partial(self.add_path, path), bounded=False, rests=False)

    def add_mixture(self, mixture: Mixture) -> None:
        """Make a mixture loadable by its digest until `remove_mixture`."""
        with self._changed:
            self._mixtures.add(mixture)

    def remove_mixture(self, digest: str) -> None:
        """Free a mixture that no request uses. It is made again from its parts when it is next needed."""
        with self._changed:
            self._mixtures.remove(digest)
        self.drop(digest)

    def held(self, limit: int) -> list[str]:
        """Return the digests of the adapters held, at most the `limit` most recently used ones."""
        with self._changed:
            return list(islice(reversed(self._resident), limit))

    def stats(self) -> HostCacheStats:
        with self._changed:
            return HostCacheStats(
                len(self._resident), self._num_bytes, self._max_bytes, self._num_loads, self._num_evictions
            )

    def close(self) -> None:
        """Stop the threads; running loads that wait for room fail with AdapterError."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._threads.close()

    def _load(self, digest: str) -> HostAdapter:
        started = time.monotonic()
        try:
            with self._changed:
                mixture = self._mixtures.get(digest)
            adapter = self._load_stored(digest) if mixture is None else self._mix(mixture)
            self._ended("loaded", time.monotonic() - started)
            return adapter
        except BaseException as exc:
            with self._changed:
                if not self._closed:
                    self._failed.add(digest, exc)
            self._ended(_result(exc), time.monotonic() - started)
            raise
        finally:
            with self._changed:
                del self._loads[digest]
                self._askers.pop(digest, None)
                if digest not in self._resident:
                    self._dropped.discard(digest)

    def _load_stored(self, digest: str) -> HostAdapter:
        with self._open(digest) as checkpoint:
            size = self._check(checkpoint)
            return self._hold(digest, size, lambda: self._reader.read(checkpoint, size))

    def _mix(self, mixture: Mixture) -> HostAdapter:
        """Make a mixture of its parts, which are loaded on this thread and stay in the cache like other adapters."""
        digests = [digest for digest, _ in mixture.parts]
        # The headers are checked first: the sum of the ranks also bounds the memory of the parts.
        check_parts([(digest, self._header(digest)) for digest in digests], self._max_rank)
        parts = [(self.get(digest) or self._load_stored(digest), weight) for digest, weight in mixture.parts]
        size = sum(part.num_bytes for part, _ in parts)
        # A larger one would be evicted as soon as it is made, and loaded again for ever.
        if size > self._mixtures.share:
            raise AdapterError("mixture", f"takes {size} bytes of host memory, the limit is {self._mixtures.share}")
        with self._changed:
            tenant_id = self._asked.get(mixture.digest, "")
            self._evict_mixtures(tenant_id, size)
        mixed = self._hold(mixture.digest, size, lambda: mix(mixture.digest, parts))
        with self._changed:
            if mixture.digest in self._resident:
                self._mixtures.hold(tenant_id, mixture.digest, size)
            # Other threads may have made some of the tenant's mixtures at the same time.
            self._evict_mixtures(tenant_id, 0)
        return mixed

    def _evict_mixtures(self, tenant_id: str, size: int) -> None:
        for digest in self._mixtures.surplus(tenant_id, size, self._has_reservation):
            self._evict(digest)

    def _header(self, digest: str) -> PartHeader:
        adapter = self.get(digest)
        if adapter is not None:
            return PartHeader({key: len(module.a) for key, module in adapter.modules.items()}, adapter.invocation)
        with self._open(digest) as checkpoint:
            ranks = {key: module.rank for key, module in checkpoint.modules.items()}
            return PartHeader(ranks, checkpoint.manifest.invocation)

    def _hold(self, digest: str, size: int, make: Callable[[], HostAdapter]) -> HostAdapter:
        """Reserve room for an adapter, make it, add it to the cache and return it. If another thread has added the same
        adapter, return that one.
        """
        self._reserve(size)
        try:
            adapter = make()
        except BaseException:
            with self._changed:
                self._num_bytes -= size
                self._changed.notify_all()
            raise
        with self._changed:
            if digest in self._resident:
                self._num_bytes -= size
            adapter = self._resident.setdefault(digest, adapter)
            self._num_loads += 1
            self.version += 1
            if digest in self._dropped and digest not in self._pins:
                self._evict(digest)
            self._changed.notify_all()
        return adapter

    def _open(self, digest: str) -> AbstractContextManager[AdapterCheckpoint]:
        with self._changed:
            folder = self._paths.get(digest)
        if folder is not None:
            return nullcontext(self._verified.open(folder, digest))
        if self._store is not None:
            return self._verified.use(self._store, digest)
        raise AdapterNotFound("adapter", f"no adapter with digest {digest}")

    def _check(self, checkpoint: AdapterCheckpoint) -> int:
        """Return the adapter's bytes in host memory.

        Raises AdapterError if it is for another base model or too large.
        """
        checkpoint.check_base(self._base)
        sizes: Counter[bool] = Counter()
        for (layer, _), module in checkpoint.modules.items():
            elements = sum(span.shape[0] * span.shape[1] for span in (module.a, module.b))
            sizes[layer == NO_LAYER] += elements * self._dtype.itemsize
        error = refusal(
            checkpoint.rank,
            sizes[True],
            max_rank=self._max_rank,
            max_embedding_head_bytes=self._max_embedding_head_bytes,
        )
        if error is not None:
            raise error
        if sizes.total() > self._max_bytes:
            raise AdapterError("adapter", f"takes {sizes.total()} bytes of host memory, the limit is {self._max_bytes}")
        return sizes.total()

    def _reserve(self, size: int) -> None:
        """Count `size` more bytes, after evicting adapters until they fit. Waits for an unpin if all others are pinned.

        Raises OSError if none is unpinned within ROOM_SECONDS.
        """
        deadline = time.monotonic() + ROOM_SECONDS
        with self._changed:
            while self._num_bytes + size > self._max_bytes:
                if self._closed:
                    raise AdapterError("adapter", "the server is shutting down")
                victim = next((digest for digest in self._resident if digest not in self._pins), None)
                if victim is not None:
                    self._evict(victim)
                elif not self._changed.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    raise OSError(errno.ENOMEM, "host memory is full of adapters that running requests use")
            self._num_bytes += size

    def _touch(self, digest: str) -> HostAdapter | None:
        adapter = self._resident.get(digest)
        if adapter is not None:
            self._resident.move_to_end(digest)
        return adapter

    def _evict(self, digest: str) -> None:
        self._dropped.discard(digest)
        adapter = self._resident.pop(digest, None)
        if adapter is not None:
            self._mixtures.evicted(digest)
            self._num_bytes -= adapter.num_bytes
            self._num_evictions += 1
            self.version += 1


def _result(error: BaseException) -> LoadResult:
    if isinstance(error, AdapterNotFound):
        return "missing"
    return "refused" if isinstance(error, AdapterError) else "failed"
