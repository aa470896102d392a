"""Connections that break after the engine's next instance has reported: they belong to the death of the former one."""

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from gateway.fleet.deaths import ONE_DEATH_SECONDS, UNKNOWN_TENANTS
from gateway.fleet.engine import EngineRecord, EngineState
from gateway.fleet.health import Health
from gateway.fleet.own_requests import NamedBody
from gateway.fleet.quarantine import Quarantine
from testing.gateway.running import running, settings, until
from testing.gateway.upstream import Upstream
from tests.gateway.fleet.test_quarantine import (
    BODY,
    SECRET,
    Clock,
    engine,
    is_quarantined,
    note_death,
    tenants_at_deaths,
)
from tests.gateway.fleet.test_shared_quarantine import Processes


class Lives:
    """An engine that dies and starts again. a, b: tenants with a request on its first instance until `ends`."""

    def __init__(self, quarantine: Quarantine, clock: Clock, url: str = "http://one:1") -> None:
        self.quarantine, self.clock = quarantine, clock
        self.record = engine(url)
        self.record.on_end = quarantine.ended
        self.record.observe_state(EngineState(instance="first"), 0)
        self.ends = {tenant: ExitStack() for tenant in "ab"}
        for tenant, stack in self.ends.items():
            request = stack.enter_context(self.record.requests.count(None, tenant))
            request.end()

    def breaks(self, tenant: str, instance: str | None = "first") -> None:
        self.ends[tenant].close()
        self.clock.now += ONE_DEATH_SECONDS
        note_death(self.quarantine, self.record, tenant, instance=instance)

    def restarts(self) -> None:
        self.clock.now += ONE_DEATH_SECONDS
        self.record.observe_state(EngineState(instance="second"), 0)


@pytest.fixture
def quarantine(clock: Clock) -> Quarantine:
    return Quarantine(100.0, SECRET, clock=clock)


def test_a_tenant_whose_connection_breaks_last_is_not_blamed(quarantine: Quarantine, clock: Clock):
    """Its break was a death of the next instance, which no other tenant had a request on."""
    for url in ("http://one:1", "http://two:1"):
        lives = Lives(quarantine, clock, url)
        lives.breaks("b")
        lives.restarts()
        lives.breaks("a")
    assert tenants_at_deaths(quarantine) == [{"a", "b"}, {"a", "b"}]
    assert not is_quarantined(quarantine)
    assert {death.instance for death in quarantine._deaths.recent()} == {"first"}


def test_a_tenant_whose_connection_breaks_last_is_not_blamed_before_the_restart(quarantine: Quarantine, clock: Clock):
    """A client that reads slowly notices the break late. Only the tenants that were left then counted."""
    for url in ("http://one:1", "http://two:1"):
        lives = Lives(quarantine, clock, url)
        lives.breaks("b")
        lives.breaks("a")
    assert tenants_at_deaths(quarantine) == [{"a", "b"}, {"a", "b"}]
    assert not is_quarantined(quarantine)


def test_a_late_break_is_no_further_death(quarantine: Quarantine, clock: Clock):
    lives = Lives(quarantine, clock)
    lives.restarts()
    at = clock()
    clock.now += 10.0
    lives.breaks("a")
    [death] = quarantine._deaths.recent()
    assert (death.at, death.tenants) == (at, {"a", "b"})


def test_a_request_that_kills_engines_alone_is_quarantined_though_its_connections_break_late(
    quarantine: Quarantine, clock: Clock
):
    for url in ("http://one:1", "http://two:1"):
        lives = Lives(quarantine, clock, url)
        lives.ends["b"].close()
        lives.restarts()
        with lives.record.requests.count(None, "b") as of_the_next_instance:
            lives.breaks("a")
            of_the_next_instance.end()
    assert is_quarantined(quarantine)
    assert quarantine.deaths(quarantine.suspects("b", (), NamedBody(BODY)).result()[0]) == []


def test_requests_that_were_left_on_the_next_instance_are_no_suspects(quarantine: Quarantine, clock: Clock):
    lives = Lives(quarantine, clock)
    lives.restarts()
    with lives.record.requests.count(None, "c", suspects=lambda: quarantine.suspects("c", (), NamedBody(BODY))):
        pass
    lives.breaks("a")
    assert tenants_at_deaths(quarantine, "c") == []
    lives.record.observe_state(EngineState(instance="third"), 0)
    assert tenants_at_deaths(quarantine, "c") == [{"b", "c"}]


def test_the_tenants_of_an_instance_that_drained_are_unknown_afterwards(quarantine: Quarantine, clock: Clock):
    """Its end is no death, so none of its tenants are reported."""
    lives = Lives(quarantine, clock)
    lives.record.mark_down("it finishes its requests and stops", Health.DRAINING)
    lives.restarts()
    lives.breaks("a")
    assert tenants_at_deaths(quarantine) == [{"a", UNKNOWN_TENANTS}]


def test_an_unknown_instance_is_the_present_one(quarantine: Quarantine, clock: Clock):
    lives = Lives(quarantine, clock)
    lives.restarts()
    lives.breaks("a", None)
    assert [death.instance for death in quarantine._deaths.recent()] == ["first", "second"]


async def test_a_late_break_is_of_the_same_death_at_another_process(any_redis: Any, patient: None):
    processes, records = Processes(any_redis), dict[str, EngineRecord]()
    async with processes.one() as one, processes.one(on=records) as two:
        lives = Lives(one, processes.clock)
        lives.restarts()
        await one.reported()
        await two.read()
        lives.breaks("a")
        await one.reported()

        async def both_know() -> bool:
            return all(tenants_at_deaths(each) == [{"a", "b"}] for each in (one, two))

        await until(both_know)
        assert [len(each._deaths.recent()) for each in (one, two)] == [1, 1]


async def test_the_instance_goes_with_the_request(
    tmp_path: Path, model_dir: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
):
    """Answers that have begun, and requests without an answer."""
    died = list[tuple[str | None, str | None]]()

    def note(_: Quarantine, record: EngineRecord, *request: Any) -> None:
        died.append((record.state.instance, request[-1]))

    monkeypatch.setattr(Quarantine, "died", note)
    async with Upstream().serving() as upstream:
        upstream.paused = True
        async with running(settings(tmp_path, model_dir, [upstream.url], redis_url)) as gateway:
            acme = await gateway.tenant("acme")
            how = {"max_tokens": 4, "x_engine": {"tokens": 4, "pause": True, "drop_after": 1}}
            asked = [asyncio.create_task(acme.complete(stream=stream, **how)) for stream in (True, False)]
            await until(lambda: asyncio.sleep(0, len(upstream.requests) == 2))
            upstream.instance = "two"

            async def is_known() -> bool:
                [shown] = (await gateway.admin.get("/admin/api/engines")).json["data"]
                return bool(shown["state"]["instance"] == "two")

            await until(is_known)
            upstream.paused = False
            assert sorted([answer.status for answer in await asyncio.gather(*asked)]) == [200, 503]
    assert died == [("two", "one"), ("two", "one")]
