"""Bursts of requests begin over several rounds of the event loop, and owners take turns."""

import asyncio
import itertools

from gateway.sharing.rounds import Rounds


async def test_a_burst_leaves_rounds_to_others():
    rounds, begun, seen = Rounds(each=4), [], []

    async def one(owner: str) -> None:
        await rounds.begin(owner)
        begun.append(owner)

    burst = [asyncio.ensure_future(one("noisy")) for _ in range(100)]
    late = asyncio.ensure_future(one("quiet"))
    while not all(task.done() for task in burst):
        seen.append(len(begun))
        await asyncio.sleep(0)
    await late
    assert len(begun) == 101
    assert max(after - before for before, after in itertools.pairwise(seen)) <= 4
    # Not after all earlier requests of the burst.
    assert begun.index("quiet") < 10


async def test_those_who_leave_hold_nobody_up():
    rounds = Rounds(each=2)
    tasks = [asyncio.ensure_future(rounds.begin(f"owner-{i % 3}")) for i in range(50)]
    await asyncio.sleep(0)
    for task in tasks[10:40]:
        task.cancel()
    done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
    assert sum(result is None for result in done) >= 20
    await asyncio.wait_for(rounds.begin("another"), 10)
