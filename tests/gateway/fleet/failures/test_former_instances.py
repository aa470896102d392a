"""Connections that break after the engine's next instance has reported: they belong to the death of the former one."""

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from gateway.fleet.engines.engine import EngineRecord, EngineState
from gateway.fleet.engines.health import Health
from gateway.fleet.engines.own_requests import NamedBody
from gateway.fleet.failures.deaths import ONE_DEATH_SECONDS, UNKNOWN_TENANTS
from gateway.fleet.failures.quarantine import Quarantine
from testing.gateway.running import Gateway, running, settings, until
from testing.gateway.upstream import Upstream
from tests.gateway.fleet.failures.test_quarantine import (
    BODY,
    SECRET,
    Clock,
    engine,
    is_quarantined,
    note_death,
    tenants_at_deaths,
)
from tests.gateway.fleet.failures.test_shared_quarantine import Processes
from wire.error_codes import ENGINE_UNAVAILABLE as UNAVAILABLE


class Lives:
    """An engine that dies and starts again. a, b: tenants with a request on its first instance until `ends`."""

    def __init__(self, quarantine: Quarantine, clock: Clock, url: str = "http://one:1") -> None:
        self.quarantine, self.clock = quarantine, clock
        self.record = engine(url)
        self.record.on_end = quarantine.note_instance_death
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
        await one.wait_until_reported()
        await two.read()
        lives.breaks("a")
        await one.wait_until_reported()

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
            await reports_instance(gateway, upstream, "two")
            upstream.paused = False
            assert sorted([answer.status for answer in await asyncio.gather(*asked)]) == [200, 503]
    assert died == [("two", "one"), ("two", "one")]


async def reports_instance(gateway: Gateway, upstream: Upstream, instance: str) -> None:
    """Let an engine report another instance, and wait until the gateway knows it."""
    upstream.instance = instance

    async def is_known() -> bool:
        [shown] = (await gateway.admin.get("/admin/api/engines")).json["data"]
        return bool(shown["state"]["instance"] == instance)

    await until(is_known)


@pytest.mark.parametrize("is_former", [True, False])
@pytest.mark.parametrize(("how", "code"), [("breaks", "engine_died"), ("refuses", "no_engine")])
async def test_an_engine_stays_up_when_its_former_instance_goes(
    how: str, code: str, is_former: bool, gateway: Gateway, upstream: Upstream, caplog: pytest.LogCaptureFixture
):
    """Each request that a tenant still had there kept the next instance from all tenants until its next report."""
    asked = {"tokens": 4, "pause": True, "drop_after": 1} if how == "breaks" else {"status": 503, "code": UNAVAILABLE}
    acme = await gateway.tenant("acme")
    upstream.paused = upstream.holds = True
    held = asyncio.create_task(acme.complete(max_tokens=4, x_engine=asked))
    await until(lambda: asyncio.sleep(0, len(upstream.requests) == 1))
    if is_former:
        await reports_instance(gateway, upstream, "two")
    upstream.paused = upstream.holds = False
    got = await held
    assert (got.status, got.error["code"]) == (503, code)
    assert (f"engine {upstream.url} is down" in caplog.text) == (not is_former)
    if is_former:
        assert (await acme.complete()).status == 200


@pytest.mark.parametrize("is_former", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_an_instance_is_not_taken_out_for_the_wrong_answer_of_a_former_one(
    stream: bool, is_former: bool, gateway: Gateway, upstream: Upstream
):
    acme = await gateway.tenant("acme")
    how = {"tokens": 4, "pause": True, "mixed_after": 3}
    held = asyncio.create_task(acme.complete(max_tokens=4, stream=stream, x_engine=how))
    await until(lambda: asyncio.sleep(0, len(upstream.requests) == 1))
    if is_former:
        await reports_instance(gateway, upstream, "two")
    upstream.receipt = "sha256:" + "0" * 64
    upstream.paused = False
    got = await held
    error = got.events[-1]["error"] if stream else got.error
    assert error["code"] == "adapter_mismatch"
    page = (await gateway.admin.get("/metrics")).body.decode()
    assert f'loraplex_gateway_adapter_mismatches_total{{engine="{upstream.url}"}} 1.0' in page
    upstream.receipt = True
    answer = await acme.complete()
    assert answer.status == (200 if is_former else 503), answer.body


def test_the_wrong_answer_of_a_former_instance_hides_none_of_the_present_one():
    record, seen = engine("http://one:1"), list[str | None]()
    record.on_mismatch = lambda _, instance: seen.append(instance)
    for instance in ("first", "second"):
        record.observe_state(EngineState(instance=instance), 0)
        record.mark_up()
    record.mark_mismatched("second")
    record.mark_mismatched("first")
    record.mark_up()
    assert (record.condition.health, seen) == (Health.MISCONFIGURED, ["second", "first"])
    record.observe_state(EngineState(instance="third"), 0)
    record.mark_up()
    assert record.is_up
