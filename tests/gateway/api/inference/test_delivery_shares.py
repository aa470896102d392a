"""Memory of unread answers: the shares of tenants that act together, and the turns of those that wait."""

import asyncio
from typing import Any, cast

from gateway.api.inference.delivery import Deliveries, Delivery
from gateway.metrics import Metrics


class Unread:
    """A connection with nothing unread."""

    def get_write_buffer_size(self) -> int:
        return 0


class Answers:
    """Unread answers of tenants."""

    def __init__(self, total_bytes: int) -> None:
        rules: Any = {"reader_bytes": 2**20, "min_read_rate": 1.0, "window": 60.0}
        self.deliveries = Deliveries(Metrics(), total_bytes=total_bytes, **rules)

    def of(self, owner: str) -> Delivery:
        delivery = Delivery(self.deliveries, cast(Any, Unread()))
        delivery.owner = owner
        return delivery

    def take(self, delivery: Delivery, size: int) -> bool:
        """Hold `size` bytes for a delivery. Return whether it may hold them."""
        if has_room := self.deliveries.has_room(delivery, size):
            self.deliveries.hold(delivery, size)
        return has_room

    def fill(self, owner: str, size: int) -> int:
        """Let a tenant have as many answers of a size as it may; return their number."""
        return next(number for number in range(2**20) if not self.take(self.of(owner), size))


def test_two_tenants_with_unread_answers_leave_room_for_a_thirds():
    """They could fill the memory, and then no other answer above 64 KiB was sent."""
    answers = Answers(2**25)
    assert [answers.fill(owner, 2**20) for owner in "ab"] == [16, 8]
    assert answers.take(answers.of("c"), 2**23)


def test_a_tenants_single_answer_may_take_what_is_free_and_shrink():
    answers = Answers(2**24)
    assert answers.fill("a", 2**20) == 8
    single = answers.of("b")
    assert answers.take(single, 2**23)
    assert answers.take(single, 2**22)
    assert not answers.take(answers.of("a"), 1), "it leaves less free than it holds"


async def test_large_answers_that_wait_for_memory_get_it_in_their_tenants_turns():
    """A third tenant's answer waited for all of two others' answers, each as large as a tenant's share."""
    answers, size = Answers(2**24), 2**23
    held = [answers.of(owner) for owner in "ab"]
    for each in held:
        await each.reserve(size)
    got = asyncio.Queue[Delivery]()

    async def reserve(delivery: Delivery) -> None:
        await delivery.reserve(size)
        got.put_nowait(delivery)

    waiting = [asyncio.create_task(reserve(answers.of(owner))) for owner in 50 * "ab" + "ccd"]
    await asyncio.sleep(0)
    for expected in "cdab":
        # An answer that comes at that moment takes nothing from those that wait.
        waiting.append(asyncio.create_task(reserve(answers.of("a"))))
        gone = held.pop(0)
        gone.reserved = 0
        answers.deliveries.hold(gone, 0)
        held.append(await asyncio.wait_for(got.get(), 30))
        assert (held[-1].owner, got.qsize()) == (expected, 0)
    assert answers.deliveries.held == 2 * size
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


async def test_a_tenants_second_answer_comes_after_the_first_ones_of_others():
    answers, mib = Answers(2**24), 2**20
    held = [answers.of(owner) for owner in "ab"]
    for each in held:
        await each.reserve(8 * mib)
    waiting = [asyncio.create_task(answers.of(owner).reserve(n * mib)) for owner, n in (("c", 2), ("c", 2), ("d", 5))]
    await asyncio.sleep(0)
    held[0].reserved = 0
    answers.deliveries.hold(held[0], 0)
    await asyncio.wait_for(asyncio.gather(waiting[0], waiting[2]), 30)
    # With both of the tenant's answers there would have been no room for the other's.
    assert not waiting[1].done()
    waiting[1].cancel()


async def test_a_client_that_leaves_returns_the_memory_that_it_has_just_got():
    answers, size = Answers(2**24), 2**23
    held = [answers.of(owner) for owner in "ab"]
    for each in held:
        await each.reserve(size)
    leaving, other = [asyncio.create_task(answers.of(owner).reserve(size)) for owner in "cd"]
    await asyncio.sleep(0)
    answers.deliveries.hold(held[0], 0)
    # The memory is given in the next iteration of the event loop, in which its receiver is cancelled.
    asyncio.get_running_loop().call_soon(leaving.cancel)
    await asyncio.wait({leaving})
    assert leaving.cancelled()
    await asyncio.wait_for(other, 30)
    assert answers.deliveries.held == 2 * size
