"""The queue before full engines: order, bounds, and no lost slot."""

import asyncio
from collections.abc import Callable

import pytest

from gateway.errors import Overloaded
from gateway.fleet.queueing.queue import Capacity, Place, RequestQueue
from gateway.fleet.queueing.service_counters import ServiceCounters
from gateway.fleet.queueing.service_meter import Reported, ServiceMeter
from wire.costs import OUTPUT_TOKEN, PROMPT_TOKEN
from wire.deadlines import deadline


def make_queue(
    own: Callable[[], int | None], *, places: int = 0, max_waiting: int = 100, max_seconds: float = 1000.0
) -> RequestQueue:
    """Return a queue with room for `own()` requests. places: 0 leaves out the admissions beyond that."""

    def capacity() -> Capacity | None:
        number = own()
        return None if number is None else Capacity(number, places, unordered_places=0 if places else number)

    return RequestQueue(capacity, ServiceCounters(), max_waiting, max_seconds)


class Visitor:
    """A request in the queue. It signals its admission and stays until the test ends it."""

    def __init__(
        self,
        queue: RequestQueue,
        tenant: str,
        priority: int = 5,
        weight: float = 1.0,
        tokens: int = 0,
        prompt: int = 0,
        sequences: int = 1,
    ) -> None:
        self.tenant, self.tokens, self.prompt = tenant, tokens, prompt
        self.leave = asyncio.Event()
        self.inside = False
        self.task = asyncio.create_task(
            self._visit(
                queue, Place(tenant, weight, priority, ServiceMeter(prompt, self._reported), sequences=sequences)
            )
        )

    async def _visit(self, queue: RequestQueue, place: Place) -> None:
        async with queue.enter(place):
            with place.meter.attempt(lambda _: None):
                self.inside = True
                await self.leave.wait()
        self.inside = False

    def _reported(self) -> Reported:
        return Reported(self.prompt, self.tokens)


class Crowd:
    def __init__(self, queue: RequestQueue) -> None:
        self.queue = queue
        self.all: list[Visitor] = []

    async def come(self, tenant: str, **options: int | float) -> Visitor:
        self.all.append(Visitor(self.queue, tenant, **options))  # type: ignore[arg-type]
        await settled()
        return self.all[-1]

    async def close(self) -> None:
        """Cancel all requests. None of them may leave anything behind."""
        for visitor in self.all:
            visitor.task.cancel()
        await asyncio.gather(*(visitor.task for visitor in self.all), return_exceptions=True)
        assert (self.queue.inside, self.queue.waiting) == (0, 0)

    @property
    def inside(self) -> list[str]:
        return [visitor.tenant for visitor in self.all if visitor.inside]

    async def end(self, visitor: Visitor) -> str:
        """End a request; return the next one that is admitted."""
        before = [other for other in self.all if other.inside]
        visitor.leave.set()
        await settled()
        [entered] = [other for other in self.all if other.inside and other not in before]
        return entered.tenant

    async def end_anyone(self) -> str:
        return await self.end(next(visitor for visitor in self.all if visitor.inside))


async def settled() -> None:
    """Let every task run until it waits."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.fixture
async def crowd():
    crowd = Crowd(make_queue(lambda: 1, max_waiting=100, max_seconds=1000.0))
    yield crowd
    await crowd.close()


async def test_no_more_are_inside_than_there_is_room_for(crowd: Crowd):
    first = await crowd.come("a")
    await crowd.come("a")
    assert (crowd.inside, crowd.queue.waiting) == (["a"], 1)
    assert await crowd.end(first) == "a"


async def test_the_lowest_number_goes_first(crowd: Crowd):
    first = await crowd.come("first")
    for tenant, priority in (("nine", 9), ("five", 5), ("zero", 0)):
        await crowd.come(tenant, priority=priority)
    order = [await crowd.end(first), await crowd.end_anyone(), await crowd.end_anyone()]
    assert order == ["zero", "five", "nine"]


async def test_a_high_number_gets_its_turn_beside_low_ones_without_end(crowd: Crowd, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gateway.fleet.queueing.waiting.PRIORITY_S", 0.01)
    await crowd.come("zero", priority=0)
    nine = await crowd.come("nine", priority=9)
    until = asyncio.get_running_loop().time() + 30.0
    turns = 0
    while not nine.inside:
        assert asyncio.get_running_loop().time() < until
        await crowd.come("zero", priority=0)
        await crowd.end_anyone()
        turns += 1
    assert turns > 1


async def test_the_least_served_tenant_goes_first_by_weight(crowd: Crowd):
    await crowd.come("light", tokens=10)
    for _ in range(8):
        await crowd.come("light", tokens=10)
        await crowd.come("heavy", tokens=10, weight=3.0)
    order = [await crowd.end_anyone() for _ in range(8)]
    # Three times the weight gets three times the service.
    assert order.count("heavy") == 6


async def test_a_tenant_that_was_idle_has_no_credit(crowd: Crowd):
    current = await crowd.come("busy", tokens=1000)
    for _ in range(4):
        await crowd.come("busy", tokens=1000)
    await crowd.end(current)
    for _ in range(4):
        await crowd.come("new", tokens=1000)
    order = [await crowd.end_anyone() for _ in range(4)]
    assert sorted(order) == ["busy", "busy", "new", "new"]


async def test_a_full_queue_refuses_who_would_be_last():
    queue = make_queue(lambda: 1, max_waiting=2, max_seconds=1000.0)
    crowd = Crowd(queue)
    first = await crowd.come("first")
    low, middle = await crowd.come("low", priority=9), await crowd.come("middle", priority=5)
    # A better request arrives: the worst waiting request is refused.
    high = await crowd.come("high", priority=0)
    with pytest.raises(Overloaded) as refused:
        await low.task
    assert refused.value.status == 429
    assert int(refused.value.headers["Retry-After"]) >= 1
    # A worse request is refused itself.
    worst = await crowd.come("worst", priority=9)
    with pytest.raises(Overloaded, match="the queue for them is full"):
        await worst.task
    assert await crowd.end(first) == "high"
    assert await crowd.end(high) == "middle"
    middle.leave.set()
    await middle.task
    assert (queue.inside, queue.waiting) == (0, 0)


async def test_no_request_waits_longer_than_the_limit():
    queue = make_queue(lambda: 0, max_waiting=10, max_seconds=0.05)
    crowd = Crowd(queue)
    with pytest.raises(Overloaded, match=r"this request waited 0\.05 s for one"):
        await (await crowd.come("a")).task
    assert (queue.inside, queue.waiting) == (0, 0)


async def test_without_any_engine_nobody_waits_for_one():
    crowd = Crowd(make_queue(lambda: None, max_waiting=0, max_seconds=1000.0))
    for _ in range(3):
        await crowd.come("a")
    assert crowd.inside == ["a"] * 3
    for visitor in crowd.all:
        visitor.leave.set()
        await visitor.task


async def test_room_that_grows_by_itself_is_used(crowd: Crowd):
    room = 0
    queue = make_queue(lambda: room, max_waiting=10, max_seconds=1000.0)
    crowd.queue = queue
    await crowd.come("a")
    await crowd.come("b")
    assert crowd.inside == []
    room = 1
    queue.admit()
    await settled()
    assert crowd.inside == ["a"]


async def test_who_leaves_while_waiting_or_at_the_moment_of_its_turn_takes_no_place(crowd: Crowd):
    room = 0
    crowd.queue = make_queue(lambda: room, max_waiting=10, max_seconds=1000.0)
    first, second, _ = [await crowd.come(tenant) for tenant in "abc"]
    first.task.cancel()
    await settled()
    assert crowd.queue.waiting == 2
    room = 1
    # Its turn comes, and it is cancelled before it can continue.
    crowd.queue.admit()
    second.task.cancel()
    await settled()
    assert crowd.inside == ["c"]


async def test_a_tenant_below_its_share_does_not_wait_for_the_places_of_another():
    crowd = Crowd(make_queue(lambda: 4, places=4))
    for _ in range(8):
        await crowd.come("long")
    assert crowd.inside == ["long"] * 4
    for _ in range(3):
        await crowd.come("late")
    # Half of the four places are its share. The third request waits like those of the other tenant.
    assert crowd.inside == ["long"] * 4 + ["late"] * 2
    # While more are inside than there are places, a place that becomes free goes to nobody above its share.
    first, second, third, *_ = [visitor for visitor in crowd.all if visitor.inside]
    for visitor in (first, second):
        visitor.leave.set()
        await settled()
    assert sorted(crowd.inside) == ["late"] * 2 + ["long"] * 2
    third.leave.set()
    await settled()
    assert sorted(crowd.inside) == ["late"] * 2 + ["long"] * 2
    await crowd.close()


async def test_many_tenants_with_a_share_below_one_request_get_at_most_twice_the_places():
    crowd = Crowd(make_queue(lambda: 2, places=2))
    for number in range(9):
        await crowd.come(f"tenant-{number}")
    assert len(crowd.inside) == 4
    await crowd.close()


async def test_places_that_become_free_together_are_divided_by_the_prompts_that_they_take():
    room = 0
    crowd = Crowd(make_queue(lambda: room))
    for tenant in ("a", "b"):
        for _ in range(8):
            await crowd.come(tenant, prompt=100)
    room = 8
    crowd.queue.admit()
    await settled()
    assert sorted(crowd.inside) == ["a"] * 4 + ["b"] * 4
    await crowd.close()


async def test_tokens_are_charged_while_they_are_generated():
    room = 2
    crowd = Crowd(make_queue(lambda: room))
    talks = await crowd.come("talks")
    await crowd.come("is silent")
    room = 3
    talks.tokens = 50
    crowd.queue.count_service()
    room = 2
    await crowd.come("talks")
    await crowd.come("is silent")
    assert await crowd.end(talks) == "is silent"
    await crowd.close()


async def test_charges_reorder_the_requests_that_wait_already(crowd: Crowd):
    talks = await crowd.come("talks")
    await crowd.come("talks")
    await crowd.come("is silent")
    talks.tokens = 50
    crowd.queue.count_service()
    assert await crowd.end(talks) == "is silent"


async def test_a_report_of_cached_tokens_reorders_the_requests_that_wait_already():
    room = 2
    crowd = Crowd(make_queue(lambda: room))
    cached = await crowd.come("cached", prompt=4000)
    await crowd.come("other", prompt=100)
    for tenant in ("other", "cached"):
        await crowd.come(tenant, prompt=1)
    cached.prompt = 36
    crowd.queue.count_service()
    room = 3
    crowd.queue.admit()
    await settled()
    assert crowd.inside == ["cached", "other", "cached"]
    await crowd.close()


def test_a_generated_token_costs_more_than_one_of_a_prompt():
    assert OUTPUT_TOKEN > PROMPT_TOKEN


async def test_deadlines_order_a_tenants_own_requests_only():
    queue, entered = make_queue(lambda: 1), []

    async def visit(name: str, tenant: str, due: float) -> None:
        place = Place(tenant, 1.0, 5, ServiceMeter(0))
        place.deadline = due
        async with queue.enter(place):
            entered.append(name)

    async with queue.enter(Place("other", 1.0, 5, ServiceMeter(0))), asyncio.TaskGroup() as group:
        visitors = [("late", "acme", deadline(0, None, 0)), ("globex", "globex", deadline(0, None, 0))]
        visitors += [("target", "acme", deadline(0, 0.5, 0)), ("first", "acme", deadline(0, None, -100))]
        for visitor in visitors:
            group.create_task(visit(*visitor))
            await settled()
        # acme came first among equally served tenants, so it has the first turn, whatever its requests' deadlines.
        queue.free(next(iter(queue._admitted)))
    assert entered == ["first", "target", "late", "globex"]


async def test_a_request_that_gave_its_place_back_waits_for_another(crowd: Crowd):
    queue, entered = crowd.queue, list[str]()
    back = asyncio.Event()

    async def come_twice() -> None:
        place = Place("twice", 1.0, 5, ServiceMeter(0))
        async with queue.enter(place):
            queue.free(place)
            await back.wait()
            await queue.enter_again(place)
            entered.append("twice")
            assert queue.inside == 1

    task = asyncio.create_task(come_twice())
    await settled()
    assert queue.inside == 0
    first, second = await crowd.come("a"), await crowd.come("a")
    back.set()
    await settled()
    assert (queue.inside, queue.waiting, entered) == (1, 2, [])
    first.leave.set()
    second.leave.set()
    await task
    assert (queue.inside, queue.waiting, entered) == (0, 0, ["twice"])


async def test_a_request_that_waits_again_and_leaves_leaves_nothing_behind():
    queue = make_queue(lambda: 1, max_seconds=0.05)
    place = Place("twice", 1.0, 5, ServiceMeter(7))
    async with queue.enter(place):
        queue.free(place)
        async with queue.enter(Place("a", 1.0, 5, ServiceMeter(0))):
            with pytest.raises(Overloaded):
                await queue.enter_again(place)
    assert (queue.inside, queue.waiting) == (0, 0)
