"""Requests that may have killed engines run on engines without other tenants' requests."""

import asyncio
import math
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest

from gateway.fleet.discovery.addresses import parse_address
from gateway.fleet.engines import own_requests
from gateway.fleet.engines.engine import Drained, EngineRecord, EngineState
from gateway.fleet.engines.health import Health
from gateway.fleet.engines.suspects import Suspect
from gateway.fleet.failures import isolation, kept_engine
from gateway.fleet.failures.isolation import Isolation, NotAlone
from gateway.fleet.failures.kept_engine import KeptEngine
from gateway.process.background import running as in_background
from gateway.redis.client import connect
from testing.gateway.running import becomes, until


async def always_suspected() -> bool:
    return True


def engines(*urls: str) -> list[EngineRecord]:
    """Return engines whose latest report is always newer than a turn."""
    found = [EngineRecord(parse_address(url)) for url in urls]
    for each in found:
        each.condition.change(Health.UP, "")
        each.observed_at = math.inf
    return found


@contextmanager
def busy(record: EngineRecord, tenant: str) -> Iterator[None]:
    """Let a tenant have a request on the engine that ends with the block."""
    with record.requests.count(None, tenant) as request:
        yield
        request.end()


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next turn begin soon after the one before."""
    monkeypatch.setattr(isolation, "SHARING_SECONDS", 0.02)


class Turns:
    """A process's isolation over some engines. entered: the tenants whose requests ran alone, in order."""

    def __init__(self, redis: Any, fleet: list[EngineRecord], deployment: str = "") -> None:
        self.kept = KeptEngine(redis, deployment or uuid.uuid4().hex, lambda: True)
        self.isolation = Isolation(lambda _: fleet, self.kept)
        self.entered: list[str] = []

    def begin(
        self,
        tenant: str,
        over: asyncio.Event,
        usable: Callable[[EngineRecord], bool] = lambda _: True,
        is_suspected: Callable[[], Awaitable[bool]] = always_suspected,
        mark: str = "",
    ) -> "asyncio.Task[EngineRecord | None]":
        """Begin a request that runs alone until an event. mark: the same for identical requests; "": it is unique."""
        request = Suspect("request", tenant, mark or uuid.uuid4().hex)

        async def run() -> EngineRecord | None:
            async with self.isolation.engine("base", request, usable, is_suspected) as found:
                if found is not None:
                    assert found.serves_only(tenant)
                    with found.requests.count(None, tenant) as in_flight:
                        self.entered.append(tenant)
                        await over.wait()
                        in_flight.end()
                return found

        return asyncio.create_task(run())

    async def have_entered(self, number: int) -> bool:
        return len(self.entered) >= number

    def waiting(self, tenant: str) -> int:
        """Return the number of the tenant's requests that wait."""
        lines = self.isolation._lines.get(tenant, {}).values()
        return sum(len(line._places) - line.is_running for line in lines)


def already_over() -> asyncio.Event:
    over = asyncio.Event()
    over.set()
    return over


async def test_an_engine_is_kept_until_others_requests_and_then_the_suspected_one_end(any_redis: Any):
    fleet = engines("http://one:1", "http://two:1")
    turns, over = Turns(any_redis, fleet), asyncio.Event()
    with busy(fleet[0], "b"), busy(fleet[0], "b"):
        with busy(fleet[1], "b"):
            running = turns.begin("a", over)
            await becomes(lambda: not turns.isolation.allows(fleet[1]))
            assert turns.isolation.allows(fleet[0]), "the engine with the fewest requests is kept"
            await asyncio.sleep(3 * isolation.PAUSE_SECONDS)
            assert turns.entered == []
        assert not turns.isolation.is_alone(fleet[1])
        await until(partial(turns.have_entered, 1))
        assert not turns.isolation.allows(fleet[1])
        assert [turns.isolation.is_alone(each) for each in fleet] == [False, True]
        over.set()
        assert await running is fleet[1]
    assert turns.isolation.allows(fleet[1])
    assert not turns.isolation.is_alone(fleet[1])
    assert not turns.isolation.is_active
    assert turns.isolation._lines == {}


@pytest.mark.usefixtures("short_pauses")
async def test_a_request_without_an_engine_blocks_no_other_base(any_redis: Any):
    fleet = engines("http://one:1")
    turns = Turns(any_redis, fleet)
    turns.isolation._engines = lambda base: fleet if base == "base" else []

    async def run_elsewhere() -> None:
        request = Suspect("request", "a", "its mark")
        async with turns.isolation.engine("another base", request, lambda _: True, always_suspected):
            raise AssertionError

    waiting = asyncio.create_task(run_elsewhere())
    await becomes(lambda: turns.waiting("a") == 1)
    assert await turns.begin("a", already_over()) is fleet[0]
    assert await turns.begin("b", already_over()) is fleet[0]
    assert not waiting.done()
    waiting.cancel()


async def test_the_last_engine_is_not_kept_while_another_may_come_back(any_redis: Any):
    """The request may kill it, and other requests would have none."""
    fleet = engines("http://one:1", "http://two:1")
    turns = Turns(any_redis, fleet)
    fleet[0].condition.change(Health.DOWN, "")
    running = turns.begin("a", already_over())
    await asyncio.sleep(3 * isolation.PAUSE_SECONDS)
    assert not turns.isolation.is_active
    assert turns.isolation.is_last("base", fleet[1])
    fleet[0].condition.change(Health.UP, "")
    assert await running in fleet
    fleet[0].condition.change(Health.MISCONFIGURED, "only an operator ends that")
    assert not turns.isolation.is_last("base", fleet[1])
    fleet[0].condition.change(Health.DOWN, "")
    fleet[0].drained = Drained(by="ops", at=datetime.now(UTC))
    assert not turns.isolation.is_last("base", fleet[1])


async def test_an_older_report_does_not_show_that_an_engine_is_free(any_redis: Any):
    """Other processes may have sent requests after it."""
    fleet = engines("http://one:1")
    turns = Turns(any_redis, fleet)
    fleet[0].observed_at = 0.0
    running = turns.begin("a", already_over())
    await becomes(lambda: turns.isolation.is_active)
    await asyncio.sleep(2 * isolation.SHARING_SECONDS)
    assert turns.entered == []
    fleet[0].observe_state(EngineState(running=1), 0)
    assert fleet[0].other_processes_load == 1
    await asyncio.sleep(3 * isolation.PAUSE_SECONDS)
    assert turns.entered == []
    fleet[0].observe_state(EngineState(readings=7), 0)
    read_at = fleet[0].observed_at
    fleet[0].observe_state(EngineState(readings=7), 0)
    assert fleet[0].observed_at == read_at, "this report repeats the one before"
    fleet[0].observe_state(EngineState(), 0)
    assert await running is fleet[0]


@pytest.mark.usefixtures("short_pauses")
async def test_tenants_take_turns(any_redis: Any):
    """A tenant with many such requests does not keep an engine while another tenant waits."""
    turns, over = Turns(any_redis, engines("http://one:1")), asyncio.Event()
    running = [turns.begin("a", over)]
    await until(partial(turns.have_entered, 1))
    for number, tenant in enumerate("aaab", 1):
        running.append(turns.begin(tenant, over))
        await becomes(lambda n=number: turns.waiting("a") + turns.waiting("b") == n)
    assert turns.entered == ["a"]
    over.set()
    await asyncio.gather(*running)
    assert sorted(turns.entered) == ["a", "a", "a", "a", "b"]
    assert "b" in turns.entered[:3]


async def test_an_engine_that_does_not_become_free_is_left_to_the_next_tenant(
    any_redis: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(isolation, "EMPTYING_SECONDS", 0.2)
    monkeypatch.setattr(isolation, "SHARING_SECONDS", 0.0)
    fleet = engines("http://one:1")
    turns = Turns(any_redis, fleet)
    with busy(fleet[0], "b"):
        waits = turns.begin("a", already_over())
        await becomes(lambda: not turns.isolation.allows(fleet[0]))
        # The engine has only b's requests.
        assert await turns.begin("b", already_over()) is fleet[0]
        assert not waits.done()
    assert await waits is fleet[0]
    assert turns.entered == ["b", "a"]


@pytest.mark.usefixtures("short_pauses")
async def test_requests_of_a_tenant_beyond_a_number_are_refused(any_redis: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(isolation, "MAX_WAITING", 2)
    fleet = engines("http://one:1")
    turns = Turns(any_redis, fleet)
    fleet[0].other_processes_load = 1
    waiting = [turns.begin("a", already_over()) for _ in range(2)]
    await becomes(lambda: turns.waiting("a") == 2)
    with pytest.raises(NotAlone):
        await turns.begin("a", already_over())
    fleet[0].other_processes_load = 0
    assert await turns.begin("b", already_over()) is fleet[0]
    await asyncio.gather(*waiting)


@pytest.mark.usefixtures("short_pauses")
async def test_a_request_without_a_usable_engine_lets_others_go_first(any_redis: Any):
    fleet = engines("http://one:1")
    turns, can = Turns(any_redis, fleet), list[bool]()
    waits = turns.begin("a", already_over(), usable=lambda _: bool(can))
    await becomes(lambda: turns.waiting("a") == 1)
    assert await turns.begin("b", already_over()) is fleet[0]
    can.append(True)
    assert await waits is fleet[0]


async def test_a_request_that_gets_no_engine_of_its_own_is_refused(any_redis: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(isolation, "WAIT_SECONDS", 0.2)
    fleet = engines("http://one:1")
    turns = Turns(any_redis, fleet)
    fleet[0].other_processes_load = 1
    with pytest.raises(NotAlone, match="served only on an engine without other tenants' requests") as refused:
        await turns.begin("a", asyncio.Event())
    assert int(refused.value.headers["Retry-After"]) >= 1
    assert not turns.isolation.is_active
    assert turns.isolation._lines == {}


async def test_a_request_that_is_suspected_no_longer_waits_no_longer(any_redis: Any):
    fleet, suspected = engines("http://one:1"), [True]
    turns = Turns(any_redis, fleet)

    async def is_suspected() -> bool:
        return bool(suspected)

    fleet[0].mark_down("it died")
    waits = turns.begin("a", already_over(), is_suspected=is_suspected)
    await becomes(lambda: turns.waiting("a") == 1)
    suspected.clear()
    assert await waits is None
    assert turns.isolation._lines == {}


async def test_a_cancelled_wait_keeps_no_engine(any_redis: Any):
    fleet = engines("http://one:1")
    turns = Turns(any_redis, fleet)
    with busy(fleet[0], "b"):
        waits = turns.begin("a", asyncio.Event())
        await becomes(lambda: turns.isolation.is_active)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
    assert not turns.isolation.is_active
    assert turns.isolation._lines == {}
    assert await turns.begin("a", already_over()) is fleet[0]


async def test_an_engine_stays_kept_while_it_may_work_on_a_request_whose_client_left(
    any_redis: Any, monkeypatch: pytest.MonkeyPatch
):
    """Otherwise others' requests would be there when the detached one kills it, and nothing would be learned."""
    fleet = engines("http://one:1", "http://two:1")
    turns = Turns(any_redis, fleet)
    fleet[1].other_processes_load = 1

    async def leave() -> None:
        asked = turns.begin("a", asyncio.Event())
        entered = len(turns.entered)
        await until(partial(turns.have_entered, entered + 1))
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await asyncio.sleep(3 * isolation.PAUSE_SECONDS)
        assert not turns.isolation.allows(fleet[0])

    await leave()
    # The engine's next report, long enough after that, shows that it survived the request.
    monkeypatch.setattr(own_requests, "SURVIVED_SECONDS", 0.0)
    fleet[0].requests.survived()
    await becomes(lambda: turns.isolation.allows(fleet[0]))
    monkeypatch.setattr(isolation, "KEPT_AFTER_LEAVING_SECONDS", 0.5)
    await leave()
    await becomes(lambda: turns.isolation.allows(fleet[0]))
    assert fleet[0].requests.has_detached("a")


async def test_a_long_turn_ends_for_the_others(any_redis: Any, monkeypatch: pytest.MonkeyPatch):
    """Otherwise a request that never ends would keep an engine for itself."""
    monkeypatch.setattr(kept_engine, "TURN_SECONDS", 0.4)
    monkeypatch.setattr(kept_engine, "RENEW_SECONDS", 0.1)
    monkeypatch.setattr(isolation, "SHARING_SECONDS", 0.0)
    fleet = engines("http://one:1", "http://two:1")
    turns, over = Turns(any_redis, fleet), asyncio.Event()
    fleet[1].other_processes_load = 1
    running = turns.begin("a", over)
    await until(partial(turns.have_entered, 1))
    await becomes(lambda: turns.isolation.allows(fleet[0]))
    fleet[1].other_processes_load = 0
    other_over = asyncio.Event()
    other = turns.begin("b", other_over)
    await until(partial(turns.have_entered, 2))
    over.set()
    await running
    assert not turns.isolation.allows(fleet[1]), "another turn goes on"
    other_over.set()
    await other


@pytest.mark.usefixtures("short_pauses")
async def test_an_engine_that_dies_during_the_wait_is_replaced(any_redis: Any):
    fleet = engines("http://one:1", "http://two:1", "http://three:1")
    turns = Turns(any_redis, fleet)
    fleet[1].other_processes_load, fleet[2].other_processes_load = 2, 9
    with busy(fleet[0], "b"):
        running = turns.begin("a", already_over())
        await becomes(lambda: not turns.isolation.allows(fleet[0]))
        fleet[0].mark_down("it died")
        fleet[1].other_processes_load = 0
        assert await running is fleet[1]


async def test_processes_keep_one_engine_and_send_nothing_else_there(any_redis: Any):
    deployment = uuid.uuid4().hex
    fleets = [engines("http://one:1", "http://two:1") for _ in range(2)]
    turns = [Turns(any_redis, fleet, deployment) for fleet in fleets]
    over = asyncio.Event()
    running = [turns[0].begin("a", over), turns[1].begin("b", over)]
    await becomes(lambda: len(turns[0].entered + turns[1].entered) == 1)
    first, second = turns if turns[0].entered else turns[::-1]
    await second.kept.read()
    for fleet in fleets:
        assert [first.isolation.allows(each) for each in fleet] == [second.isolation.allows(each) for each in fleet]
    assert [second.isolation.allows(each) for each in fleets[0]].count(False) == 1
    await asyncio.sleep(2 * isolation.SHARING_SECONDS)
    assert second.entered == [], "the processes keep one engine at a time"
    over.set()
    async with in_background(second.kept.watch()):
        await asyncio.gather(*running)
    assert len(second.entered) == 1


async def test_no_request_runs_alone_without_redis(monkeypatch: pytest.MonkeyPatch):
    """Other processes would not know of it, and a death could be blamed on the wrong tenant."""
    monkeypatch.setattr(isolation, "WAIT_SECONDS", 0.2)
    redis = connect("redis://127.0.0.1:1/0", 0.2)
    with pytest.raises(NotAlone):
        await Turns(redis, engines("http://one:1")).begin("a", already_over())
    await redis.aclose()
