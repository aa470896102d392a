"""Mixtures in the tiers: parts are loaded and kept, and a tenant's many mixtures take no other tenant's memory."""

import time
from concurrent.futures import wait

import pytest
import torch

from adapters.manifest import AdapterError, AdapterNotFound
from adapters.store import DirectoryStore
from adapters.tiers.device_pool import AdapterPool, Residency
from adapters.tiers.host_cache import HostCache
from testing.adapter_files import BASE, CONFIG, tensors, write
from wire.mixtures import Mixture, Term

SIZE = sum(len(data) for _, _, data in tensors().values())  # of one adapter in float32
TIMEOUT = 60


@pytest.fixture
def digests(tmp_path) -> list[str]:
    store = DirectoryStore(tmp_path / "store")
    return [store.put(write(tmp_path / str(seed), tensors(seed=seed)), BASE).digest for seed in range(12)]


@pytest.fixture
def cache(tmp_path, digests):
    cache = HostCache(DirectoryStore(tmp_path / "store"), BASE, 32 * SIZE, torch.float32)
    yield cache
    cache.close()


def mixture(digests: list[str], *weights: float) -> Mixture:
    return Mixture.of([Term("a", weight) for weight in weights], digests[: len(weights)])


def test_a_mixture_is_the_weighted_sum_and_its_parts_stay(cache: HostCache, digests: list[str]):
    mixed = mixture(digests, 0.7, -0.3)
    cache.add_mixture(mixed)
    found = cache.fetch(mixed.digest, "t").result(TIMEOUT)
    parts = [cache.get(digest) for digest in digests[:2]]
    weights = dict(mixed.parts)
    assert found.digest == mixed.digest
    assert (found.rank, found.num_bytes) == (8, 2 * SIZE)
    for key, module in found.modules.items():
        expected = sum(
            weights[part.digest] * part.modules[key].scale * part.modules[key].b.double() @ part.modules[key].a.double()
            for part in parts
        )
        assert torch.allclose(module.scale * module.b.double() @ module.a.double(), expected, atol=1e-7)
    assert cache.stats().num_bytes == 4 * SIZE
    cache.remove_mixture(mixed.digest)
    assert (cache.stats().num_bytes, cache.get(mixed.digest)) == (2 * SIZE, None)
    with pytest.raises(AdapterNotFound):
        cache.fetch(mixed.digest, "t").result(TIMEOUT)


def test_the_sum_of_ranks_is_refused_before_the_parts_are_read(cache: HostCache, digests: list[str]):
    cache.refuse_beyond(max_rank=7, max_embedding_head_bytes=0)
    mixed = mixture(digests, 1.0, 1.0)
    cache.add_mixture(mixed)
    with pytest.raises(AdapterError, match="add up to 8, the limit is 7"):
        cache.fetch(mixed.digest, "t").result(TIMEOUT)
    assert cache.stats().num_bytes == 0


def test_an_activated_lora_is_refused_before_the_parts_are_read(cache: HostCache, digests: list[str], tmp_path):
    config = {**CONFIG, "alora_invocation_tokens": [1, 2]}
    activated = cache.add_path(write(tmp_path / "activated", tensors(seed=20), config))
    mixed = Mixture.of([Term("a", 1.0), Term("b", 1.0)], [digests[0], activated])
    cache.add_mixture(mixed)
    with pytest.raises(AdapterError, match="is an activated LoRA, which cannot be a part"):
        cache.fetch(mixed.digest, "t").result(TIMEOUT)
    assert cache.stats().loads == 0


def test_a_mixture_larger_than_its_tenants_share_is_refused(tmp_path, digests: list[str]):
    """Without the refusal it would be evicted as soon as it is made, and loaded again by every step."""
    cache = HostCache(DirectoryStore(tmp_path / "store"), BASE, 12 * SIZE, torch.float32)
    try:
        mixed = mixture(digests, 1.0, 1.0)
        cache.add_mixture(mixed)
        with pytest.raises(AdapterError, match=f"takes {2 * SIZE} bytes of host memory, the limit is {12 * SIZE // 8}"):
            cache.fetch(mixed.digest, "t").result(TIMEOUT)
    finally:
        cache.close()


@pytest.mark.usefixtures("takes_a_core")
def test_thousands_of_weights_take_no_other_tenants_host_memory(cache: HostCache, digests: list[str]):
    """The tenant's requests keep all its mixtures in use, as many long answers would."""
    others = [cache.fetch(digest, "quiet").result(TIMEOUT) for digest in digests[2:]]
    waiting: list = []
    for i in range(1, 2001):
        mixed = mixture(digests, i / 1000, 1.0)
        cache.add_mixture(mixed)
        waiting.append(cache.fetch(mixed.digest, "loud"))
        if len(waiting) == 50:
            wait(waiting, TIMEOUT)
            assert all(load.exception() is None for load in waiting)
            waiting.clear()
    assert all(cache.get(other.digest) is other for other in others), "none was evicted"
    # The quiet tenant's ten adapters, the two parts, and an eighth of the memory.
    assert cache.stats().num_bytes <= (len(others) + 2 + 32 // 8) * SIZE
    assert cache.stats().max_bytes == 32 * SIZE


def test_a_mixture_that_waits_for_pages_is_not_made_again(cache: HostCache, digests: list[str]):
    """The tenant's share of host memory has room for two mixtures."""
    options = {"max_rank": 8, "dtype": torch.float32, "device": torch.device("cpu")}
    pool = AdapterPool(BASE, cache, memory=1 << 24, **options)

    def load(digest: str, tenant_id: str, wanted: Residency) -> None:
        while (state := pool.ensure(digest, tenant_id)) is not wanted:
            assert state is Residency.LOADING
            time.sleep(0.001)
            pool.poll()

    try:
        full = mixture(digests, 1.0, 1.0)
        cache.add_mixture(full)
        cache.fetch(full.digest, "quiet").result(TIMEOUT)
        load(full.digest, "quiet", Residency.READY)
        memory = pool.num_pages_of(full.digest) * pool.page_bytes
        pool.close()
        # A device with room for one mixture.
        pool = AdapterPool(BASE, cache, memory=memory, **options)
        load(full.digest, "quiet", Residency.READY)
        pool.pin(full.digest, "quiet")
        waiting, *others = (mixture(digests, i / 10, 1.0) for i in range(1, 7))
        for mixed in (waiting, *others):
            cache.add_mixture(mixed)
            found = cache.fetch(mixed.digest, "loud").result(TIMEOUT)
            if mixed is waiting:
                first = found
                load(mixed.digest, "loud", Residency.NO_ROOM)
        assert cache.get(waiting.digest) is first
        assert cache.stats().num_bytes <= (2 + 2 + 4) * SIZE, "the parts, the quiet tenant's mixture, the share"
        pool.unpin(full.digest)
        pool.no_longer_wanted(full.digest)
        pool.poll()
        assert cache.get(waiting.digest) is first
        load(waiting.digest, "loud", Residency.READY)
        for mixed in others:
            pool.no_longer_wanted(waiting.digest)
            load(mixed.digest, "loud", Residency.READY)
            pool.no_longer_wanted(mixed.digest)
    finally:
        pool.close()


def test_many_mixtures_on_the_device_evict_their_own_tenants(cache: HostCache, digests: list[str]):
    options = {"max_rank": 8, "dtype": torch.float32, "device": torch.device("cpu")}
    page = AdapterPool(BASE, cache, memory=1 << 24, **options).page_bytes
    pool = AdapterPool(BASE, cache, memory=8 * page, **options)
    try:
        for quiet in digests[2:4]:
            cache.fetch(quiet, "quiet").result(TIMEOUT)
            while pool.ensure(quiet, "quiet") is not Residency.READY:
                time.sleep(0.001)
                pool.poll()
            pool.pin(quiet, "quiet")
            pool.unpin(quiet)
        for i in range(1, 60):
            mixed = mixture(digests, i / 100, 1.0)
            cache.add_mixture(mixed)
            while (state := pool.ensure(mixed.digest, "loud")) is not Residency.READY:
                assert state is not Residency.FAILED
                time.sleep(0.001)
                pool.poll()
            pool.pin(mixed.digest, "loud")
            pool.unpin(mixed.digest)
            cache.remove_mixture(mixed.digest)
            pool.no_longer_wanted(mixed.digest)
        assert set(digests[2:4]) <= set(pool.resident)
        # The pages serve on after the host copy is gone, and a mixture is made again after its eviction.
        assert pool.ensure(mixed.digest, "loud") is Residency.READY
        assert pool.evict(mixed.digest)
        cache.add_mixture(mixed)
        while pool.ensure(mixed.digest, "loud") is not Residency.READY:
            time.sleep(0.001)
            pool.poll()
    finally:
        pool.close()
