"""Concurrency limiter: an owner holds at most `each` places, and a cancelled waiting task loses none."""

import asyncio
import random
import sys
import time
from itertools import pairwise

import pytest

from gateway.sharing import concurrency
from gateway.sharing.concurrency import ConcurrencyLimiter


@pytest.mark.parametrize(("places", "each"), [(sys.maxsize, 8), (2, 1), (5, 3)])
async def test_no_owner_has_more_than_its_places_whoever_leaves(places: int, each: int):
    rng, limiter = random.Random(7), ConcurrencyLimiter(places, each)
    held: dict[str, int] = {"a": 0, "b": 0, "c": 0}
    most = dict.fromkeys(held, 0)

    async def one(owner: str) -> None:
        async with limiter.place(owner):
            held[owner] += 1
            most[owner] = max(most[owner], held[owner])
            assert sum(held.values()) <= places
            try:
                await asyncio.sleep(rng.random() / 200)
            finally:
                held[owner] -= 1

    tasks = [asyncio.ensure_future(one(rng.choice("abc"))) for _ in range(300)]
    for task in rng.sample(tasks, 150):
        await asyncio.sleep(0.0005)
        task.cancel()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
    assert not [result for result in results if isinstance(result, Exception)]
    assert max(most.values()) <= each
    # No place is lost: the same number is free at once.
    async with asyncio.timeout(30):
        for owner in held:
            for _ in range(min(each, places)):
                await limiter.place(owner).__aenter__()
            places -= min(each, places)
            if not places:
                break


async def test_an_owner_rests_after_its_work_and_no_other_does():
    """An owner that asks without pause holds the place for a quarter of the time.

    Another owner gets it during the rest.
    """
    limiter = ConcurrencyLimiter(1, rest=3.0)
    began: list[float] = []
    for _ in range(3):
        async with limiter.place("a"):
            began.append(time.monotonic())
            await asyncio.sleep(0.1)
        async with limiter.place(f"other {len(began)}"):
            pass
    assert all(later - earlier >= 0.4 for earlier, later in pairwise(began))


async def test_an_owner_does_not_wait_for_anothers_rest(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(concurrency, "MAX_REST_SECONDS", 3600.0)
    limiter = ConcurrencyLimiter(1, rest=10**6)
    async with limiter.place("a"):
        await asyncio.sleep(0.1)
    async with asyncio.timeout(30), limiter.place("other"):
        pass
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1), limiter.place("a"):
            pass
