"""Verdicts on broken answers whose client read too slowly: one check of the engine for all, one verdict a request."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import ClientSession, ServerDisconnectedError, web

from engine.answering import report
from gateway.fleet.attempt_runner import AttemptRunner
from gateway.fleet.calls.call import Call
from gateway.fleet.discovery.addresses import parse_address
from gateway.fleet.discovery.health_checks import HealthChecks
from gateway.fleet.engines.breaker import FAILURES_UNTIL_OPEN
from gateway.fleet.engines.engine import EngineRecord, EngineState
from gateway.fleet.engines.health import Health
from gateway.fleet.engines.own_requests import NamedBody
from testing.gateway.bases import only
from testing.gateway.kinds import kinds_of
from testing.gateway.running import BASE_MODEL, settings, until
from testing.gateway.upstream import Upstream


class Counting(Upstream):
    """An upstream that counts its health checks. status: the answer of an engine that is not healthy."""

    num_checks, status = 0, ""

    async def _health(self, request: web.Request) -> web.Response:
        self.num_checks += 1
        answer = await super()._health(request)
        return answer if answer.status == 200 else web.json_response({"status": self.status}, status=503)


async def test_broken_answers_share_a_check_that_changes_nothing(starts_servers: None):
    async with Counting().serving() as upstream, ClientSession() as session:
        upstream = cast(Counting, upstream)
        checks, engine = HealthChecks(session, kinds_of(session), only(BASE_MODEL)), record(upstream.url)
        await checks.check(engine)
        assert engine.is_up
        upstream.mute, upstream.num_checks = True, 0
        first = [asyncio.create_task(checks.running_instance(engine)) for _ in range(100)]
        await until(lambda: asyncio.sleep(0, upstream.num_checks == 1))
        # The check has begun, so it may have passed before these answers broke: the next one is for them.
        later = [asyncio.create_task(checks.running_instance(engine)) for _ in range(100)]
        first[0].cancel()
        assert await asyncio.gather(*first[1:]) == [None] * 99
        upstream.mute = False
        assert await asyncio.gather(*later) == ["one"] * 100
        assert upstream.num_checks == 2
        assert (engine.condition.health, engine.condition.misses) == (Health.UP, 0)


async def test_only_an_instance_that_is_reported_now_counts(starts_servers: None):
    async with Counting().serving() as upstream, ClientSession() as session:
        upstream = cast(Counting, upstream)
        checks, engine = HealthChecks(session, kinds_of(session), only(BASE_MODEL)), record(upstream.url)
        await checks.check(engine)
        assert await checks.running_instance(engine) == "one"
        upstream.instance = "two"
        assert await checks.running_instance(engine) == "two"
        upstream.reported = {"running": "unreadable"}
        assert await checks.running_instance(engine) is None
        upstream.reported, upstream.token = {}, "another"
        assert await checks.running_instance(engine) is None
        upstream.token = Upstream().token
        upstream.healthy, upstream.status = False, "failed"
        assert await checks.running_instance(engine) is None
        upstream.status = "draining"
        assert await checks.running_instance(engine) == "two"
        assert (engine.condition.health, engine.state.instance) == (Health.UP, "one")
    async with ClientSession() as session:
        assert await HealthChecks(session, kinds_of(session), only(BASE_MODEL)).running_instance(engine) is None


def record(url: str = "http://one:1") -> EngineRecord:
    engine = EngineRecord(parse_address(url))
    engine.state = EngineState(instance="one")
    return engine


class Broken:
    """Attempts whose answers all break. found: the instances that checks find, in turn; then checks hang."""

    def __init__(self, *found: str) -> None:
        self.engine = record()
        self.died: list[str] = []
        self.hangs = asyncio.Event()
        self._found = list(found)
        model, tenant = cast(Any, SimpleNamespace(digest=None, suspects=())), cast(Any, SimpleNamespace(id="a"))
        fields: dict[str, Any] = {"path": "/", "body": {}, "named": NamedBody({}), "prompt_tokens": 1, "arrived": 0.0}
        self._call = Call(request_id="r", model=model, tenant=tenant, **fields)
        quarantine = SimpleNamespace(died=self._die, suspects=lambda *_: [])
        self.runner = AttemptRunner(*cast(Any, (self, self, quarantine)))

    def _die(self, _: EngineRecord, tenant_id: str, *__: object) -> None:
        self.died.append(tenant_id)

    async def still_runs(self, _: EngineRecord, instance: str) -> bool:
        if not self._found:
            self.hangs.set()
            await asyncio.Event().wait()
        return self._found.pop(0) == instance

    def open(self, *_: object) -> "Broken":
        return self

    async def __aenter__(self) -> Any:
        return SimpleNamespace(content=SimpleNamespace(exception=ServerDisconnectedError))

    async def __aexit__(self, *_: object) -> None: ...

    async def attempt(self, *verdicts: bool, is_slow: bool = True) -> None:
        """Attempt a request that is asked for its verdict as often as `verdicts`, before it ends."""
        async with self.runner.open(self.engine, self._call) as (_, in_flight):
            for expected in verdicts:
                if is_slow:
                    in_flight.free()
                assert await self.runner.check_cut_off(self.engine, in_flight) is expected
            in_flight.free()

    @property
    def is_open(self) -> bool:
        return not self.engine.breaker.allows("a")


async def test_the_first_verdict_on_a_request_is_its_only_one():
    slow = Broken(*["one", "two"] * FAILURES_UNTIL_OPEN)
    for number in range(FAILURES_UNTIL_OPEN):
        expected = number % 2 == 0
        await slow.attempt(expected, expected)
    assert slow.died == ["a"] * (FAILURES_UNTIL_OPEN // 2)
    quick = Broken(*["one"] * 3 * FAILURES_UNTIL_OPEN)
    for _ in range(FAILURES_UNTIL_OPEN):
        # The client read all until the answer broke; the error that it gets then may fill its buffer.
        await quick.attempt(False, is_slow=False)
    assert quick.died == ["a"] * FAILURES_UNTIL_OPEN
    assert quick.is_open


async def test_a_cancellation_during_the_check_hides_no_death():
    broken = Broken()
    for _ in range(FAILURES_UNTIL_OPEN):
        broken.hangs.clear()
        attempt = asyncio.create_task(broken.attempt())
        await asyncio.wait_for(broken.hangs.wait(), 30.0)
        attempt.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attempt
    assert broken.died == ["a"] * FAILURES_UNTIL_OPEN
    assert broken.is_open


def test_an_engine_waits_for_a_gateway_as_long_as_its_slowest_client_may_take(tmp_path: Path, model_dir: Path):
    of = settings(tmp_path, model_dir, ["http://one:1"], "redis://unused")
    # A full buffer is read from again once a quarter is left.
    longest = 0.75 * of.reader_buffer_bytes / of.min_read_rate
    assert longest < report.GATEWAY_WRITE_SECONDS < 1.25 * longest
