"""Requests that a gateway process cuts off when it stops: an engine may die of them a moment later."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from gateway.fleet.discovery.addresses import parse_address
from gateway.fleet.discovery.registry import Registry
from gateway.fleet.engines import own_requests
from gateway.fleet.engines.engine import Address, EngineRecord, EngineState
from gateway.fleet.engines.suspects import OrphanedRequests, Suspect
from gateway.fleet.failures.quarantine import Quarantine
from gateway.fleet.failures.shared_deaths import MAX_NAMES, NO_ENGINE, Report, SharedDeaths
from gateway.redis.client import connect
from testing.gateway.running import running, settings, until
from testing.gateway.upstream import Upstream
from tests.gateway.fleet.failures.test_quarantine import engine, is_quarantined, leave, note_death, tenants_at_deaths
from tests.gateway.fleet.failures.test_shared_quarantine import Processes

URLS = ("http://one:1", "http://two:1")

pytestmark = pytest.mark.usefixtures("patient")


async def registry_of(*engines: EngineRecord) -> Registry:
    async def discover() -> list[Address]:
        return [each.address for each in engines]

    async def check(_: EngineRecord) -> None: ...

    registry = Registry(discover, cast(Any, SimpleNamespace(check=check)))
    await registry.poll()
    registry._engines = {each.url: each for each in engines}
    return registry


@pytest.mark.parametrize("dies_before", [False, True])
async def test_a_request_that_an_ending_process_cut_off_may_be_the_cause(dies_before: bool, any_redis: Any):
    """Another tenant's request was there alone, as far as the others knew, and was quarantined after two deaths."""
    processes = Processes(any_redis)
    records = {url: engine(url, a=1) for url in URLS}
    for url, record in records.items():
        record.observe_state(EngineState(instance=f"of {url}"), 0)
        record.observed_at = 0.0
    registry = await registry_of(*records.values())
    async with processes.one(on=records) as two:
        two.take_over = registry.take_over
        for url, record in records.items():
            async with processes.one() as one:
                await one.read()
                await two.read()
                own = engine(url)
                own.observe_state(EngineState(instance=f"of {url}"), 0)
                one.engines = lambda own=own: (own,)
                leave(one, own, "b")
                if dies_before:
                    # The ending process cannot answer any more.
                    one._report_detached = lambda *_: (set(), [])
                    processes.clock.now += 10.0
                    note_death(two, record, "a")
            if not dies_before:
                await until(partial(has_detached, record))
                processes.clock.now += 10.0
                note_death(two, record, "a")
            await two.wait_until_reported()

            async def is_known() -> bool:
                return all("b" in death.tenants for death in two._deaths.recent()) and bool(tenants_at_deaths(two, "b"))

            await until(is_known)
        assert tenants_at_deaths(two, "a") == [{"a", "b"}, {"a", "b"}]
        assert tenants_at_deaths(two, "b") == [{"a", "b"}, {"a", "b"}], "it counts at each engine's death once"
        assert not is_quarantined(two)
        for record in records.values():
            processes.clock.now += 10.0
            record.on_end = two.note_instance_death
            record.observe_state(EngineState(instance="next"), 0)
        assert len(tenants_at_deaths(two, "b")) == 2


async def has_detached(record: EngineRecord) -> bool:
    return record.requests.has_detached("b")


@pytest.mark.parametrize(
    ("url", "instance", "age", "expected"),
    [
        (URLS[0], "i", 0.0, {"b"}),
        (URLS[1], "i", 0.0, set()),
        (URLS[0], "another", 0.0, set()),
        # The engine has reported its state since, so it survived the request.
        (URLS[0], "i", 60.0, set()),
    ],
)
async def test_only_requests_that_the_engine_may_still_have_are_taken_over(
    url: str, instance: str, age: float, expected: set[str]
):
    record = EngineRecord(parse_address(URLS[0]))
    record.observe_state(EngineState(instance="i"), 0)
    registry = await registry_of(record)
    registry.take_over(OrphanedRequests(url, instance, ["b"], [Suspect("request", "b", "m")]), age, is_reported=False)
    tenants, found = record.requests.report_detached()
    assert tenants == expected
    assert [each.result() for each in found] == [[Suspect("request", "b", "m")]] * len(expected)


async def test_a_request_that_was_taken_over_is_forgotten_once_the_engine_has_survived_it(
    monkeypatch: pytest.MonkeyPatch,
):
    record = engine()
    record.requests.take_over(OrphanedRequests(URLS[0], None, ["b"], []), 0.0, is_reported=False)
    record.observe_state(EngineState(), 0)
    assert record.requests.tenants == {"b"}
    monkeypatch.setattr(own_requests, "SURVIVED_SECONDS", 0.0)
    record.observe_state(EngineState(), 0)
    assert record.requests.tenants == set()


async def test_a_connection_that_broke_long_before_is_no_death_of_what_a_process_left(any_redis: Any):
    """The requests came after the break, so they were not its cause, and the death that follows must have them."""
    processes, record = Processes(any_redis), engine(URLS[0], a=1)
    record.observe_state(EngineState(instance="i"), 0)
    record.observed_at = 0.0
    async with processes.one(on={URLS[0]: record}) as two:
        two.take_over = (await registry_of(record)).take_over
        note_death(two, record, "a")
        processes.clock.now += 50.0
        async with processes.one() as one:
            await one.read()
            own = engine(URLS[0])
            own.observe_state(EngineState(instance="i"), 0)
            one.engines = lambda: (own,)
            leave(one, own, "b")
        await until(partial(has_detached, record))
        assert [death.tenants for death in two._deaths.recent()] == [{"a"}]
        processes.clock.now += 10.0
        record.on_end = two.note_instance_death
        record.observe_state(EngineState(instance="next"), 0)
        assert len(tenants_at_deaths(two, "b")) == 1


async def test_a_farewell_with_many_requests_is_sent_in_bounded_entries(any_redis: Any):
    """A flood of one tenant made a message of megabytes, which had to reach Redis in a second for all tenants."""
    leaving, other = (SharedDeaths(any_redis, "of the test") for _ in range(2))
    names = [Suspect("request", "b" * 32, f"{number:064}") for number in range(2 * MAX_NAMES + 500)]
    left = [OrphanedRequests(URLS[0], "i", ["a", "b" * 32], names), OrphanedRequests(URLS[1], "i", ["c"], [])]
    await leaving.leave(100.0, left)
    reports = [entry.report for entry in await other.read()]
    assert [report.continues for report in reports] == [True, True, False]
    found = [each for report in reports for each in report.left]
    assert [suspect for each in found for suspect in each.suspects] == names
    assert [each.tenants for each in found] == [["a", "b" * 32], ["b" * 32], ["b" * 32], ["c"]]
    assert all(len(msgspec.json.encode(report)) < 150_000 for report in reports)
    assert other.processes == {other.process}


async def test_a_farewell_with_many_tenants_is_sent_in_bounded_entries(any_redis: Any):
    """All tenants of an engine were in a single entry, whatever their number."""
    leaving, other = (SharedDeaths(any_redis, "of the test") for _ in range(2))
    tenants = [f"{number:032}" for number in range(2 * MAX_NAMES)]
    names = [Suspect("request", tenant, "m") for tenant in tenants[::4]]
    await leaving.leave(100.0, [OrphanedRequests(URLS[0], "i", tenants, names)])
    reports = [entry.report for entry in await other.read()]
    found = [each for report in reports for each in report.left]
    assert [tenant for each in found for tenant in each.tenants] == tenants
    assert [suspect for each in found for suspect in each.suspects] == names
    assert all(len(each.tenants) + len(each.suspects) <= MAX_NAMES for each in found)
    assert all({suspect.tenant_id for suspect in each.suspects} <= {*each.tenants} for each in found)


async def test_a_farewell_has_a_total_time_limit(
    any_redis: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Each of its entries had a time limit of its own, so a slow Redis could use up the time to stop."""
    leaving, other = (SharedDeaths(any_redis, "of the test") for _ in range(2))
    monkeypatch.setattr("gateway.fleet.failures.shared_deaths.LEAVE_SECONDS", 0.5)
    add, sent = leaving.add, list[Report]()

    async def slowly(report: Report, seconds: float) -> tuple[int, ...] | None:
        await asyncio.sleep(0.1)
        sent.append(report)
        return await add(report, seconds)

    monkeypatch.setattr(leaving, "add", slowly)
    names = [Suspect("request", "b", f"{number}") for number in range(30 * MAX_NAMES)]
    await leaving.leave(100.0, [OrphanedRequests(URLS[0], "i", ["b"], names)])
    assert 0 < len(sent) < 10
    assert all(report.continues for report in sent)
    assert "the others know a part of it" in caplog.text
    await other.read()
    assert leaving.process in other.processes, "they wait for its reports"


async def test_every_request_of_a_long_farewell_is_taken_over(any_redis: Any):
    processes, record, tenants = Processes(any_redis), engine(URLS[0]), ("b", "c", "d")
    record.observe_state(EngineState(instance="i"), 0)
    record.observed_at = 0.0
    async with processes.one(on={URLS[0]: record}) as two:
        two.take_over = (await registry_of(record)).take_over
        async with processes.one() as one:
            await one.read()
            own = engine(URLS[0])
            own.observe_state(EngineState(instance="i"), 0)
            one.engines = lambda: (own,)
            for tenant in tenants:
                names = [Suspect("request", tenant, f"{number}") for number in range(MAX_NAMES)]
                own.requests.take_over(OrphanedRequests(URLS[0], "i", [tenant], names), 0.0, is_reported=False)
        for tenant in tenants:
            await until(lambda tenant=tenant: asyncio.sleep(0, record.requests.has_detached(tenant)))
        found = {suspect for names in record.requests.report_detached()[1] for suspect in names.result()}
        assert len(found) == len(tenants) * MAX_NAMES


async def test_a_process_has_ended_when_its_whole_farewell_is_read(any_redis: Any):
    """Requests in a later part may be the cause, so no tenant may be blamed before."""
    processes = Processes(any_redis)
    async with processes.one() as one, processes.one(stands_still=True) as still:
        for url in URLS:
            processes.clock.now += 10.0
            await processes.die(one, url, instance="i")
        assert still._shared is not None
        part = [OrphanedRequests("http://three:1", "i", ["b"], [])]
        await still._shared.add(Report(NO_ENGINE, [], [], left=part, continues=True), 100.0)
        await one.read()
        assert not is_quarantined(one)
        await still._shared.leave(100.0)

        async def is_known() -> bool:
            return is_quarantined(one)

        await until(is_known)


async def test_a_farewell_that_takes_long_is_sent(tmp_path: Path, model_dir: Path, redis_url: str):
    """The end of the gateway's tasks cancelled it after a second."""
    async with AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(Upstream().serving())
        of = settings(tmp_path, model_dir, [upstream.url], redis_url, redis_timeout=30.0, shutdown_seconds=0.2)
        await stack.enter_async_context(running(of))
        with pytest.MonkeyPatch.context() as patch:
            orphaned = Quarantine._orphaned

            async def slowly(quarantine: Quarantine) -> list[OrphanedRequests]:
                await asyncio.sleep(1.5)
                return await orphaned(quarantine)

            patch.setattr(Quarantine, "_orphaned", slowly)
            async with running(of):
                pass
        redis = await stack.enter_async_context(closing_redis(redis_url))
        shared = SharedDeaths(redis, of.database_url)
        assert [entry.report.engine for entry in await shared.read()] == [NO_ENGINE]
        assert len(shared.processes) == 2, "the other gateway and this test"


@asynccontextmanager
async def closing_redis(url: str) -> AsyncIterator[Any]:
    redis = connect(url, timeout=30.0)
    yield redis
    await redis.aclose()


async def test_a_gateway_that_stops_reports_what_it_cut_off(tmp_path: Path, model_dir: Path, redis_url: str):
    async with AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(Upstream().serving())
        of = settings(tmp_path, model_dir, [upstream.url], redis_url, redis_timeout=30.0, shutdown_seconds=0.2)
        gateway = await stack.enter_async_context(running(of))
        acme = await gateway.tenant("acme")
        async with running(of) as other:
            how = {"max_tokens": 8, "x_engine": {"tokens": 8, "delay": 10.0}}
            asked = asyncio.create_task(other.client(acme.key or "").complete(prompt="a secret of acme", **how))
            await until(lambda: asyncio.sleep(0, len(upstream.requests) == 1))
        await asyncio.gather(asked, return_exceptions=True)
        redis = await stack.enter_async_context(closing_redis(redis_url))
        entries = await SharedDeaths(redis, of.database_url).read()
        [left] = entries[-1].report.left
        assert (left.engine, left.instance) == (upstream.url, "one")
        assert [(each.kind, each.tenant_id) for each in left.suspects] == [("request", left.tenants[0])]
