"""Reservations of pages, preemption of their holders, and eviction between tenants."""

import time
from collections.abc import Callable, Collection

import pytest

from adapters.tiers.device_pool import AdapterPool, Residency
from adapters.tiers.eviction import STALE_S
from adapters.tiers.reservations import (
    BUSY_WAIT_S,
    CALM_S,
    CALM_WAIT_S,
    PAGE_WAIT_S,
    Amount,
    PageReservation,
    Reservations,
)
from testing.device_pools import Make, wait_for

# A reservation is overdue after half a second, which a busy machine takes for any line.
pytestmark = pytest.mark.usefixtures("later")


def pinned(pool: AdapterPool, *digests: str, tenant_id: str = "") -> None:
    for digest in digests:
        wait_for(pool, digest)
        pool.pin(digest, tenant_id)


def preempted(pool: AdapterPool, holders: list[str], running: Collection[str] = ()) -> list[str]:
    return list(pool.holders_to_preempt((claim, holders) for claim in pool.claims(running)))


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
    assert len(pool._reservations) == 0


def test_pages_beyond_a_reservation_serve_others(make: Make, adapter: Callable[..., str]) -> None:
    pool = make(8, max_rank=64)
    streams = [adapter(rank=8, seed=i) for i in range(4)]
    cold = adapter(rank=8, seed=20)
    pinned(pool, *streams)
    outside = adapter(rank=32, seed=21)
    wait_for(pool, outside)
    pool.pin(outside)
    big = adapter(rank=16, seed=22)
    pool._host.fetch(cold).result(60)
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
    assert len(pool._reservations) == 1, "one per tenant"
    assert pool.ensure(third, "b") is Residency.NO_ROOM
    assert len(pool._reservations) == 2
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
    assert len(pool._reservations) == 0


def test_overdue_reservations_name_the_holders_to_preempt(
    make: Make, adapter: Callable[..., str], later: Callable[[float], None]
) -> None:
    pool = make(4, max_rank=16)
    streams = [adapter(rank=8, seed=i) for i in range(4)]
    pinned(pool, *streams)
    big = adapter(rank=16, seed=20)
    wait_for(pool, big, Residency.NO_ROOM)
    pool.poll()
    assert preempted(pool, streams) == []
    later(PAGE_WAIT_S)
    pool.poll()
    ahead = [streams[2], streams[2], streams[0], streams[1]]
    assert preempted(pool, ahead) == [streams[2], streams[0]], "no more than needed, furthest ahead first"
    assert preempted(pool, [streams[1]]) == [], "one page would not be enough"
    pool.unpin(streams[2])
    # A preempted adapter's request comes back in the same step: its page is needed.
    assert pool.ensure(streams[2]) is Residency.NO_ROOM
    assert pool.ensure(streams[3]) is Residency.READY
    pool.unpin(streams[0])
    wait_for(pool, big)
    pool.pin(big)
    # The adapter that got the pages keeps them for a while.
    assert pool.ensure(streams[0], "other") is Residency.NO_ROOM
    later(PAGE_WAIT_S * 0.9)
    pool.poll()
    assert preempted(pool, [big, streams[1]]) == []
    later(PAGE_WAIT_S)
    pool.poll()
    assert preempted(pool, [big, streams[1]]) == [big]


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


def wait_for_tenant(pool: AdapterPool, digest: str, tenant_id: str) -> None:
    """Load an adapter for a tenant and use it once."""
    deadline = time.perf_counter() + 60
    while pool.ensure(digest, tenant_id) is not Residency.READY:
        assert time.perf_counter() < deadline
        time.sleep(0.001)
        pool.poll()
    pool.pin(digest, tenant_id)
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


def test_a_tenant_preempts_again_only_after_a_longer_wait(
    make: Make, adapter: Callable[..., str], later: Callable[[float], None]
) -> None:
    """A tenant whose requests come for more adapters than fit would otherwise exchange the pages all the time."""
    pool = make(1, max_rank=8)
    first, second, third = (adapter(seed=i) for i in range(3))
    pinned(pool, first)
    wait_for_reservation(pool, second, "a")
    later(PAGE_WAIT_S)
    pool.poll()
    assert preempted(pool, [first]) == [first]
    pool.unpin(first)
    wait_for_tenant(pool, second, "a")
    pool.pin(second, "a")
    wait_for_reservation(pool, third, "a")
    later(CALM_WAIT_S - 0.5)
    pool.poll()
    assert preempted(pool, [second]) == []
    pool.no_longer_wanted(third)
    wait_for_reservation(pool, third, "b")
    later(PAGE_WAIT_S)
    pool.poll()
    assert preempted(pool, [second], {"b"}) == [], "the tenant has running requests"
    assert preempted(pool, [second], {"a"}) == [second], "another tenant has waited long enough"
    pool.no_longer_wanted(third)
    later(CALM_S)
    pool.poll()
    wait_for_reservation(pool, third, "a")
    later(PAGE_WAIT_S)
    pool.poll()
    assert preempted(pool, [second]) == [second]


def wait_for_reservation(pool: AdapterPool, digest: str, tenant_id: str) -> None:
    """Load an adapter into host memory and reserve pages for it."""
    pool._host.fetch(digest).result(60)
    pool.poll()
    assert pool.ensure(digest, tenant_id) is Residency.NO_ROOM
    assert len(pool._reservations) == 1


def reservation_of(reservations: Reservations, digest: str) -> PageReservation:
    return next(found for found in reservations if found.digest == digest)


def test_a_reservation_acts_for_the_tenants_that_ask_for_its_adapter():
    """The least served one pays. Requests give way to the least served one that has waited long enough."""
    reservations, weights = Reservations(Amount(slots=2)), {"light": 2.0, "idle": 3.0, "heavy": 1.0}
    reservations.begin_step(0.0)
    assert reservations.add("shared", "heavy", 1.0, Amount(slots=1), 0.0)
    assert reservations.add("own", "light", 2.0, Amount(slots=1), 0.0)
    for tenant_id, weight in weights.items():
        reservations.ask("shared", tenant_id, weight)
    reservations.begin_step(PAGE_WAIT_S)
    assert reservation_of(reservations, "shared").tenant_id == "heavy", "who made it asked first"
    for tenant_id, weight in weights.items():
        reservations.ask("shared", tenant_id, weight)
    for _ in range(2):  # nobody asks in the second step
        reservations.begin_step(PAGE_WAIT_S)
        shared = reservation_of(reservations, "shared")
        assert (shared.owner, shared.tenant_id, shared.weight) == ("heavy", "light", 2.0)

    def claimant(*running: str, now: float = PAGE_WAIT_S) -> tuple[str, float] | None:
        claims = reservations.preempting(running, now)
        return next(((claim.tenant_id, claim.weight) for claim in claims if claim.digest == "shared"), None)

    assert claimant() == ("light", 2.0)
    assert claimant("light", "heavy") == ("idle", 3.0), "it has nothing running"
    assert claimant("light", "heavy", "idle") is None
    assert claimant("light", "heavy", "idle", now=BUSY_WAIT_S) == ("light", 2.0)
    reservations.note_preemption("idle", PAGE_WAIT_S)
    assert claimant("light", "heavy") is None
    assert claimant("light", "heavy", now=CALM_WAIT_S) == ("idle", 3.0)


def test_a_tenant_whose_request_has_left_owns_no_reservation():
    reservations = Reservations(Amount(slots=3))
    reservations.begin_step(0.0)
    assert reservations.add("shared", "first", 1.0, Amount(slots=1), 0.0)
    assert reservations.add("own", "second", 1.0, Amount(slots=1), 0.0)
    reservations.begin_step(1.0)
    for tenant_id in ("second", "third"):
        reservations.ask("shared", tenant_id, 1.0)
    reservations.begin_step(2.0)
    assert reservation_of(reservations, "shared").owner == "first", "its request waits, although it did not ask"
    reservations.leave("shared", "first")
    assert reservation_of(reservations, "shared").owner == "third", "second has one of its own"
    assert reservations.add("other", "first", 1.0, Amount(slots=1), 2.0)
    reservations.leave("shared", "third")
    assert "shared" not in reservations, "it would be a second one of the only tenant that waits"
    assert [tenant_id for tenant_id in ("first", "second", "third") if reservations.has_tenant(tenant_id)] == [
        *("first", "second"),
    ]
    assert [each.owner for each in reservations] == ["second", "first"]
    assert reservations.reserved == Amount(slots=2)


def test_a_reservation_keeps_its_age_while_its_owner_waits_and_does_not_ask():
    reservations = Reservations(Amount(slots=1))
    reservations.begin_step(0.0)
    assert reservations.add("shared", "owner", 2.0, Amount(slots=1), 0.0)
    reservations.begin_step(PAGE_WAIT_S)
    reservations.ask("shared", "other", 1.0)
    reservations.begin_step(2 * PAGE_WAIT_S)
    reservations.leave("shared", "other")
    [found] = reservations
    assert found == PageReservation("shared", "owner", (("owner", 2.0),), Amount(slots=1), since=0.0)
    assert [claim.tenant_id for claim in reservations.preempting((), 2 * PAGE_WAIT_S)] == ["owner"]


def test_a_waiting_tenant_that_does_not_ask_inherits_a_reservation_with_its_age():
    reservations = Reservations(Amount(slots=1))
    reservations.begin_step(0.0)
    assert reservations.add("shared", "owner", 1.0, Amount(slots=1), 0.0)
    reservations.ask("shared", "other", 1.0)
    for now in (1.0, 2.0):
        reservations.begin_step(now)
        reservations.ask("shared", "owner", 1.0)
    reservations.begin_step(3.0)
    reservations.leave("shared", "owner")
    [found] = reservations
    assert (found.owner, found.tenant_id, found.since) == ("other", "other", 0.0)
    assert not reservations.has_tenant("owner")


def test_a_tenant_gets_no_second_reservation_from_a_neighbour_that_reserves_and_leaves():
    reservations = Reservations(Amount(slots=9))
    for number in range(9):
        reservations.begin_step(float(number))
        assert reservations.add(f"adapter-{number}", "neighbour", 1.0, Amount(slots=1), float(number))
        reservations.ask(f"adapter-{number}", "greedy", 1.0)
        reservations.leave(f"adapter-{number}", "neighbour")
    assert [each.owner for each in reservations] == ["greedy"]
    assert reservations.add("light", "light", 1.0, Amount(slots=8), 9.0)


def test_a_reservation_acts_for_no_tenant_that_has_left():
    reservations = Reservations(Amount(slots=1))
    reservations.begin_step(0.0)
    assert reservations.add("shared", "light", 1.0, Amount(slots=1), 0.0)
    reservations.begin_step(PAGE_WAIT_S)

    def claimants() -> list[str]:
        return [claim.tenant_id for claim in reservations.preempting((), PAGE_WAIT_S)]

    assert claimants() == ["light"]
    reservations.ask("shared", "heavy", 1.0)
    reservations.ask("shared", "light", 1.0)
    reservations.leave("shared", "light")
    assert claimants() == ["heavy"], "it has asked in this step"
    reservations.leave("shared", "heavy")
    assert not claimants()
    reservations.begin_step(PAGE_WAIT_S)
    assert len(reservations) == 0
    assert reservations.reserved == reservations.reserved_overdue == Amount()


def test_a_reservation_that_is_made_again_in_a_step_acts_for_no_tenant_of_the_last_one():
    """A tenant of the last reservation came to own the new one without waiting for it, and it acted for none."""
    reservations = Reservations(Amount(slots=1))
    reservations.add("shared", "last", 1.0, Amount(slots=1), 0.0)
    [placed] = reservations
    reservations.end_wait(placed, 0.0)
    reservations.add("shared", "next", 1.0, Amount(slots=1), 0.0)
    reservations.begin_step(0.0)
    assert [each.asking for each in reservations] == [(("next", 1.0),)]
    reservations.leave("shared", "next")
    assert not reservations
