"""Device tier of adapters: rank pages next to the model's weights, pinned while in use, evictable otherwise.

An adapter uses as many pages (`adapters.tiers.pages`) as its own rank needs. The engine thread allocates pages. The
pool's copy thread writes the bytes into pages that no step reads yet, so a load never delays a step. The few adapters
with LoRA on embed_tokens or lm_head have separate tensors for these, within a separate limit.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from adapters.manifest import EMBEDDING, LM_HEAD, OUTSIDE, AdapterError, BaseShape
from adapters.tiers.host_cache import HostAdapter, HostCache
from adapters.tiers.page_writer import PageWriter
from adapters.tiers.pages import PAGE_RANK, RankPages
from kernels.ops import EmbeddingLora, HeadLora, PackedLinear, dense_linear
from kernels.platform import Fence, Lane, platform_of


class Residency(Enum):
    READY = "ready"
    LOADING = "loading"
    NO_ROOM = "no room"
    FAILED = "failed"


@dataclass(slots=True)
class Resident:
    """An adapter that owns pages. `loading`: its copy, None once the pages can be read."""

    slot: int
    pages: list[int]
    outside_bytes: int = 0
    pins: int = 0
    loading: "Future[None] | None" = None


@dataclass(slots=True)
class _Amount:
    """Total resources that some adapters hold or need.

    Updated incrementally, because each waiting request reads it in each step.
    """

    slots: int = 0
    pages: int = 0
    outside_bytes: int = 0

    def add(self, resident: Resident, times: int = 1) -> None:
        self.slots += times
        self.pages += times * len(resident.pages)
        self.outside_bytes += times * resident.outside_bytes

    def remove(self, resident: Resident) -> None:
        self.add(resident, -1)


@dataclass(slots=True)
class _Drain:
    """Reservation for a waiting adapter of the pages that the victims' requests free as they end.

    size: the resources that the waiting adapter needs. victims: adapters that accept no new request. victims_held:
    resources of the victims that a request still uses.
    """

    digest: str
    size: _Amount
    victims: set[str] = field(default_factory=set)
    victims_held: _Amount = field(default_factory=_Amount)


class AdapterPool:
    """Rank pages for one base model on one device.

    memory: bytes for pages; LoRA on embed_tokens and lm_head may use a quarter as much in addition. max_rank: the
    largest accepted rank. dtype: of the pages; the model's dtype, or one of 8 bits. pack: the backend's `pack_linear`.
    lane: the order of copies; None selects the device's own. Raises ValueError if not even one adapter of `max_rank`
    fits.
    """

    def __init__(
        self,
        base: BaseShape,
        host_cache: HostCache,
        *,
        memory: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        pack: Callable[[Tensor], PackedLinear] = dense_linear,
        lane: Lane | None = None,
    ) -> None:
        self._host, self._max_rank, self._pack = host_cache, max_rank, pack
        pages = RankPages(base, memory=memory, max_rank=max_rank, dtype=dtype, device=device)
        self.page_bytes, self.num_pages, self.num_slots = pages.page_bytes, pages.num_pages, pages.num_slots
        self.max_pages = pages.per_adapter
        self.groups, self.page_table, self.ranks, self.page_rank = (
            pages.groups, pages.page_table, pages.ranks, PAGE_RANK
        )  # fmt: skip
        self._max_outside_bytes = memory // 4
        self.embeddings: dict[int, EmbeddingLora] = {}
        self.heads: dict[int, HeadLora] = {}
        # The digest of the weights last written to each slot, "" if there are none. The copy thread sets it from the
        # adapter that it wrote, so the receipt is evidence independent of `_residents`.
        self.slot_digests = [""] * self.num_slots
        # Incremented when the set of resident adapters changes.
        self.residency_version = 0
        self.num_loads = 0
        self.num_evictions = 0
        self._free_pages = list(range(self.num_pages - 1, -1, -1))
        self._free_slots = list(range(self.num_slots - 1, -1, -1))
        self._residents: dict[str, Resident] = {}
        # Each resident is in one of three states: idle, copying or pinned. `_idle` is in order of use, least recent
        # first.
        self._idle: OrderedDict[str, Resident] = OrderedDict()
        self._copying: dict[str, Resident] = {}
        self._pinned_held, self._copying_held, self._all_held = _Amount(), _Amount(), _Amount()
        self._fetching: dict[str, Future[HostAdapter]] = {}
        self._fetched: deque[tuple[str, Future[HostAdapter]]] = deque()  # appended to by the loading threads
        self._errors: dict[str, Exception] = {}
        # Digests that a request waits for, with their sizes once known: counting an adapter's modules takes 20 us.
        self._wanted: dict[str, _Amount | None] = {}
        self._drain: _Drain | None = None
        host_cache.refuse_beyond(max_rank=max_rank, max_outside_bytes=self._max_outside_bytes)
        self._lane = lane or platform_of(device).lane()
        self._writer = PageWriter(self.groups, base.groups, self.page_table, self.ranks, self._lane)
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="adapter-copy")

    @property
    def resident(self) -> list[str]:
        """Return the digests whose pages can be read now."""
        return [digest for digest, r in self._residents.items() if r.loading is None]

    @property
    def num_free_pages(self) -> int:
        return len(self._free_pages)

    @property
    def is_loading(self) -> bool:
        return bool(self._fetching or self._copying)

    def is_resident(self, digest: str) -> bool:
        """Return whether the adapter's pages can be read now."""
        return digest in self._residents and digest not in self._copying

    def ensure(self, digest: str) -> Residency:
        """Return whether the adapter is usable in this step; if not, start loading it. Never blocks."""
        self._wanted.setdefault(digest, None)
        if digest in self._errors:
            return Residency.FAILED
        drain = self._drain
        if drain is not None and digest in drain.victims:
            return Residency.LOADING  # its pages are kept for a tenant that is further behind
        resident = self._residents.get(digest)
        if resident is not None:
            is_idle = resident.pins == 0
            if drain is not None and is_idle and not self._fits_beside_kept(drain, resident):
                return Residency.LOADING
            return Residency.READY if resident.loading is None else Residency.LOADING
        adapter = self._host.get(digest)
        if adapter is None:
            if digest not in self._fetching:
                fetch = self._fetching[digest] = self._host.fetch(digest)
                fetch.add_done_callback(lambda done: self._fetched.append((digest, done)))
            return Residency.LOADING
        if adapter.rank > self._max_rank:
            reason = f"rank {adapter.rank} is over this engine's --max-lora-rank {self._max_rank}"
            self._errors[digest] = AdapterError("adapter", reason)
            return Residency.FAILED
        size = self._size(digest, adapter)
        if size.outside_bytes > self._max_outside_bytes:
            self._errors[digest] = AdapterError(
                "adapter",
                f"its LoRA on embed_tokens and lm_head takes {size.outside_bytes} bytes, "
                f"a quarter of this engine's --adapter-memory is {self._max_outside_bytes}",
            )
            return Residency.FAILED
        if drain is not None and drain.digest != digest:
            return Residency.LOADING  # free pages are kept for another adapter
        return self._place(digest, adapter, size)

    def pin(self, digest: str) -> int:
        """Pin a READY adapter and return its slot."""
        resident = self._residents[digest]
        if not resident.pins:
            del self._idle[digest]
            self._pinned_held.add(resident)
        resident.pins += 1
        return resident.slot

    def unpin(self, digest: str) -> None:
        resident = self._residents[digest]
        resident.pins -= 1
        if not resident.pins:
            self._idle[digest] = resident
            self._pinned_held.remove(resident)
            if self._drain is not None and digest in self._drain.victims:
                self._drain.victims_held.remove(resident)

    def error(self, digest: str) -> Exception:
        """Return and clear the error of `ensure`'s FAILED, so that the next request tries again.

        An AdapterError means that the adapter itself is at fault.
        """
        return self._errors.pop(digest)

    def drain_for(self, digest: str, furthest_ahead: list[str]) -> None:
        """Reserve the pages of other adapters for `digest`, in the order of `furthest_ahead`, until it fits.

        These adapters accept no new request until `digest` has its pages. An idle adapter beside which `digest` would
        not fit accepts none either.
        """
        if self._drain is not None:
            return
        adapter = self._host.get(digest)
        if adapter is None:
            return
        self._drain = drain = _Drain(digest, self._size(digest, adapter))
        for victim in dict.fromkeys(furthest_ahead):
            if self._fits_beside_kept(drain):
                break
            drain.victims.add(victim)
            resident = self._residents.get(victim)
            if resident is not None and resident.pins:
                drain.victims_held.add(resident)

    def no_longer_wanted(self, digest: str) -> None:
        """Drop the adapter's drain and error after its last waiting request has left."""
        self._fetching.pop(digest, None)
        self._wanted.pop(digest, None)
        self._errors.pop(digest, None)
        if self._drain is not None and self._drain.digest == digest:
            self._drain = None

    def evict(self, digest: str) -> bool:
        """Free the adapter's pages. Returns False while a request uses them."""
        resident = self._residents.get(digest)
        if resident is None:
            return True
        if resident.pins or resident.loading is not None:
            return False
        del self._residents[digest]
        del self._idle[digest]
        self._all_held.remove(resident)
        self._free_pages.extend(reversed(resident.pages))
        self._free_slots.append(resident.slot)
        self.slot_digests[resident.slot] = ""
        self.embeddings.pop(resident.slot, None)
        self.heads.pop(resident.slot, None)
        self.num_evictions += 1
        self.residency_version += 1
        return True

    def poll(self) -> None:
        """Process finished fetches and copies. The engine thread calls it before it schedules."""
        while self._fetched:
            digest, fetched = self._fetched.popleft()
            if self._fetching.get(digest) is not fetched:
                continue  # its last request has left
            del self._fetching[digest]
            error = fetched.exception()
            if error is not None:
                self._errors[digest] = error if isinstance(error, Exception) else RuntimeError(repr(error))
        for digest, resident in list(self._copying.items()):
            if resident.loading is not None and resident.loading.done():
                error = resident.loading.exception()
                resident.loading = None
                del self._copying[digest]
                self._copying_held.remove(resident)
                self._idle[digest] = resident
                if error is not None:
                    if digest in self._wanted:  # otherwise a later request would get another request's error
                        self._errors[digest] = RuntimeError(f"copy to the device failed: {error}")
                    self.evict(digest)
                self.num_loads += 1
                self.residency_version += 1

    def close(self) -> None:
        self._copier.shutdown(wait=True, cancel_futures=True)

    def _size(self, digest: str, adapter: HostAdapter) -> _Amount:
        size = self._wanted.get(digest)
        if size is None:
            size = _Amount(1, -(-adapter.rank_in_layers // PAGE_RANK), _outside_bytes(adapter))
            if digest in self._wanted:
                self._wanted[digest] = size
        return size

    def _fits_beside_kept(self, drain: _Drain, idle: Resident | None = None) -> bool:
        """Return whether the waiting adapter fits beside those that stay in use until then, and beside `idle`."""
        pinned, leaving = self._pinned_held, drain.victims_held
        held = _Amount(
            pinned.slots - leaving.slots, pinned.pages - leaving.pages, pinned.outside_bytes - leaving.outside_bytes
        )
        if idle is not None:
            held.add(idle)
        return self._fits(drain.size, held)

    def _fits(self, *held: _Amount) -> bool:
        """Return whether the pool has room for all of these together."""
        return (
            sum(h.slots for h in held) <= self.num_slots
            and sum(h.pages for h in held) <= self.num_pages
            and sum(h.outside_bytes for h in held) <= self._max_outside_bytes
        )

    def _place(self, digest: str, adapter: HostAdapter, size: _Amount) -> Residency:
        if not self._fits(size, self._pinned_held, self._copying_held):
            return Residency.NO_ROOM
        while not self._fits(size, self._all_held):
            self.evict(next(iter(self._idle)))  # the least recently used
        pages = [self._free_pages.pop() for _ in range(size.pages)]
        slot = self._free_slots.pop()
        # Steps in flight may still read the evicted pages; a step launched from now on does not.
        copying = self._copier.submit(self._copy, adapter, slot, pages, self._lane.launched())
        resident = Resident(slot, pages, size.outside_bytes, loading=copying)
        self._residents[digest] = self._copying[digest] = resident
        self._copying_held.add(resident)
        self._all_held.add(resident)
        if self._drain is not None and self._drain.digest == digest:
            self._drain = None
        return Residency.LOADING

    def _copy(self, adapter: HostAdapter, slot: int, pages: list[int], behind: Fence) -> None:
        """Copy an adapter, on the copy thread, which owns its pages and slot until the copy is done."""
        self._writer.write(adapter, slot, pages, behind)
        self._copy_outside(adapter, slot)
        self.slot_digests[slot] = adapter.digest

    def _copy_outside(self, adapter: HostAdapter, slot: int) -> None:
        embedding, head = adapter.modules.get((OUTSIDE, EMBEDDING)), adapter.modules.get((OUTSIDE, LM_HEAD))
        if embedding is not None:
            table = self._lane.upload(embedding.a.T.contiguous())
            self.embeddings[slot] = EmbeddingLora(table, self._pack(self._lane.upload(embedding.b)), embedding.scale)
        if head is not None:
            a, b = self._lane.upload(head.a), self._lane.upload(head.b)
            self.heads[slot] = HeadLora(self._pack(a), self._pack(b), head.scale)


def _outside_bytes(adapter: HostAdapter) -> int:
    return sum(m.a.nbytes + m.b.nbytes for (layer, _), m in adapter.modules.items() if layer == OUTSIDE)
