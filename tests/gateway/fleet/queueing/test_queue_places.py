"""The places of requests with several sequences in the queue before servers that run them in order of arrival."""

import asyncio

import pytest

from gateway.errors import Overloaded
from gateway.fleet.queueing.queue import Capacity, RequestQueue, Room, kept_free
from gateway.fleet.queueing.service_counters import ServiceCounters
from tests.gateway.fleet.queueing.test_queue import Crowd, make_queue, settled
from wire.costs import OUTPUT_TOKEN, PROMPT_TOKEN


@pytest.fixture
async def eight():
    """Return requests at engines that serve eight sequences, first come, first served."""
    crowd = Crowd(make_queue(lambda: 8))
    yield crowd
    await crowd.close()


async def test_a_request_takes_a_place_for_each_of_its_sequences(eight: Crowd):
    first = await eight.come("a", sequences=4)
    await eight.come("c", sequences=4)
    assert (eight.queue.inside, eight.inside) == (8, ["a", "c"])
    await eight.come("b")
    assert eight.queue.waiting == 1
    assert await eight.end(first) == "b"
    assert eight.queue.inside == 5
    await eight.come("b", sequences=3)
    assert eight.queue.inside == 8


async def test_a_tenants_requests_of_several_sequences_leave_half_of_the_places(eight: Crowd):
    """They end together, so a neighbour would wait for a whole answer. Single sequences end one by one."""
    first = await eight.come("a", sequences=3)
    second = await eight.come("a", sequences=2)
    assert (eight.queue.inside, second.inside) == (3, False)
    assert (await eight.come("b", sequences=4)).inside
    assert await eight.end(first) == "a"
    assert eight.queue.inside == 6
    third = await eight.come("a", sequences=3)
    assert not third.inside
    assert [(await eight.come("c")).inside for _ in range(2)] == [True, True]
    assert eight.queue.inside == 8


async def test_a_tenants_single_sequences_take_all_places_and_its_larger_requests_wait_for_half_of_them(eight: Crowd):
    many = [await eight.come("a") for _ in range(8)]
    large = await eight.come("a", sequences=2)
    assert (eight.queue.inside, large.inside) == (8, False)
    for visitor in many[:5]:
        visitor.leave.set()
        await settled()
    assert (eight.queue.inside, large.inside) == (3, False)
    assert await eight.end(many[5]) == "a"
    assert (eight.queue.inside, large.inside) == (4, True)


async def test_a_request_that_does_not_fit_delays_only_tenants_with_their_share(eight: Crowd):
    many = [await eight.come("busy", prompt=10) for _ in range(6)]
    # Two places are free, and the large request is the first in the order.
    large = await eight.come("large", sequences=4)
    await eight.come("busy")
    assert (eight.queue.inside, eight.queue.waiting) == (6, 2)
    new = await eight.come("new")
    assert new.inside
    for visitor in many[:3]:
        visitor.leave.set()
        await settled()
    # The busy tenant's waiting request would have taken the places one by one.
    assert large.inside
    assert (eight.queue.inside, eight.queue.waiting) == (8, 1)


async def test_a_request_does_not_pass_another_of_its_own_tenant_that_does_not_fit(eight: Crowd):
    await eight.come("a", sequences=4)
    await eight.come("c", sequences=3)
    large = await eight.come("b", sequences=3)
    await eight.come("b")
    assert (eight.queue.inside, eight.queue.waiting) == (7, 2)
    assert not large.inside


async def test_a_request_waits_for_an_engine_with_room_for_all_its_sequences():
    room = 2
    queue = RequestQueue(lambda: Capacity(8, 0, 8, room), ServiceCounters(), 100, 1000.0)
    crowd = Crowd(queue)
    try:
        large = await crowd.come("a", sequences=4)
        small = await crowd.come("b", sequences=2)
        assert (large.inside, small.inside) == (False, True)
        room = 4
        queue.admit()
        await settled()
        assert large.inside
    finally:
        await crowd.close()


async def test_engines_that_order_tenants_get_a_request_with_any_number_of_sequences():
    crowd = Crowd(make_queue(lambda: 2, places=2))
    try:
        assert (await crowd.come("a", sequences=1000)).inside
        assert (await crowd.come("b", sequences=1000)).inside
        assert crowd.queue.inside == 2
    finally:
        await crowd.close()


async def test_a_request_above_its_tenants_share_gets_its_turn_beside_neighbours_that_keep_theirs(
    monkeypatch: pytest.MonkeyPatch,
):
    """Three equal tenants have five of 16 places each. The first one's request needs eight."""
    crowd = Crowd(make_queue(lambda: 16))
    try:
        for tenant in ("b", "c") * 5:
            await crowd.come(tenant, prompt=10)
        large = await crowd.come("a", sequences=8)
        await crowd.come("b", prompt=10)
        # The neighbour is below its share again, and passes.
        assert await crowd.end_anyone() == "b"
        monkeypatch.setattr("gateway.fleet.queueing.queue.PASS_SECONDS", 0.0)
        for tenant in "bc":
            await crowd.come(tenant, prompt=10)
        ended = next(visitor for visitor in crowd.all if visitor.inside)
        ended.leave.set()
        await settled()
        assert (crowd.queue.inside, large.inside) == (9, False)
        assert await crowd.end_anyone() == "a"
        # It has its turn, so the others go on.
        assert (crowd.queue.inside, crowd.queue.waiting) == (16, 2)
        assert {await crowd.end_anyone(), await crowd.end_anyone()} == {"b", "c"}
    finally:
        await crowd.close()


async def test_an_engine_is_kept_free_for_a_request_that_was_passed_for_long(monkeypatch: pytest.MonkeyPatch):
    """Neighbours would keep all engines half full. They go on at the other engines."""
    rooms = [Room(2, 2), Room(3, 8), Room(4, 8), Room(2, 8)]
    queue = RequestQueue(
        lambda: Capacity(32, 0, 32, max(min(room) for room in rooms), 8, tuple(rooms)), ServiceCounters(), 100, 1000.0
    )
    crowd = Crowd(queue)
    try:
        large = await crowd.come("a", sequences=8)
        assert (await crowd.come("b", sequences=4)).inside
        monkeypatch.setattr("gateway.fleet.queueing.queue.PASS_SECONDS", 0.0)
        others = [await crowd.come("b", sequences=3), await crowd.come("c", sequences=4)]
        # Only the engine that is kept free has room for four.
        assert [each.inside for each in others] == [True, False]
        rooms[:] = [Room(2, 2), Room(0, 8), Room(8, 8), Room(0, 8)]
        queue.admit()
        await settled()
        assert large.inside
    finally:
        await crowd.close()


def test_the_engine_that_is_kept_free_takes_the_request():
    assert kept_free([Room(4, 4), Room(2, 8), Room(3, 8)], 8) == 2
    assert kept_free([Room(4, 4)], 8) is None


async def test_a_request_is_passed_for_some_time_from_its_turn_on_not_from_its_arrival(
    monkeypatch: pytest.MonkeyPatch,
):
    """A tenant's many waiting requests would otherwise keep others out one after another."""
    crowd = Crowd(make_queue(lambda: 8))
    try:
        many = [await crowd.come("busy", prompt=10) for _ in range(8)]
        large = await crowd.come("a", sequences=4)
        monkeypatch.setattr("gateway.fleet.queueing.queue.PASS_SECONDS", 0.01)
        await asyncio.sleep(0.02)
        await crowd.come("c", prompt=10)
        assert await crowd.end(many[0]) == "c"
        assert not large.inside
    finally:
        await crowd.close()


async def test_a_request_too_large_for_every_available_engine_does_not_wait_or_take_a_place(eight: Crowd):
    many = [await eight.come("b", prompt=10) for _ in range(9)]
    own, most = 8, 4
    eight.queue._capacity = lambda: Capacity(own, 0, own, 0, most)
    large = await eight.come("a", sequences=5)
    assert (large.inside, eight.queue.inside, eight.queue.waiting) == (True, 8, 1)
    large.leave.set()
    await settled()
    assert (eight.queue.inside, eight.queue.waiting) == (8, 1)
    # The engine that would take it leaves while it waits, with more places than are free at the others.
    late = await eight.come("a", sequences=4)
    assert not late.inside
    own, most = 6, 3
    many[0].leave.set()
    await settled()
    assert (late.inside, eight.queue.inside, eight.queue.waiting) == (True, 7, 1)


async def test_operators_see_shares_of_foreign_servers_and_received_service(eight: Crowd):
    first = await eight.come("a", prompt=100, tokens=3)
    await eight.come("b", sequences=4)
    rows = eight.queue.tenants()
    assert {tenant: (row.share, row.inside, row.service) for tenant, row in rows.items()} == {
        "a": (4, 1, 0.0),
        "b": (4, 4, 0.0),
    }
    await eight.come("a")
    first.leave.set()
    await settled()
    # It is the received service, so it never falls.
    assert eight.queue.tenants()["a"].service == 100 * PROMPT_TOKEN + 3 * OUTPUT_TOKEN


async def test_the_time_to_try_again_counts_requests_not_their_sequences():
    crowd = Crowd(make_queue(lambda: 8, max_waiting=3))
    try:
        await crowd.come("a", sequences=8)
        crowd.queue._seconds_inside = 10.0
        for _ in range(4):
            last = await crowd.come("b")
        assert isinstance(error := last.task.exception(), Overloaded)
        # Four requests wait, one is inside, and each takes 10 s.
        assert int(error.headers["Retry-After"]) == 40
    finally:
        await crowd.close()


async def test_a_share_of_foreign_servers_is_divided_by_the_number_of_processes_once():
    """Two processes share 16 places, of which this one may use eight. Two tenants are active in both."""
    counters = ServiceCounters()
    queue = RequestQueue(lambda: Capacity(8, 0, 16), counters, 100, 1000.0)
    crowd = Crowd(queue)
    try:
        for _ in range(3):
            await crowd.come("a", prompt=10)
        large = await crowd.come("b", sequences=6)
        counters.exchanged(counters.changes(), 2.0, [(0.0, 2), (0.0, 2)])
        assert {row.share for row in queue.tenants().values()} == {4}
        assert (await crowd.come("a")).inside
        assert not (await crowd.come("a")).inside
        assert not large.inside
    finally:
        await crowd.close()
