"""Pools and adapters of a small base model, and a clock that moves on request."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.fair_threads import Yielding
from adapters.manifest import BaseShape
from adapters.store import DirectoryStore
from adapters.tiers.device_pool import AdapterPool
from adapters.tiers.host_cache import HostCache
from testing.adapter_files import BASE, CONFIG, tensors, write
from testing.device_pools import Make

# Bytes of an adapter of `digests` in float32.
HOST_BYTES = sum(len(data) for _, _, data in tensors().values())
DEVICE = torch.device("cpu")
ALL = tuple((layer, p) for layer in range(BASE.num_layers) for p in BASE.projections)


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    return DirectoryStore(tmp_path / "store")


@pytest.fixture
def digests(store: DirectoryStore, tmp_path: Path) -> list[str]:
    return [store.put(write(tmp_path / str(seed), tensors(seed=seed)), BASE).digest for seed in range(6)]


@pytest.fixture
def make_cache(store: DirectoryStore) -> Iterator[Callable[..., HostCache]]:
    caches: list[HostCache] = []

    def make_cache(
        max_bytes: int = 3 * HOST_BYTES,
        dtype: torch.dtype = torch.float32,
        base: BaseShape = BASE,
        yielding: Yielding | None = None,
    ) -> HostCache:
        caches.append(HostCache(store, base, max_bytes, dtype, yielding=yielding or Yielding()))
        return caches[-1]

    yield make_cache
    for cache in caches:
        cache.close()


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


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Stop the clock and return a function that moves it forward: real waits end no reservation."""
    now = [1000.0]

    def move(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr("adapters.tiers.device_pool.time.monotonic", lambda: now[0])
    return move
