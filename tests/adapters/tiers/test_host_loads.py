"""Loads into the host tier by several tenants: each waits for its own ones only."""

import threading
import time
from concurrent.futures import wait
from types import SimpleNamespace

import pytest

from adapters.fair_threads import TooManyPending
from adapters.tiers import host_cache
from adapters.tiers.adapter_reader import AdapterReader
from adapters.tiers.host_cache import HostCache
from tests.adapters.tiers.conftest import HOST_BYTES as SIZE
from tests.adapters.tiers.test_host_cache import TIMEOUT, load


def size(cache: HostCache, digest: str) -> int:
    with cache._open(digest) as checkpoint:
        return cache._check(checkpoint)


def test_tenants_whose_loads_wait_for_room_hold_the_threads_for_a_bounded_time(make_cache, store, digests, monkeypatch):
    """Loads of tenants a and b, which find no room, fill all threads for a bounded time; c's adapter would fit."""
    ahead, is_over = [0.0], threading.Event()
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0])
    monkeypatch.setattr(host_cache, "time", clock)
    monkeypatch.setattr(host_cache, "ROOM_SECONDS", 3600.0)
    cache = make_cache(2 * SIZE)
    load(cache, digests[0])
    cache.pin(digests[0])
    large = {digest: size(cache, digest) for digest in digests[1:4]}
    check = HostCache._check
    monkeypatch.setattr(HostCache, "_check", lambda self, given: check(self, given) + SIZE * (given.digest in large))
    stuck = [cache.fetch(digest, tenant_id) for digest, tenant_id in zip(large, "aab", strict=True)]
    late = cache.fetch(digests[4], "c")
    assert wait([*stuck, late], 0.2).done == set()

    def pass_time() -> None:
        while not is_over.wait(0.01):
            ahead[0] += 3600.0
            with cache._changed:
                cache._changed.notify_all()  # wakes the loads, as the end of their time would

    passing = threading.Thread(target=pass_time)
    passing.start()
    try:
        assert late.result(TIMEOUT).digest == digests[4]
        wait(stuck, TIMEOUT)
    finally:
        is_over.set()
        passing.join()
    for each in stuck:
        with pytest.raises(OSError, match="host memory is full"):
            each.result(TIMEOUT)


def test_a_tenants_loads_wait_for_themselves_only(make_cache, digests, monkeypatch):
    cache, gates = make_cache(10 * SIZE), {digest: threading.Event() for digest in digests}
    read = AdapterReader.read
    begun = []

    def slow(self, checkpoint, size):
        begun.append(checkpoint.digest)
        gates[checkpoint.digest].wait(TIMEOUT)
        return read(self, checkpoint, size)

    monkeypatch.setattr(AdapterReader, "read", slow)
    greedy = [cache.fetch(digest, "greedy") for digest in digests[:5]]
    gates[digests[5]].set()
    assert cache.fetch(digests[5], "neighbour").result(TIMEOUT).digest == digests[5]
    # A load that a second tenant requests is in that tenant's queue as well.
    gates[digests[4]].set()
    assert cache.fetch(digests[4], "neighbour").result(TIMEOUT).digest == digests[4]
    assert not any(load.done() for load in greedy[:4])
    for gate in gates.values():
        gate.set()
    assert [load.result(TIMEOUT).digest for load in greedy] == digests[:5]


def test_a_load_that_nobody_waits_for_leaves_the_queue(make_cache, digests, monkeypatch):
    cache, gate = make_cache(10 * SIZE), threading.Event()
    read = AdapterReader.read
    monkeypatch.setattr(AdapterReader, "read", lambda *call: gate.wait(TIMEOUT) and read(*call))
    running = [cache.fetch(digest, "a") for digest in digests[:2]]
    waiting, again = cache.fetch(digests[2], "a"), cache.fetch(digests[2], "a")
    assert waiting is again
    cache.stop_waiting(digests[2], "a", waiting)
    assert not waiting.cancelled()
    cache.stop_waiting(digests[2], "a", waiting)
    assert waiting.cancelled()
    gate.set()
    assert load(cache, digests[2]).digest == digests[2]
    assert all(future.result(TIMEOUT) for future in running)


def test_a_tenant_has_a_bounded_number_of_loads_waiting(make_cache, digests, monkeypatch):
    monkeypatch.setattr(host_cache, "MAX_PENDING_PER_TENANT", 2)
    cache, gate = make_cache(10 * SIZE), threading.Event()
    read = AdapterReader.read
    monkeypatch.setattr(AdapterReader, "read", lambda *call: gate.wait(TIMEOUT) and read(*call))
    for digest in digests[:4]:
        cache.fetch(digest, "greedy")
    with pytest.raises(TooManyPending, match="2 requests of this tenant"):
        cache.fetch(digests[4], "greedy")
    neighbours = cache.fetch(digests[4], "neighbour")
    gate.set()
    assert neighbours.result(TIMEOUT).digest == digests[4]
