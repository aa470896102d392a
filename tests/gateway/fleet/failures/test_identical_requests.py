"""Identical suspected requests: one of them runs alone for all."""

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gateway.fleet.engines.own_requests import NamedBody
from gateway.fleet.failures import isolation
from gateway.fleet.failures.isolation import NotAlone
from gateway.fleet.failures.quarantine import Quarantine
from testing.gateway.running import Answer, becomes, until
from tests.gateway.fleet.failures.test_isolation import Turns, already_over, engines, short_pauses
from tests.gateway.fleet.failures.test_suspected_requests import POISON, mortal_fleet, quick

__all__ = ["quick", "short_pauses"]

# More than a tenant's different requests that may wait.
MANY = isolation.MAX_WAITING + 9
SEATS = 2


class Suspicion:
    """Suspicion that a test ends. asked: how often it was asked for."""

    def __init__(self) -> None:
        self.is_over = False
        self.asked = 0

    async def __call__(self) -> bool:
        self.asked += 1
        return not self.is_over


@pytest.mark.usefixtures("short_pauses")
async def test_one_of_many_identical_requests_runs_alone_and_the_others_go_on_after_it(any_redis: Any):
    turns, over, suspicion = Turns(any_redis, engines("http://one:1")), asyncio.Event(), Suspicion()
    first = turns.begin("a", over, is_suspected=suspicion, mark="the same")
    await until(partial(turns.have_entered, 1))
    others = [turns.begin("a", over, is_suspected=suspicion, mark="the same") for _ in range(MANY)]
    await becomes(lambda: turns.waiting("a") == MANY)
    asked = suspicion.asked
    await asyncio.sleep(5 * isolation.PAUSE_SECONDS)
    assert suspicion.asked == asked, "they wait without asking"
    # Its answer has ended: it survived.
    suspicion.is_over = True
    over.set()
    assert await first is not None
    assert await asyncio.gather(*others) == [None] * MANY
    assert turns.entered == ["a"]
    assert turns.isolation._lines == {}


@pytest.mark.usefixtures("short_pauses")
async def test_identical_requests_take_one_place_of_their_tenants(any_redis: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(isolation, "MAX_WAITING", 2)
    fleet = engines("http://one:1")
    turns = Turns(any_redis, fleet)
    fleet[0].other_processes_load = 1
    waiting = [turns.begin("a", already_over(), mark=mark) for mark in ("one", "two", "one", "two", "one")]
    await becomes(lambda: turns.waiting("a") == 5)
    with pytest.raises(NotAlone):
        await turns.begin("a", already_over(), mark="three")
    with pytest.raises(NotAlone):
        await turns.begin("a", already_over(), mark="three")
    fleet[0].other_processes_load = 0
    # A request of another tenant is never identical.
    assert await turns.begin("b", already_over(), mark="one") is fleet[0]
    assert await asyncio.gather(*waiting) == [fleet[0]] * 5, "each ran alone, because none was cleared"


@pytest.mark.usefixtures("short_pauses")
async def test_the_next_identical_request_runs_alone_if_the_first_ones_client_leaves(any_redis: Any):
    turns, over = Turns(any_redis, engines("http://one:1")), asyncio.Event()
    leaves = turns.begin("a", asyncio.Event(), mark="the same")
    await until(partial(turns.have_entered, 1))
    second, third = [turns.begin("a", over, mark="the same") for _ in range(2)]
    await becomes(lambda: turns.waiting("a") == 2)
    leaves.cancel()
    await asyncio.gather(leaves, return_exceptions=True)
    turns.isolation._engines("base")[0].requests.forget_detached()
    await until(partial(turns.have_entered, 2))
    assert turns.waiting("a") == 1
    over.set()
    assert None not in await asyncio.gather(second, third)
    assert turns.isolation._lines == {}


@pytest.mark.usefixtures("short_pauses")
async def test_a_client_that_leaves_a_line_takes_nobodys_turn(any_redis: Any):
    fleet, over = engines("http://one:1"), asyncio.Event()
    turns = Turns(any_redis, fleet)
    running = turns.begin("a", over, mark="the same")
    await until(partial(turns.have_entered, 1))
    leaves = turns.begin("a", asyncio.Event(), mark="the same")
    await becomes(lambda: turns.waiting("a") == 1)
    leaves.cancel()
    await asyncio.gather(leaves, return_exceptions=True)
    assert (turns.waiting("a"), running.done()) == (0, False)
    assert turns.isolation._lines["a"], "the first one still runs"
    over.set()
    assert await running is fleet[0]
    assert turns.isolation._lines == {}


@pytest.mark.usefixtures("short_pauses")
async def test_an_identical_request_that_has_an_engine_passes_one_that_has_none(any_redis: Any):
    """They may differ in the engines that they have tried, or to which a client has pinned them."""
    fleet = engines("http://one:1")
    turns = Turns(any_redis, fleet)
    stuck = turns.begin("a", already_over(), usable=lambda _: False, mark="the same")
    await becomes(lambda: turns.waiting("a") == 1)
    assert await turns.begin("a", already_over(), mark="the same") is fleet[0]
    assert not stuck.done()
    stuck.cancel()
    await asyncio.gather(stuck, return_exceptions=True)


async def test_an_identical_request_waits_no_longer_than_another(any_redis: Any, monkeypatch: pytest.MonkeyPatch):
    turns, over = Turns(any_redis, engines("http://one:1")), asyncio.Event()
    running = turns.begin("a", over, mark="the same")
    await until(partial(turns.have_entered, 1))
    monkeypatch.setattr(isolation, "WAIT_SECONDS", 0.2)
    with pytest.raises(NotAlone):
        await turns.begin("a", over, mark="the same")
    assert not running.done()
    over.set()
    assert await running is not None


@pytest.mark.usefixtures("quick")
async def test_a_tenant_that_repeats_one_request_beside_a_killer_is_served(
    tmp_path: Path, model_dir: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
):
    """The repeated request is on each engine that dies, so it is suspected, and all repetitions wait at the same time.
    Once one of them is cleared, they wait for places on the engines like other requests.
    """
    cleared, note_survived = list[str](), Quarantine.note_survived

    async def note(quarantine: Quarantine, tenant_id: str, digests: Sequence[str], body: NamedBody) -> None:
        cleared.append(tenant_id)
        await note_survived(quarantine, tenant_id, digests, body)

    monkeypatch.setattr(Quarantine, "note_survived", note)
    async with mortal_fleet(3, tmp_path, model_dir, redis_url) as (gateway, fleet):
        for each in fleet:
            each.seats = SEATS
        acme = await gateway.tenant("acme")
        other = await gateway.tenant("other", requests_per_minute=6_000, max_concurrent=MANY)
        answers, busiest, goes_on = list[Answer](), 0, True

        async def ask() -> None:
            nonlocal busiest
            while goes_on:
                busiest = max(busiest, sum(each._active for each in fleet))
                how = {"tokens": 4, "delay": 0.05}
                answers.append(await other.complete(prompt="the same", max_tokens=4, x_engine=how))

        lanes = [asyncio.create_task(ask()) for _ in range(MANY)]
        await becomes(lambda: all(each._active for each in fleet))
        statuses = []
        while not statuses or statuses[-1] != 422:
            statuses.append((await acme.complete(prompt=POISON)).status)
            assert len(statuses) < 4, statuses
        served = len(answers)
        await becomes(lambda: len(answers) > served + MANY)
        goes_on = False
        await asyncio.gather(*lanes)
        assert [each.error for each in answers if each.status != 200] == []
        assert len(cleared) < MANY, "those that waited for another's result show nothing"
        # The queue's bound: a tenant below its share gets places beyond the engines' seats, at most as many again.
        assert busiest <= 2 * SEATS * len(fleet)
