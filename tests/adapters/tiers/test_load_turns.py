"""The queue that a load into host memory joins, and whose rests it waits for."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from adapters import fair_threads
from adapters.fair_threads import FairThreads
from adapters.tiers.adapter_reader import AdapterReader
from adapters.tiers.device_pool import MAX_FETCHING, MAX_FETCHING_OF_TENANT, Residency
from adapters.tiers.host_cache import HostCache
from testing.device_pools import Make, wait_for

TIMEOUT = 60


def test_loads_join_their_tenants_queue_with_its_weight(
    make: Make, host: HostCache, adapter: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load that a step needs joins the queue of the tenant whose request needs it, whoever asked last."""
    joined, gate = list[tuple[str, float | None]](), threading.Event()

    def record(name: str) -> None:
        method = getattr(FairThreads, name)

        def recorded(self: FairThreads, tenant_id: str, *args: Any, **options: Any) -> Any:
            joined.append((tenant_id, options["weight"]))
            return method(self, tenant_id, *args, **options)

        monkeypatch.setattr(FairThreads, name, recorded)

    record("submit")
    record("share")
    read = AdapterReader.read

    def slow(self: AdapterReader, *args: Any) -> Any:
        gate.wait(TIMEOUT)
        return read(self, *args)

    monkeypatch.setattr(AdapterReader, "read", slow)
    pool, shared = make(4), adapter(seed=1)
    loads = [host.fetch(shared, "heavy", 3.0), host.fetch(shared, "light", 0.5)]
    gate.set()
    assert [each.result(TIMEOUT).digest for each in loads] == [shared] * 2
    host._evict(shared)
    wait_for(pool, shared, tenant_id="third", weight=2.0)
    assert joined == [("heavy", 3.0), ("light", 0.5), ("third", 2.0)]


@pytest.fixture
def rest(host: HostCache, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Return a function that lets a tenant's loads rest for the length of the test."""
    monkeypatch.setattr(fair_threads, "MAX_REST_SECONDS", 36_000.0)
    threads = host._threads
    yield lambda tenant_id: threads.rest(tenant_id, 36_000.0)
    with threads._lock:
        # The watcher of the rests ends without them.
        threads._rests.clear()
        threads._wait_changed.notify_all()


def test_a_load_that_a_step_needs_waits_for_no_rest_of_the_tenant_that_asked_before(
    make: Make, host: HostCache, adapter: Callable[..., str], rest: Callable[[str], None]
) -> None:
    pool, shared = make(4), adapter(seed=1)
    host.fetch(shared, "heavy").result(TIMEOUT)
    host._evict(shared)
    rest("heavy")
    wait_for(pool, shared, tenant_id="light")


def test_a_load_that_two_tenants_need_runs_in_the_first_of_their_turns(
    make: Make,
    host: HostCache,
    adapter: Callable[..., str],
    rest: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool, shared, charged, read = make(4), adapter(seed=1), list[set[str]](), AdapterReader.read

    def record(self: AdapterReader, *args: Any) -> Any:
        charged.extend(job.tenants for job in host._threads._running)
        return read(self, *args)

    monkeypatch.setattr(AdapterReader, "read", record)
    rest("heavy")
    assert pool.ensure(shared, "heavy") is Residency.LOADING
    assert host._threads.num_pending == 1
    assert pool.ensure(shared, "light") is Residency.LOADING
    wait_for(pool, shared, tenant_id="heavy")
    assert charged == [{"light"}]


def test_a_load_leaves_the_queue_of_a_tenant_whose_requests_have_left(
    make: Make, host: HostCache, adapter: Callable[..., str], rest: Callable[[str], None]
) -> None:
    pool, shared, queues = make(4), adapter(seed=1), host._threads._queues
    for tenant_id in ("first", "second"):
        rest(tenant_id)
        assert pool.ensure(shared, tenant_id) is Residency.LOADING
    arriving = host.fetch(shared, "first")  # a request that has not entered the engine yet
    pool.leave(shared, "first")
    assert queues.keys() == {"first", "second"}
    host.stop_waiting(shared, "first", arriving)
    assert queues.keys() == {"second"}
    assert host._threads.num_pending == 1
    pool.leave(shared, "second")
    assert not queues
    assert host._threads.num_pending == 0
    assert not pool.is_loading
    wait_for(pool, shared, tenant_id="third")


def test_a_load_finds_a_place_beside_those_of_tenants_that_rest(
    make: Make, host: HostCache, adapter: Callable[..., str], rest: Callable[[str], None]
) -> None:
    pool, mine, *others = make(4), *(adapter(seed=seed) for seed in range(MAX_FETCHING + 2))
    for number, digest in enumerate(others):
        tenant_id = f"heavy-{number // MAX_FETCHING_OF_TENANT}"
        rest(tenant_id)
        assert pool.ensure(digest, tenant_id) is Residency.LOADING
    assert host._threads.num_pending == MAX_FETCHING
    wait_for(pool, mine, tenant_id="light")
    assert host._threads.num_pending == MAX_FETCHING
