"""The device tier: pages by rank, pins, eviction and reservations."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adapters.manifest import GROUPS, AdapterError
from adapters.tiers.device_pool import AdapterPool, Residency
from adapters.tiers.eviction import STALE_S
from adapters.tiers.host_cache import HostCache
from adapters.tiers.page_writer import NUM_BUFFERS
from adapters.tiers.pages import PAGE_RANK
from adapters.tiers.reservations import PAGE_WAIT_S
from kernels.reference import take
from testing.adapter_files import BASE, CONFIG, tensors, write

DEVICE = torch.device("cpu")
ALL = tuple((layer, p) for layer in range(BASE.num_layers) for p in BASE.projections)
Make = Callable[..., AdapterPool]


@pytest.fixture
def host() -> Iterator[HostCache]:
    cache = HostCache(None, BASE, 1 << 24, torch.float32)
    yield cache
    cache.close()


@pytest.fixture
def make(host: HostCache) -> Iterator[Make]:
    pools: list[AdapterPool] = []

    def make(pages: int, max_rank: int = 16, dtype: torch.dtype = torch.float32, **options: Any) -> AdapterPool:
        options |= {"max_rank": max_rank, "dtype": dtype, "device": DEVICE}
        page_bytes = AdapterPool(BASE, host, memory=1 << 24, **options).page_bytes
        pool = AdapterPool(BASE, host, memory=pages * page_bytes, **options)
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture
def adapter(host: HostCache, tmp_path: Path) -> Callable[..., str]:
    """Return a factory that adds an adapter of a rank to the host cache and returns its digest."""

    def make(rank: int = 4, seed: int = 0, modules: tuple[tuple[int, str], ...] = ALL) -> str:
        config = {**CONFIG, "r": rank, "target_modules": sorted({p for _, p in modules})}
        return host.add_path(write(tmp_path / f"{rank}-{seed}", tensors(modules, rank, seed), config))

    return make


def wait_for(pool: AdapterPool, digest: str, wanted: Residency = Residency.READY) -> None:
    deadline = time.monotonic() + 60
    while (found := pool.ensure(digest)) is not wanted:
        assert time.monotonic() < deadline, f"{found}, not {wanted}"
        time.sleep(0.002)
        pool.poll()


def check_pages(pool: AdapterPool, host: HostCache, digest: str, slot: int) -> None:
    """Assert that the pool's pages hold the adapter, and zeros in the rest of its last page."""
    held = host.get(digest)
    assert held is not None
    pages = -(-held.rank // PAGE_RANK)
    assert int(pool.ranks[slot]) == held.rank
    assert (pool.page_table[slot, pages:] == -1).all()
    table = pool.page_table[slot, :pages].long()
    for layer, groups in enumerate(pool.groups):
        for name, group in groups.items():
            for s, projection in enumerate(GROUPS[name]):
                module = held.modules.get((layer, projection))
                if module is None:
                    assert float(group.scales[slot, s]) == 0.0
                    continue
                assert float(group.scales[slot, s]) == pytest.approx(module.scale)
                a = take(group.a_pages, table)[:, s].flatten(0, 1).float()
                b = take(group.b_pages, table).flatten(0, 1)[:, group.offsets[s] : group.offsets[s + 1]].float()
                assert not a[held.rank :].any(), "rows beyond the rank must be zero"
                assert not b[held.rank :].any()
                if group.row_scales is None:
                    assert torch.equal(a[: held.rank], module.a)
                    assert torch.equal(b[: held.rank], module.b.T)
                else:
                    delta = module.b @ module.a
                    scaled = a * group.row_scales[table, s].flatten()[:, None]
                    assert (b.T @ scaled - delta).norm() / delta.norm() < 0.06


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("rank", [1, 4, 8, 12, 16])
def test_an_adapter_takes_pages_by_its_own_rank_and_reads_back(
    make: Make, host: HostCache, adapter: Callable[..., str], rank: int, dtype: torch.dtype
) -> None:
    pool = make(6, dtype=dtype)
    other = adapter(rank=16, seed=9)
    wait_for(pool, other)
    assert pool.evict(other), "its bytes stay behind in the pages"
    digest = adapter(rank=rank, seed=1, modules=tuple(m for m in ALL if m != (1, "k_proj")))
    wait_for(pool, digest)
    assert pool.num_free_pages == 6 - -(-rank // PAGE_RANK)
    check_pages(pool, host, digest, pool.pin(digest))


class LateLane:
    """A device that copies as late as possible: when a caller waits, with the source's content at that moment.

    A step is over when `step_ended` is set; copies queued behind it run no sooner.
    """

    in_place = False

    class Fence:
        def __init__(self, lane: "LateLane") -> None:
            self._lane, self._at = lane, len(lane.queue)

        def synchronize(self) -> None:
            self._lane.run_to(self._at)

    def __init__(self) -> None:
        self.queue: list[Callable[[], object]] = []
        self.done = 0
        self.step_ended = threading.Event()
        self.most_under_way = 0

    def launched(self) -> Any:
        return self.step_ended

    def wait(self, fence: Any) -> None:
        self.queue.append(fence.wait)

    def copy(self, target: Tensor, source: Tensor) -> Any:
        self.queue.append(lambda: target.copy_(source))
        self.most_under_way = max(self.most_under_way, len(self.queue) - self.done)
        return LateLane.Fence(self)

    def upload(self, tensor: Tensor) -> Tensor:
        self.run_to(len(self.queue))
        return tensor

    def run_to(self, end: int) -> None:
        while self.done < end:
            self.queue[self.done]()
            self.done += 1


def test_pages_are_written_behind_the_steps_that_read_them_and_read_when_the_last_copy_is_done(
    make: Make, host: HostCache, adapter: Callable[..., str]
) -> None:
    lane = LateLane()
    lane.step_ended.set()
    pool = make(2, lane=lane)
    first, second = adapter(rank=16, seed=1), adapter(rank=16, seed=2)
    wait_for(pool, first)
    slot = pool.pin(first)
    check_pages(pool, host, first, slot)
    lane.step_ended.clear()
    pool.unpin(first)  # its request has ended, but a step launched with it still runs
    try:
        deadline = time.monotonic() + 60
        while pool.resident:
            assert pool.ensure(second) is Residency.LOADING
            assert time.monotonic() < deadline
            pool.poll()
        for _ in range(20):
            assert pool.ensure(second) is Residency.LOADING
            pool.poll()
            check_pages(pool, host, first, slot)
            time.sleep(0.002)
    finally:
        lane.step_ended.set()
    wait_for(pool, second)
    check_pages(pool, host, second, pool.pin(second))
    assert lane.most_under_way <= NUM_BUFFERS + 1, "a step's own upload waits for what is under way"


@pytest.mark.gpu
def test_pages_on_a_gpu(host: HostCache, adapter: Callable[..., str]) -> None:
    """Pages on a GPU stay correct while adapters take each other's pages and the stream of the steps is busy."""
    device = torch.device("cuda")
    pool = AdapterPool(BASE, host, memory=1 << 20, max_rank=16, dtype=torch.float32, device=device)
    matrix = torch.randn(2048, 2048, device=device)
    for seed in range(12):
        for _ in range(20):
            matrix = (matrix @ matrix).tanh()
        digest = adapter(rank=16, seed=seed)
        wait_for(pool, digest)
        slot = pool.pin(digest)
        held = host.get(digest)
        assert held is not None
        table = pool.page_table[slot, :2].long()
        found = pool.groups[1]["down"].a_pages[table, 0].flatten(0, 1)
        assert torch.equal(found.cpu(), held.modules[1, "down_proj"].a)
        pool.unpin(digest)
        pool.evict(digest)
    pool.close()


def test_the_least_recently_pinned_goes_first_and_a_pinned_one_never(make: Make, adapter: Callable[..., str]) -> None:
    pool = make(2)
    first, second, third = (adapter(seed=seed) for seed in range(3))
    wait_for(pool, first)
    wait_for(pool, second)
    pool.pin(second)
    pool.unpin(second)
    pool.pin(first)
    wait_for(pool, third)
    assert set(pool.resident) == {first, third}
    pool.pin(third)
    assert pool.ensure(second) is Residency.LOADING or pool.ensure(second) is Residency.NO_ROOM
    wait_for(pool, second, Residency.NO_ROOM)
    assert not pool.evict(first)
    pool.unpin(first)
    wait_for(pool, second)
    assert set(pool.resident) == {second, third}
    assert pool.num_evictions == 2


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that moves the pool's clock forward."""
    ahead, real = [0.0], time.monotonic

    def move(seconds: float) -> None:
        ahead[0] += seconds

    monkeypatch.setattr("adapters.tiers.device_pool.time.monotonic", lambda: real() + ahead[0])
    return move


def pinned(pool: AdapterPool, *digests: str, tenant: str = "") -> None:
    for digest in digests:
        wait_for(pool, digest)
        pool.pin(digest, tenant)


def test_a_reservation_leaves_the_other_pages_and_the_residents_to_everybody(
    make: Make, adapter: Callable[..., str]
) -> None:
    """The case of a large adapter that waits for half of the pages while streams hold most of them."""
    pool = make(16, max_rank=64)
    streams = [adapter(rank=8, seed=i) for i in range(9)]
    pinned(pool, *streams)
    idle, big, cold = adapter(rank=8, seed=20), adapter(rank=48, seed=21), adapter(rank=8, seed=22)
    wait_for(pool, idle)
    wait_for(pool, cold)
    pool.evict(cold)
    huge = adapter(rank=64, seed=23)
    wait_for(pool, huge, Residency.NO_ROOM)
    # Seven pages are free or idle and all are reserved; residents serve new requests nevertheless.
    assert pool.ensure(cold) is Residency.NO_ROOM
    assert pool.ensure(idle) is Residency.READY
    assert all(pool.ensure(digest) is Residency.READY for digest in streams)
    pool.no_longer_wanted(huge)
    pool.unpin(streams[0])
    # Eight pages are not in use. Six are enough for the next one, and the cold adapter takes one of the others.
    wait_for(pool, big)
    wait_for(pool, cold)
    assert pool.num_reservations == 0


def test_pages_beyond_a_reservation_serve_others(make: Make, adapter: Callable[..., str]) -> None:
    pool = make(8, max_rank=64)
    streams = [adapter(rank=8, seed=i) for i in range(4)]
    cold = adapter(rank=8, seed=20)
    pinned(pool, *streams)
    outside = adapter(rank=32, seed=21)
    wait_for(pool, outside)
    pool.pin(outside)
    big = adapter(rank=16, seed=22)
    wait_for(pool, big, Residency.NO_ROOM)
    wait_for(pool, cold, Residency.NO_ROOM)
    pool.unpin(outside)
    # Four pages become free: two are reserved for `big`, the others serve.
    wait_for(pool, big)
    wait_for(pool, cold)
    assert pool.num_free_pages == 1


def test_each_tenant_has_a_reservation_and_they_end_in_order(make: Make, adapter: Callable[..., str]) -> None:
    pool = make(4, max_rank=16)
    streams = [adapter(rank=8, seed=i) for i in range(4)]
    pinned(pool, *streams)
    first, second, third = (adapter(rank=16, seed=20 + i) for i in range(3))
    for digest in (first, second, third):
        pool._host.fetch(digest).result(60)
    assert pool.ensure(first, "a") is Residency.NO_ROOM
    assert pool.ensure(second, "a") is Residency.NO_ROOM
    assert pool.num_reservations == 1, "one per tenant"
    assert pool.ensure(third, "b") is Residency.NO_ROOM
    assert pool.num_reservations == 2
    pool.unpin(streams[0])
    pool.poll()
    assert pool.ensure(third, "b") is Residency.NO_ROOM
    assert set(pool.resident) == set(streams), "one free page is not enough for the older one, and is kept for it"
    pool.unpin(streams[1])
    wait_for(pool, first)
    assert pool.ensure(third, "b") is Residency.NO_ROOM
    pool.pin(first, "a")
    pool.unpin(streams[2])
    pool.unpin(streams[3])
    wait_for(pool, third)
    assert pool.num_reservations == 0


def test_overdue_reservations_name_the_holders_to_preempt(
    make: Make, adapter: Callable[..., str], later: Callable[[float], None]
) -> None:
    pool = make(4, max_rank=16)
    streams = [adapter(rank=8, seed=i) for i in range(4)]
    pinned(pool, *streams)
    big = adapter(rank=16, seed=20)
    wait_for(pool, big, Residency.NO_ROOM)
    pool.poll()
    assert pool.holders_to_preempt(streams) == []
    later(PAGE_WAIT_S)
    pool.poll()
    ahead = [streams[2], streams[2], streams[0], streams[1]]
    assert pool.holders_to_preempt(ahead) == [streams[2], streams[0]], "no more than needed, furthest ahead first"
    assert pool.holders_to_preempt([streams[1]]) == [], "one page would not be enough"
    pool.unpin(streams[2])
    # A preempted adapter's request comes back in the same step: its page is needed.
    assert pool.ensure(streams[2]) is Residency.NO_ROOM
    assert pool.ensure(streams[3]) is Residency.READY
    pool.unpin(streams[0])
    wait_for(pool, big)
    pool.pin(big)
    # The adapter that got the pages keeps them for a while.
    wait_for(pool, streams[0], Residency.NO_ROOM)
    later(PAGE_WAIT_S * 0.9)
    pool.poll()
    assert pool.holders_to_preempt([big, streams[1]]) == []
    later(PAGE_WAIT_S)
    pool.poll()
    assert pool.holders_to_preempt([big, streams[1]]) == [big]


def test_a_reservation_ends_with_the_last_request_that_wanted_it(
    make: Make, adapter: Callable[..., str], later: Callable[[float], None]
) -> None:
    pool = make(2, max_rank=16)
    busy, idle, big = adapter(seed=1), adapter(seed=2), adapter(rank=16, seed=3)
    pinned(pool, busy)
    wait_for(pool, idle)
    wait_for(pool, big, Residency.NO_ROOM)
    later(PAGE_WAIT_S)
    pool.poll()
    assert pool.overdue
    assert pool.ensure(idle) is Residency.NO_ROOM
    pool.no_longer_wanted(big)
    assert not pool.overdue
    assert pool.ensure(idle) is Residency.READY


def test_an_adapter_that_an_earlier_request_of_the_step_uses_is_not_evicted_for_a_later_one(
    make: Make, adapter: Callable[..., str]
) -> None:
    pool = make(1, max_rank=8)
    first, second = adapter(seed=1), adapter(seed=2)
    pool._host.fetch(second).result(60)
    wait_for(pool, first)
    pool.poll()
    assert pool.ensure(first) is Residency.READY
    assert pool.ensure(second) is Residency.NO_ROOM
    pool.pin(first)
    pool.poll()
    assert pool.ensure(second) is Residency.NO_ROOM
    pool.unpin(first)
    wait_for(pool, second)


def test_a_tenant_that_cycles_through_adapters_does_not_evict_its_neighbours(
    make: Make, adapter: Callable[..., str]
) -> None:
    """A tenant loads two new adapters in each step; its neighbour uses one adapter in every 20th step."""
    pool = make(6)
    mine = adapter(seed=1000)
    wait_for_tenant(pool, mine, "neighbour")
    cycle = [adapter(seed=seed) for seed in range(60)]
    misses = 0
    for turn in range(200):
        for digest in (cycle[2 * turn % 60], cycle[(2 * turn + 1) % 60]):
            wait_for_tenant(pool, digest, "cycling")
        if turn % 20 == 0:
            pool.poll()
            misses += pool.ensure(mine, "neighbour") is not Residency.READY
            wait_for_tenant(pool, mine, "neighbour")
    assert misses == 0
    assert pool.num_evictions > 300


def wait_for_tenant(pool: AdapterPool, digest: str, tenant: str) -> None:
    """Load an adapter for a tenant and use it once."""
    deadline = time.monotonic() + 60
    while pool.ensure(digest, tenant) is not Residency.READY:
        assert time.monotonic() < deadline
        time.sleep(0.001)
        pool.poll()
    pool.pin(digest, tenant)
    pool.unpin(digest)


def test_a_stale_adapter_of_a_quiet_tenant_goes_first(
    make: Make, adapter: Callable[..., str], later: Callable[[float], None]
) -> None:
    pool = make(2)
    stale, first, second = adapter(seed=1), adapter(seed=2), adapter(seed=3)
    wait_for_tenant(pool, stale, "quiet")
    later(STALE_S + 1)
    for digest in (first, second):
        wait_for_tenant(pool, digest, "busy")
    assert set(pool.resident) == {first, second}


def test_loads_are_counted_for_the_tenant_that_caused_them(make: Make, adapter: Callable[..., str]) -> None:
    pool = make(6)
    small, large = adapter(rank=8, seed=1), adapter(rank=16, seed=2)
    wait_for_tenant(pool, small, "a")
    wait_for_tenant(pool, large, "b")
    wait_for_tenant(pool, small, "b")
    assert pool.take_loaded_bytes() == {"a": pool.page_bytes, "b": 2 * pool.page_bytes}
    assert pool.take_loaded_bytes() == {}


def test_what_cannot_be_loaded_says_why_once_and_can_be_tried_again(make: Make, adapter: Callable[..., str]) -> None:
    large = adapter(rank=32, seed=5)
    pool = make(4, max_rank=16)
    wait_for(pool, "0" * 64, Residency.FAILED)
    assert "0000" in str(pool.error("0" * 64))
    assert pool.ensure("0" * 64) is Residency.LOADING
    wait_for(pool, large, Residency.FAILED)
    error = pool.error(large)
    assert isinstance(error, AdapterError)
    assert "rank is 32, the limit is 16" in str(error)
    assert pool.num_free_pages == 4


def test_a_failure_that_nobody_waits_for_is_not_the_next_requests(
    make: Make, host: HostCache, adapter: Callable[..., str], tmp_path: Path
) -> None:
    pool, digest = make(4), adapter(seed=7)
    (tmp_path / "4-7").rename(tmp_path / "away")
    assert pool.ensure(digest) is Residency.LOADING
    assert host.fetch(digest).exception(60) is not None
    pool.no_longer_wanted(digest)
    pool.poll()
    assert not pool.is_loading
    (tmp_path / "away").rename(tmp_path / "4-7")
    wait_for(pool, digest)
    wait_for(pool, "0" * 64, Residency.FAILED)
    pool.no_longer_wanted("0" * 64)
    assert pool.ensure("0" * 64) is Residency.LOADING


def test_a_pool_too_small_for_one_adapter_is_refused(host: HostCache) -> None:
    with pytest.raises(ValueError, match="adapter_memory"):
        AdapterPool(BASE, host, memory=100, max_rank=16, dtype=torch.float32, device=DEVICE)


def test_a_copy_that_fails_after_its_last_request_left_is_no_later_requests_error(
    make: Make, adapter: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make(2)
    digest = adapter(seed=1)
    may_fail = threading.Event()

    def fail(*_: object) -> None:
        may_fail.wait(60)
        raise OSError("the device is gone")

    monkeypatch.setattr(pool._writer, "write", fail)
    while digest not in pool._residents:
        pool.ensure(digest)
        pool.poll()
        time.sleep(0.002)
    pool.no_longer_wanted(digest)
    may_fail.set()
    deadline = time.monotonic() + 60
    while digest in pool._residents:
        assert time.monotonic() < deadline
        pool.poll()
        time.sleep(0.002)
    monkeypatch.undo()
    wait_for(pool, digest)
