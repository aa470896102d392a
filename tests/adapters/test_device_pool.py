"""The device tier: pages by rank, pins, eviction, and promises to whoever is furthest behind."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from adapters.device_pool import GROUPS, PAGE_RANK, AdapterPool, Residency
from adapters.host_cache import HostCache
from tests.adapters.files import BASE, CONFIG, tensors, write

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

    def make(pages: int, max_rank: int = 16) -> AdapterPool:
        page_bytes = AdapterPool(
            BASE, host, memory=1 << 24, max_rank=max_rank, dtype=torch.float32, device=DEVICE
        ).page_bytes
        pool = AdapterPool(BASE, host, memory=pages * page_bytes, max_rank=max_rank, dtype=torch.float32, device=DEVICE)
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture
def adapter(host: HostCache, tmp_path: Path) -> Callable[..., str]:
    """Makes an adapter of a rank known to the host cache; returns its digest."""

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


@pytest.mark.parametrize("rank", [1, 4, 8, 12, 16])
def test_an_adapter_takes_pages_by_its_own_rank_and_reads_back(
    make: Make, host: HostCache, adapter: Callable[..., str], rank: int
) -> None:
    pool = make(6)
    other = adapter(rank=16, seed=9)
    wait_for(pool, other)
    assert pool.evict(other), "its bytes stay behind in the pages"
    digest = adapter(rank=rank, seed=1, modules=tuple(m for m in ALL if m != (1, "k_proj")))
    wait_for(pool, digest)
    pages = -(-rank // PAGE_RANK)
    assert pool.num_free_pages == 6 - pages
    slot = pool.pin(digest)
    assert int(pool.ranks[slot]) == rank
    table = pool.page_table[slot, :pages].long()
    assert (pool.page_table[slot, pages:] == -1).all()
    held = host.get(digest)
    assert held is not None
    for layer, groups in enumerate(pool.groups):
        for name, group in groups.items():
            for s, projection in enumerate(GROUPS[name]):
                a = group.a_pages[table, s].flatten(0, 1)
                b = group.b_pages[table].flatten(0, 1)[:, group.offsets[s] : group.offsets[s + 1]]
                module = held.modules.get((layer, projection))
                if module is None:
                    assert float(group.scales[slot, s]) == 0.0
                    continue
                assert float(group.scales[slot, s]) == pytest.approx(module.scale)
                assert torch.equal(a[:rank], module.a)
                assert torch.equal(b[:rank], module.b.T)
                assert not a[rank:].any(), "rows beyond the rank must be zero"
                assert not b[rank:].any()


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


def test_who_waits_longest_is_promised_pages_and_nobody_else_gets_them(make: Make, adapter: Callable[..., str]) -> None:
    pool = make(2, max_rank=16)
    busy, late, big = adapter(seed=1), adapter(seed=2), adapter(rank=16, seed=3)
    wait_for(pool, busy)
    pool.pin(busy)
    wait_for(pool, big, Residency.NO_ROOM)
    pool.drain_for(big, [busy])
    # One page is free, but it is promised; and the busy adapter takes no new request.
    for _ in range(20):
        assert pool.ensure(late) is Residency.LOADING
        assert pool.ensure(busy) is Residency.LOADING
        pool.poll()
        time.sleep(0.002)
    assert late not in pool.resident
    pool.unpin(busy)
    wait_for(pool, big)
    assert pool.resident == [big]


def test_a_promise_ends_with_the_last_request_that_wanted_it(make: Make, adapter: Callable[..., str]) -> None:
    pool = make(2, max_rank=16)
    busy, big = adapter(seed=1), adapter(rank=16, seed=3)
    wait_for(pool, busy)
    pool.pin(busy)
    wait_for(pool, big, Residency.NO_ROOM)
    pool.drain_for(big, [busy])
    assert pool.ensure(busy) is Residency.LOADING
    pool.no_longer_wanted(big)
    assert pool.ensure(busy) is Residency.READY


def test_what_cannot_be_loaded_says_why_once_and_can_be_tried_again(make: Make, adapter: Callable[..., str]) -> None:
    pool = make(4, max_rank=16)
    wait_for(pool, "0" * 64, Residency.FAILED)
    assert "0000" in pool.error("0" * 64)
    assert pool.ensure("0" * 64) is Residency.LOADING
    large = adapter(rank=32, seed=5)
    wait_for(pool, large, Residency.FAILED)
    assert "rank 32" in pool.error(large)
    assert pool.num_free_pages == 4


def test_a_pool_too_small_for_one_adapter_is_refused(host: HostCache) -> None:
    with pytest.raises(ValueError, match="adapter_memory"):
        AdapterPool(BASE, host, memory=100, max_rank=16, dtype=torch.float32, device=DEVICE)
