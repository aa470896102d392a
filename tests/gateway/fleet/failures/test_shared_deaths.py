"""Reports of deaths between gateway processes: which are expected, and what is known before they have come."""

import asyncio
import uuid
from functools import partial
from typing import Any

import pytest
from redis.exceptions import ResponseError

from gateway.fleet.engines.own_requests import NamedBody
from gateway.fleet.failures.deaths import ONE_DEATH_SECONDS
from gateway.fleet.failures.shared_deaths import Report, SharedDeaths
from testing.gateway.running import until
from tests.gateway.fleet.failures.test_quarantine import BODY, engine, is_quarantined, note_death
from tests.gateway.fleet.failures.test_shared_quarantine import Processes

pytestmark = pytest.mark.usefixtures("patient")


@pytest.mark.usefixtures("starts_servers")
async def test_a_redis_that_refuses_blocking_calls_is_read_without_them(
    any_redis: Any, monkeypatch: pytest.MonkeyPatch
):
    async def refuse(*args: Any, **kwargs: Any) -> None:
        raise ResponseError("blocking commands are disabled")

    monkeypatch.setattr(any_redis, "xread", refuse)
    shared = SharedDeaths(any_redis, uuid.uuid4().hex)
    assert await shared.wait()
    assert not shared.is_away


async def test_a_report_that_cannot_be_read_is_skipped(any_redis: Any, caplog: pytest.LogCaptureFixture):
    processes = Processes(any_redis)
    async with processes.one() as one:
        shared = one._shared
        assert shared is not None
        await any_redis.xadd(shared._key, {"another": b"no report"})
        await any_redis.xadd(shared._key, {"of": b"a release", "that": b"does otherwise"})
        for url in ("http://one:1", "http://two:1"):
            processes.clock.now += ONE_DEATH_SECONDS
            await processes.die(one, url)

        async def warned() -> bool:
            return "cannot be decoded" in caplog.text

        await until(warned)
        async with processes.one() as two:

            async def knows() -> bool:
                return is_quarantined(two)

            await until(knows)


@pytest.mark.parametrize(
    "fields",
    [
        {b"process": b"\xff"},
        {b"\xff": b'{"engine":"e","tenants":[],"suspects":[]}'},
        {b"process": b'{"engine":"\xff","tenants":[],"suspects":[]}'},
        {b"process": b'{"engine":"e","tenants":[],"suspects":[],"processes":["p"]}', b"processes": b"\xff"},
        {b"process": b'{"engine":"e","tenants":[],"suspects":[],"x":' + 9999 * b"[" + 9999 * b"]" + b"}"},
        {b"process": b'{"engine":"e","tenants":[],"suspects":[["request","b"]]}'},
    ],
)
async def test_an_entry_with_an_odd_shape_hides_no_other(
    fields: dict[bytes, bytes], any_redis: Any, caplog: pytest.LogCaptureFixture
):
    """Its error lost all entries that were read with it."""
    deployment = uuid.uuid4().hex
    writing, reading = (SharedDeaths(any_redis, deployment) for _ in range(2))
    await writing.add(Report("http://one:1", [], []), 100.0)
    await any_redis.xadd(writing._key, fields)
    await writing.add(Report("http://two:1", [], []), 100.0)
    assert [entry.report.engine for entry in await reading.read()] == ["http://one:1", "http://two:1"]
    assert caplog.text.count("cannot be decoded") == 1


async def test_an_entry_with_a_field_without_value_hides_no_other(any_redis: Any, monkeypatch: pytest.MonkeyPatch):
    shared = SharedDeaths(any_redis, uuid.uuid4().hex)
    good = b'{"engine":"e","tenants":[],"suspects":[]}'

    async def answer(*_: Any, **__: Any) -> Any:
        return [[b"p"], 0, [[b"1-0", [b"p"]], [b"2-0", [b"p", good, b"more"]], [b"3-0", [b"p", good]]]]

    monkeypatch.setattr(shared, "_read", answer)
    assert [entry.id for entry in await shared.read()] == [(3, 0)]


async def test_tenants_are_unknown_until_each_process_has_answered(any_redis: Any):
    processes = Processes(any_redis)
    async with processes.one() as one, processes.one(stands_still=True) as still:
        for url in ("http://one:1", "http://two:1"):
            processes.clock.now += ONE_DEATH_SECONDS
            await processes.die(one, url)
        assert not is_quarantined(one)
        assert await one.suspicion("a", (), NamedBody(BODY)) == ({"?"}, 2)
        assert processes.counted == []
        await still.read()

        async def is_known() -> bool:
            return is_quarantined(one)

        await until(is_known)
        assert is_quarantined(still)
        assert await one.suspicion("a", (), NamedBody(BODY)) is None
        await until(partial(processes.have_counted, "request"))


async def test_a_process_that_has_just_started_is_waited_for(any_redis: Any):
    processes = Processes(any_redis)
    async with processes.one() as one:
        await one.read()
        await SharedDeaths(any_redis, processes._deployment).read()
        for url in ("http://one:1", "http://two:1"):
            processes.clock.now += ONE_DEATH_SECONDS
            await processes.die(one, url)
        assert not is_quarantined(one)
        assert [death.tenants for death in one._deaths.recent()] == [{"a", "?"}, {"a", "?"}]


async def test_all_processes_wait_for_one_that_the_reporting_process_did_not_know(any_redis: Any):
    """The others did not wait, and blamed the only tenant that they knew; the reporting process waited without end."""
    processes = Processes(any_redis)
    async with processes.one() as one, processes.one() as two:
        await one.read()
        await two.read()
        async with processes.one(stands_still=True, is_known=False) as late:
            for url in ("http://one:1", "http://two:1"):
                processes.clock.now += ONE_DEATH_SECONDS
                await processes.die(one, url, instance=f"of {url}")
            await two.wait_until_reported()
            assert [is_quarantined(each) for each in (one, two)] == [False, False]

            async def all_know() -> bool:
                await late.read()
                return all(is_quarantined(each) for each in (one, two, late))

            await until(all_know)


async def test_a_process_answers_no_deaths_before_its_start(any_redis: Any):
    """Their answers would push the reports themselves out of the stream."""
    processes = Processes(any_redis)
    async with processes.one() as one:
        await processes.die(one, "http://one:1", instance="first")
        assert one._shared is not None
        reports = await any_redis.xlen(one._shared._key)
        async with processes.one() as late:

            async def knows() -> bool:
                return bool(late._deaths.recent())

            await until(knows)
            await late.wait_until_reported()
            assert late._unsent == {}
            assert await any_redis.xlen(one._shared._key) == reports
            assert late._deaths.recent()[0].is_complete


async def test_a_tenants_quarantine_is_counted_after_the_last_answer(any_redis: Any):
    """The quarantine of its last request is counted then too: another process may have reported that death later."""
    processes = Processes(any_redis)
    async with processes.one() as one, processes.one(stands_still=True) as still:
        for number in range(4):
            processes.clock.now += 10.0
            await processes.die(one, f"http://e{number}:1", prompt=f"{number // 2}")
            if number != 3:
                await still.read()
                await still.wait_until_reported()
                await one.read()
        assert processes.counted == ["request"]
        await still.read()
        await until(partial(processes.have_counted, "request", "request", "tenant"))


async def test_reports_that_wait_for_redis_stay_deaths_of_their_own(any_redis: Any, monkeypatch: pytest.MonkeyPatch):
    processes = Processes(any_redis)
    async with processes.one() as one, processes.one() as two:
        assert one._shared is not None
        add = one._shared.add

        async def fail(report: Report, seconds: float) -> tuple[int, ...] | None:
            return None

        monkeypatch.setattr(one._shared, "add", fail)
        for _ in range(2):
            processes.clock.now += 30.0
            await processes.die(one, "http://one:1")
        monkeypatch.setattr(one._shared, "add", add)

        async def are_known() -> bool:
            return len(two._deaths.recent()) == 2

        await until(are_known)


async def test_the_death_of_a_kept_engine_waits_for_no_process(any_redis: Any):
    processes = Processes(any_redis)
    async with processes.one() as one, processes.one(stands_still=True):
        for url in ("http://one:1", "http://two:1"):
            processes.clock.now += ONE_DEATH_SECONDS
            await processes.die(one, url)
        assert not is_quarantined(one)
        one.is_alone = lambda engine: engine.url == "http://kept:1"
        processes.clock.now += ONE_DEATH_SECONDS
        await processes.die(one, "http://kept:1")
        assert not is_quarantined(one), "the engine's own report has another process's request"
        processes.clock.now += ONE_DEATH_SECONDS
        note_death(one, engine("http://kept:1", a=1), "a")
        assert is_quarantined(one)


async def test_a_process_that_has_ended_is_not_waited_for(any_redis: Any):
    processes = Processes(any_redis)
    async with processes.one() as one:
        async with processes.one():
            await one.read()
        await one.read()
        for url in ("http://one:1", "http://two:1"):
            processes.clock.now += ONE_DEATH_SECONDS
            await processes.die(one, url)
        assert is_quarantined(one)


async def test_a_process_that_ends_after_a_death_is_not_waited_for(any_redis: Any):
    processes = Processes(any_redis)
    async with processes.one() as one:
        async with processes.one(stands_still=True) as still:
            for url in ("http://one:1", "http://two:1"):
                processes.clock.now += ONE_DEATH_SECONDS
                await processes.die(one, url)
            assert not is_quarantined(one)
            assert still._shared is not None
            await still._shared.leave(100.0)

        async def is_known() -> bool:
            return is_quarantined(one)

        await until(is_known)


async def test_a_report_that_redis_did_not_take_is_sent_again(any_redis: Any, monkeypatch: pytest.MonkeyPatch):
    processes = Processes(any_redis)
    async with processes.one() as one, processes.one() as two:
        assert one._shared is not None
        add, failed = one._shared.add, list[Report]()

        async def fail_once(report: Report, seconds: float) -> tuple[int, ...] | None:
            if not failed:
                failed.append(report)
                return None
            return await add(report, seconds)

        monkeypatch.setattr(one._shared, "add", fail_once)
        await processes.die(one, "http://one:1", "a")

        async def is_known() -> bool:
            return [death.tenants for death in two._deaths.recent()] == [{"a"}]

        await until(is_known)
        assert len(failed) == 1


async def test_a_process_that_stood_still_reports_the_same_death_though_it_is_late(any_redis: Any):
    """The request of its tenant is the cause. It counted as another death's, and the other tenant was blamed."""
    processes = Processes(any_redis)
    async with processes.one() as one, processes.one(stands_still=True) as still:
        for url in ("http://one:1", "http://two:1"):
            processes.clock.now += 10.0
            await processes.die(one, url, "b", instance="first")
            processes.clock.now += 30.0
            await processes.die(still, url, "a", instance="first", prompt="the cause")
            await still.read()

        async def both_know() -> bool:
            both = await asyncio.gather(*(each.suspicion("b", (), NamedBody(BODY)) for each in (one, still)))
            return both == [({"a"}, 2)] * 2

        await until(both_know)
        assert not is_quarantined(one, "b")
