"""Device tier of adapters: rank pages next to the model's weights, pinned while in use, evictable otherwise.

An adapter uses as many pages (`adapters.tiers.pages`) as its own rank needs. The engine thread allocates pages. The
pool's copy thread writes the bytes into pages that no step reads yet, so a load never delays a step. The few adapters
with LoRA on embed_tokens or lm_head have separate tensors for these, within a separate limit.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from enum import Enum

import torch
from torch import Tensor

from adapters.manifest import BaseShape
from adapters.tiers.adapter_preemption import Claim, choose_victims
from adapters.tiers.adapter_reader import HostAdapter
from adapters.tiers.device_size import device_size, refusal
from adapters.tiers.embedding_head_lora import upload_embedding_head_lora
from adapters.tiers.eviction import Resident
from adapters.tiers.host_cache import HostCache
from adapters.tiers.page_writer import PageWriter
from adapters.tiers.pages import PAGE_RANK, RankPages
from adapters.tiers.reservations import Amount, PageReservation, Reservations
from adapters.tiers.residents import Residents
from adapters.tiers.state import EvictionReason, TierState
from kernels.ops import EmbeddingLora, HeadLora
from kernels.platform import CopyStream, DeviceEvent, platform_of
from kernels.weights import LinearWeights, dense

# Maximum number of copies in progress. A copy evicts adapters when it starts; those that a later copy will evict serve
# until it starts.
MAX_COPYING = 16
# Maximum number of loads into host memory in flight: of all tenants, so that loads start in the order of `ensure`; of
# one tenant, so that its loads from a slow store do not delay other tenants' loads. The first limit does not delay a
# tenant's only load, because other tenants' loads may rest.
MAX_FETCHING, MAX_FETCHING_OF_TENANT = 4, 3


class Residency(Enum):
    READY = "ready"
    LOADING = "loading"
    NO_ROOM = "no room"
    FAILED = "failed"


class AdapterPool:
    """Rank pages for one base model on one device.

    memory: bytes for pages; LoRA on embed_tokens and lm_head may use a quarter as much in addition. max_rank: the
    largest accepted rank. dtype: dtype of the pages: the model's dtype, or one of 8 bits. pack: packs a dense weight.
    copy_stream: the order of copies; None selects the device's own. Raises ValueError if not even one adapter of
    `max_rank` fits.
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
        pack: Callable[[Tensor], LinearWeights] = dense,
        copy_stream: CopyStream | None = None,
    ) -> None:
        self._host, self._pack = host_cache, pack
        pages = RankPages(base, memory=memory, max_rank=max_rank, dtype=dtype, device=device)
        self.page_bytes, self.num_pages, self.num_slots = pages.page_bytes, pages.num_pages, pages.num_slots
        self.max_pages = pages.per_adapter
        self.groups, self.page_table, self.ranks, self.page_rank = (
            pages.groups, pages.page_table, pages.ranks, PAGE_RANK
        )  # fmt: skip
        self._limits = {"max_rank": max_rank, "max_embedding_head_bytes": memory // 4}
        self.embeddings: dict[int, EmbeddingLora] = {}
        self.heads: dict[int, HeadLora] = {}
        # The digest of the weights last written to each slot, "" if there are none. The copy thread sets it from the
        # adapter that it wrote, so the receipt is evidence independent of `_residents`.
        self.slot_digests = [""] * self.num_slots
        self.num_loads = 0
        self.num_evictions, self._evictions = 0, Counter[EvictionReason]()
        self._total = Amount(self.num_slots, self.num_pages, memory // 4)
        self._residents = Residents(self._total, time.monotonic())
        self._reservations = Reservations(self._total)
        # By digest, the load that each tenant waits for. They differ if the host tier dropped the adapter between two.
        self._fetching: dict[str, dict[str, Future[HostAdapter]]] = {}
        self._fetched: deque[tuple[str, Future[HostAdapter]]] = deque()  # appended to by the loading threads
        self._copied: deque[tuple[str, Future[None]]] = deque()  # appended to by the copy thread
        self._errors: dict[str, Exception] = {}
        # Digests that a request waits for, with their sizes once known: counting an adapter's modules takes 20 us.
        self._wanted: dict[str, Amount | None] = {}
        self._loaded_bytes: Counter[str] = Counter()
        host_cache.refuse_beyond(**self._limits)
        host_cache.keep_reserved(self._reservations.__contains__)
        self._copy_stream = copy_stream or platform_of(device).copy_stream()
        self._writer = PageWriter(pages, base.groups, self._copy_stream)
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="adapter-copy")

    @property
    def resident(self) -> list[str]:
        """Return the digests whose pages can be read now."""
        return self._residents.readable()

    @property
    def residency_version(self) -> int:
        """Return a number that changes with the set of resident adapters."""
        return self._residents.version

    @property
    def num_free_pages(self) -> int:
        return len(self._residents.free_pages)

    def tier_state(self) -> TierState:
        """Return the counters of this tier and of the host tier."""
        in_use, new = self._residents.pinned.pages, self._residents.new.pages
        idle = self._residents.held.pages - in_use - new
        pages = {"in_use": in_use, "new": new, "idle": idle, "free": self.num_free_pages}
        waits = self._reservations
        return TierState(
            pages,
            waits.reserved.pages,
            waits.num_placed,
            waits.placed_seconds,
            dict(self._evictions),
            self._host.stats(),
        )

    @property
    def is_loading(self) -> bool:
        return bool(self._fetching or self._residents.copying)

    def is_resident(self, digest: str) -> bool:
        """Return whether the adapter's pages can be read now."""
        return digest in self._residents.by_digest and digest not in self._residents.copying

    def resident_among(self, digests: Set[str | None]) -> list[str]:
        """Return those of the digests whose pages can be read now. Takes time by the smaller of the two sets."""
        return self._residents.readable_among(digests)

    def ensure(self, digest: str, tenant_id: str = "", weight: float = 1.0) -> Residency:
        """Return the adapter's residency in this step, and start loading it if it has none. Never blocks. Takes O(1),
        except when it starts a load or evicts.

        Call it in the order in which requests should be served. An adapter that does not fit beside those in use gets a
        reservation, one per tenant, and NO_ROOM is returned until its pages are free. tenant_id, weight: those of the
        request. A load into host memory joins the queue of each tenant that waits for it, and counts for the one whose
        turn comes first. The copy to the device counts for the tenant of this call, or of the reservation if `poll`
        starts it.
        """
        self._wanted.setdefault(digest, None)
        if digest in self._errors:
            return Residency.FAILED
        residents = self._residents
        resident = residents.by_digest.get(digest)
        if resident is not None:
            return self._ensure_resident(digest, resident)
        adapter = self._host.get(digest)
        if adapter is None:
            self._fetch(digest, tenant_id, weight)
            return Residency.LOADING
        size = self._size(digest, adapter)
        error = refusal(adapter.rank, size.embedding_head_bytes, **self._limits)
        if error is not None:
            self._errors[digest] = error
            return Residency.FAILED
        if digest in self._reservations:
            self._reservations.ask(digest, tenant_id, weight)
            return Residency.NO_ROOM  # `poll` places it
        if len(residents.copying) >= MAX_COPYING:
            return Residency.LOADING
        if size.fits(self._total, residents.pinned, residents.new, residents.asked, self._reservations.reserved):
            self._place(digest, adapter, size, tenant_id, weight)
            return Residency.LOADING
        self._reservations.add(digest, tenant_id, weight, size, residents.now)
        return Residency.NO_ROOM

    def _fetch(self, digest: str, tenant_id: str, weight: float) -> None:
        """Load the adapter into host memory if the limits of loads in flight allow it, or add its load to this tenant's
        queue.
        """
        fetching = self._fetching.get(digest, {})
        if tenant_id in fetching or not (fetching or self._may_fetch(digest, tenant_id)):
            return
        fetch = self._host.fetch(digest, tenant_id, weight, bounded=False)
        is_new = fetch not in fetching.values()
        self._fetching[digest] = fetching | {tenant_id: fetch}
        if is_new:
            fetch.add_done_callback(lambda done: self._fetched.append((digest, done)))

    def _may_fetch(self, digest: str, tenant_id: str) -> bool:
        """Return whether the adapter could be placed or reserved once it is in host memory."""
        is_of_use = digest in self._reservations or not self._reservations.has_tenant(tenant_id)
        own = sum(tenant_id in tenants for tenants in self._fetching.values())
        has_place = not own or (own < MAX_FETCHING_OF_TENANT and len(self._fetching) < MAX_FETCHING)
        return is_of_use and has_place

    def _ensure_resident(self, digest: str, resident: Resident) -> Residency:
        if resident.ready_at == math.inf:
            return Residency.LOADING
        residents = self._residents
        if digest not in residents.idle:
            return Residency.READY
        if not resident.size.fits(self._total, residents.pinned, residents.new, self._reservations.reserved_overdue):
            return Residency.NO_ROOM  # an overdue reservation takes its pages
        residents.ask(digest)
        return Residency.READY

    def num_pages_of(self, digest: str) -> int:
        """Return the number of pages of a resident adapter. Its LoRA on the embedding and head counts as the pages
        that would hold as many bytes, because a step reads it too.
        """
        resident = self._residents.by_digest[digest]
        return len(resident.pages) + -(-resident.size.embedding_head_bytes // self.page_bytes)

    def pin(self, digest: str, tenant_id: str = "") -> int:
        """Pin a READY adapter and return its slot. tenant_id: the request's tenant."""
        return self._residents.pin(digest, tenant_id)

    def unpin(self, digest: str) -> None:
        """Remove one pin. An adapter without pins is idle and can be evicted."""
        self._residents.unpin(digest)

    def holders_to_preempt(self, claims: Iterable[Claim]) -> dict[str, str]:
        """Return the adapters whose requests the scheduler must preempt now, so that reservations get pages, each with
        the reservation's tenant.

        Call it once per step, after `poll` and before the first `ensure`. claims: in the order in which the
        reservations should be placed. Preempt every running request of each returned adapter: the next `poll` places
        the reservations that fit then, before all others, and until then `ensure` returns NO_ROOM for the adapters
        whose pages are needed.
        """
        residents = self._residents

        def fits(wanted: Amount, freed: Amount) -> bool:
            held = replace(residents.pinned)
            held.remove(freed)
            return wanted.fits(self._total, held, residents.new)

        chosen = choose_victims(claims, residents.by_digest, fits, residents.now)
        for reservation in chosen.displacing:
            self._reservations.note_preemption(reservation.tenant_id, residents.now)
        self._reservations.move_to_front(chosen.placed)
        return chosen.victims

    @property
    def overdue(self) -> list[PageReservation]:
        """Return the reservations that have waited for `PAGE_WAIT_S`, as of the last `poll`."""
        return self._reservations.overdue

    def claims(self, running: Collection[str]) -> list[PageReservation]:
        """Return the reservations for which requests may be preempted. running: the tenants with running requests."""
        return self._reservations.preempting(running, self._residents.now)

    def take_loaded_bytes(self) -> dict[str, int]:
        """Return the bytes loaded for each tenant since the last call. A load counts for the tenant whose request
        caused it, or whose reservation it fills, whether or not that request runs later.
        """
        loaded, self._loaded_bytes = self._loaded_bytes, Counter()
        return loaded

    def error(self, digest: str) -> Exception:
        """Return and clear the error of FAILED: the next request tries again. AdapterError: the adapter's fault.
        OSError: the store's.
        """
        return self._errors.pop(digest)

    def leave(self, digest: str, tenant_id: str) -> None:
        """Take the tenant out of the adapter's fetch and reservation after its last request for the adapter has left.

        Both end if no other tenant has asked for them.
        """
        fetching = self._fetching.get(digest, {})
        if tenant_id in fetching:
            self._host.stop_waiting(digest, tenant_id, fetching.pop(tenant_id))
            if not fetching:
                del self._fetching[digest]
        self._reservations.leave(digest, tenant_id)

    def no_longer_wanted(self, digest: str) -> None:
        """Drop the adapter's reservation, error and fetch after its last request has left."""
        for tenant_id in tuple(self._fetching.get(digest, ())):
            self.leave(digest, tenant_id)
        self._wanted.pop(digest, None)
        self._errors.pop(digest, None)
        self._reservations.remove(digest)
        self._residents.make_idle(digest)

    def evict(self, digest: str, reason: EvictionReason = "unloaded") -> bool:
        """Free the adapter's pages. Returns False while a request uses them. reason: for the metrics."""
        if digest not in self._residents.by_digest:
            return True
        resident = self._residents.evict(digest)
        if resident is not None:
            self._clear(resident.slot, reason)
        return resident is not None

    def _clear(self, slot: int, reason: EvictionReason) -> None:
        """Drop the contents of a slot whose pages are free."""
        self.slot_digests[slot] = ""
        self.embeddings.pop(slot, None)
        self.heads.pop(slot, None)
        self._evictions[reason] += 1
        self.num_evictions += 1

    def poll(self) -> None:
        """Start a step: process finished fetches and copies, and place reserved adapters that fit now.

        The engine thread calls it before it schedules.
        """
        self._residents.begin_step(time.monotonic())
        while self._fetched:
            digest, fetched = self._fetched.popleft()
            fetching = self._fetching.get(digest, {})
            others = {tenant_id: load for tenant_id, load in fetching.items() if load is not fetched}
            if len(others) == len(fetching):
                continue  # the last request that waited for it has left
            if others:
                self._fetching[digest] = others
            else:
                del self._fetching[digest]
            error = fetched.exception()
            if error is not None:
                self._errors[digest] = error if isinstance(error, Exception) else RuntimeError(repr(error))
        while self._copied:
            digest, copied = self._copied.popleft()
            self._end_copy(digest, copied.exception())
        self._residents.end_unused()
        self._reservations.begin_step(self._residents.now)
        self._place_reserved()

    def _end_copy(self, digest: str, error: BaseException | None) -> None:
        if error is None:
            self._residents.end_copy(digest)
            self.num_loads += 1
            if digest not in self._wanted:
                self._residents.make_idle(digest)
            return
        if digest in self._wanted:  # otherwise a later request would get another request's error
            self._errors[digest] = RuntimeError(f"copy to the device failed: {error}")
        self._clear(self._residents.drop_copy(digest).slot, "copy_failed")

    def _place_reserved(self) -> None:
        """Place the reserved adapters that fit, each beside the older reservations."""
        residents, ahead = self._residents, Amount()
        for reservation in self._reservations:
            if residents.pinned.pages + residents.new.pages + ahead.pages >= self.num_pages:
                return
            adapter = self._host.get(reservation.digest)
            if adapter is None or not reservation.size.fits(self._total, residents.pinned, residents.new, ahead):
                ahead.add(reservation.size)
                continue
            self._reservations.end_wait(reservation, residents.now)
            self._place(reservation.digest, adapter, reservation.size, reservation.tenant_id, reservation.weight)

    def close(self) -> None:
        self._copier.shutdown(wait=True, cancel_futures=True)

    def _size(self, digest: str, adapter: HostAdapter) -> Amount:
        size = self._wanted.get(digest)
        if size is None:
            size = device_size(adapter)
            if digest in self._wanted:
                self._wanted[digest] = size
        return size

    def _place(self, digest: str, adapter: HostAdapter, size: Amount, tenant_id: str, weight: float) -> None:
        """Start the adapter's copy, after evicting idle adapters. It must fit beside the others in use."""
        residents = self._residents
        while not size.fits(self._total, residents.held):
            needs_embedding_head = replace(size, embedding_head_bytes=0).fits(self._total, residents.held)
            victim = residents.idle.victim(residents.step, residents.now, needs_embedding_head=needs_embedding_head)
            self.evict(victim, "room")
        resident = residents.add(digest, size, tenant_id)
        # Steps in flight may still read the evicted pages; a step launched from now on does not.
        behind = self._copy_stream.record_event()
        copying = self._copier.submit(self._copy, adapter, resident.slot, resident.pages, behind)
        copying.add_done_callback(lambda done: self._copied.append((digest, done)))
        num_bytes = size.pages * self.page_bytes + size.embedding_head_bytes
        self._loaded_bytes[tenant_id] += num_bytes
        residents.idle.count_load(tenant_id, weight, num_bytes)

    def _copy(self, adapter: HostAdapter, slot: int, pages: list[int], behind: DeviceEvent) -> None:
        """Copy an adapter, on the copy thread, which owns its pages and slot until the copy is done."""
        self._writer.write(adapter, slot, pages, behind)
        embedding, head = upload_embedding_head_lora(adapter, self._copy_stream, self._pack)
        if embedding is not None:
            self.embeddings[slot] = embedding
        if head is not None:
            self.heads[slot] = head
        self.slot_digests[slot] = adapter.digest
