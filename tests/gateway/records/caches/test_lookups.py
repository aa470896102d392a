"""Concurrent lookups of one key share one query, and no caller gets a result older than its own call."""

import asyncio

import pytest

from gateway.records.caches.lookups import Lookups
from testing.gateway.running import until


class Answers:
    """Queries that wait until the test answers them."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, asyncio.Future[int]]] = []

    async def look_up(self, key: str) -> int:
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.asked.append((key, answer))
        return await answer

    async def were_asked(self, times: int) -> bool:
        return len(self.asked) == times


async def test_one_question_for_all_who_came_before_it_and_one_for_all_who_came_while_it_was_out():
    answers = Answers()
    lookups = Lookups(answers.look_up)
    first = [asyncio.create_task(lookups.get("a")) for _ in range(100)]
    other = asyncio.create_task(lookups.get("b"))
    await until(lambda: answers.were_asked(2))
    later = [asyncio.create_task(lookups.get("a")) for _ in range(100)]
    asked = dict(answers.asked)
    asked["a"].set_result(1)
    assert await asyncio.gather(*first) == [1] * 100
    await until(lambda: answers.were_asked(3))
    answers.asked[2][1].set_result(2)
    assert await asyncio.gather(*later) == [2] * 100
    asked["b"].set_result(3)
    assert await other == 3


async def test_one_who_leaves_does_not_end_it_for_the_others():
    answers = Answers()
    lookups = Lookups(answers.look_up)
    leaves, stays = (asyncio.create_task(lookups.get("a")) for _ in range(2))
    await until(lambda: answers.were_asked(1))
    leaves.cancel()
    await asyncio.wait({leaves})
    answers.asked[0][1].set_result(1)
    assert await stays == 1


async def test_an_error_is_for_all_who_waited_and_for_nobody_after():
    answers = Answers()
    lookups = Lookups(answers.look_up)
    waiting = [asyncio.create_task(lookups.get("a")) for _ in range(3)]
    await until(lambda: answers.were_asked(1))
    answers.asked[0][1].set_exception(OSError("away"))
    assert [type(each) for each in await asyncio.gather(*waiting, return_exceptions=True)] == [OSError] * 3
    again = asyncio.create_task(lookups.get("a"))
    await until(lambda: answers.were_asked(2))
    answers.asked[1][1].set_result(1)
    assert await again == 1


async def test_what_nobody_waits_for_any_more_may_fail(caplog: pytest.LogCaptureFixture):
    answers = Answers()
    lookups = Lookups(answers.look_up)
    leaves = asyncio.create_task(lookups.get("a"))
    await until(lambda: answers.were_asked(1))
    leaves.cancel()
    await asyncio.wait({leaves})
    answers.asked[0][1].set_exception(OSError("away"))
    again = asyncio.create_task(lookups.get("a"))
    await until(lambda: answers.were_asked(2))
    answers.asked[1][1].set_result(1)
    assert await again == 1
    assert not caplog.records
