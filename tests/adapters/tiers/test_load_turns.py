"""The queue that a load into host memory joins, and whose rests it waits for."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from adapters import fair_threads
from adapters.fair_threads import FairThreads
from adapters.tiers.adapter_reader import AdapterReader, HostAdapter
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


def waiting_tenants(host: HostCache, load: Future[HostAdapter]) -> set[str]:
    """Return the tenants in whose queue a load is."""
    queues = host._threads._queues.items()
    return {tenant_id for tenant_id, queue in queues if any(job.future is load for job in queue)}


def becomes_resident_at_once(host: HostCache, digest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let another thread add the adapter as a mixture's part just after the next look for it."""

    def get(_: HostCache, wanted: str) -> None:
        monkeypatch.undo()
        host._load_stored(wanted)

    monkeypatch.setattr(HostCache, "get", get)


def test_a_load_is_not_lost_with_a_tenant_that_found_the_adapter_loaded(
    make: Make, host: HostCache, adapter: Callable[..., str], rest: Callable[[str], None]
) -> None:
    pool, shared = make(4), adapter(seed=1)
    rest("first")
    assert pool.ensure(shared, "first") is Residency.LOADING
    with pytest.MonkeyPatch.context() as patch:
        becomes_resident_at_once(host, shared, patch)
        assert pool.ensure(shared, "second") is Residency.LOADING
    pool.leave(shared, "second")
    pool.leave(shared, "first")
    host._evict(shared)
    wait_for(pool, shared, tenant_id="third")


ACTION = st.tuples(
    st.sampled_from(["ask", "ask", "leave", "arrive", "go", "part", "evict", "poll", "ask late"]),
    st.sampled_from("abc"),
)


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck])
@example(actions=[("ask", "a"), ("ask late", "b"), ("leave", "b"), ("leave", "a")])
@given(actions=st.lists(ACTION, max_size=40))
def test_a_load_that_has_not_begun_is_in_the_queues_of_those_that_wait_for_it(
    make: Make,
    host: HostCache,
    adapter: Callable[..., str],
    rest: Callable[[str], None],
    actions: list[tuple[str, str]],
) -> None:
    """Requests of three resting tenants come to the engine and leave it, while others load and evict the adapter."""
    pool, shared = make(4), adapter(seed=1)
    arriving: dict[str, list[Future[HostAdapter]]] = {tenant_id: [] for tenant_id in "abc"}
    for tenant_id in "abc":
        rest(tenant_id)
    for action, tenant_id in actions:
        match action:
            case "ask" if host.get(shared) is None:
                pool.ensure(shared, tenant_id)
            case "ask late" if host.get(shared) is None:
                with pytest.MonkeyPatch.context() as patch:
                    becomes_resident_at_once(host, shared, patch)
                    pool.ensure(shared, tenant_id)
            case "leave":
                pool.leave(shared, tenant_id)
            case "arrive":
                arriving[tenant_id].append(host.fetch(shared, tenant_id))
            case "go" if arriving[tenant_id]:
                host.stop_waiting(shared, tenant_id, arriving[tenant_id].pop())
            case "part" if host.get(shared) is None:
                host._load_stored(shared)
            case "evict":
                host._evict(shared)
            case "poll":
                pool.poll()
        load, askers = host._loads.get(shared), host._askers.get(shared, Counter())
        assert (load is None) == (not askers)
        assert all(number > 0 for number in askers.values())
        assert load is None or waiting_tenants(host, load) == askers.keys()
    for tenant_id in "abc":
        pool.leave(shared, tenant_id)
        for each in arriving[tenant_id]:
            host.stop_waiting(shared, tenant_id, each)
    assert not host._loads
    assert host._threads.num_pending == 0
    host._evict(shared)
    pool.close()


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
