"""The event loop's lag is measured, and a stall of the loop never counts as an outage of Redis."""

import asyncio
import contextlib
import socket
import time

import pytest
from redis.asyncio import Redis

from gateway.errors import Unavailable
from gateway.process.background import running
from gateway.process.loop_lag import LoopLag, deadline
from gateway.quota.store import QuotaStore
from gateway.redis.client import connect
from testing.gateway.running import Gateway, until


def stand_still(seconds: float) -> None:
    """Block the event loop."""
    time.sleep(seconds)


async def test_a_stall_is_measured_and_forgotten_where_it_was_before():
    lag = LoopLag(lambda _: None)
    async with running(lag.watch()):
        await asyncio.sleep(0.2)
        before = time.monotonic()
        stand_still(0.5)
        took = time.monotonic() - before
        # Even before the tick that would record it.
        assert 0.4 < lag.since(before) <= time.monotonic() - before
        await asyncio.sleep(0.1)
        assert 0.4 < lag.since(before) <= time.monotonic() - before
        assert lag.longest >= 0.4
        # Half of it. A busy machine stretches the stall and may add one of its own.
        assert lag.since(before + took / 2) < max(0.35, time.monotonic() - before - took / 2)


async def test_a_loop_that_runs_well_has_no_lag():
    lag = LoopLag(lambda _: None)

    async def runs_well() -> bool:
        """Return whether half a second had no lag. A busy machine may need several attempts."""
        start = time.monotonic()
        await asyncio.sleep(0.5)
        return lag.since(start) < 0.25 and lag.last < 0.25

    async with running(lag.watch()):
        await until(runs_well)


async def test_a_deadline_ends_what_takes_too_long():
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        async with deadline(0.3):
            await asyncio.sleep(600)
    assert time.monotonic() - start >= 0.29
    async with deadline(0.3):
        await asyncio.sleep(0)
    # No timer is left that would cancel this task later.
    await asyncio.sleep(0.5)


async def test_a_deadline_passes_on_a_cancellation_from_elsewhere():
    async def wait() -> None:
        async with deadline(600):
            await asyncio.sleep(600)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_loop_that_always_lags_does_not_keep_a_call_for_ever():
    async def lag() -> None:
        while True:
            stand_still(0.1)
            await asyncio.sleep(0)

    async with running(lag()):
        with pytest.raises(TimeoutError):
            async with deadline(0.2):
                await asyncio.sleep(600)


class Asked:
    """Pending calls on a separate store: some the server answers at once, one after a delay."""

    def __init__(self, redis: Redis) -> None:
        self.redis, self.store = redis, QuotaStore(redis, timeout=1.0)

    async def begin(self, fresh: bool) -> None:
        if not fresh:
            await self.store.call(self.redis.ping)
            await self.store.script("t", "expired", 1)
        self.calls = [asyncio.create_task(self.store.script("t", "expired", 1)) for _ in range(5)]
        self.waiting = asyncio.create_task(
            self.store.call(lambda: self.redis.blpop(["nothing-comes-here"], timeout=0.1))
        )

    async def end(self) -> None:
        assert await asyncio.gather(*self.calls) == [[]] * 5
        assert await self.waiting is None
        assert not self.store.away
        await self.store.ping()
        await self.store.close()
        await self.redis.aclose()


@pytest.mark.parametrize("fresh", [True, False], ids=["connecting", "connected"])
async def test_a_stall_is_no_outage_of_redis(fresh: bool, redis_url: str):
    """Calls pending during a stall of twice their deadline get their answers."""
    asked = []
    # Started 0.8 s, 0.1 s and 1 ms before the stall, and at its start.
    for pause in (0.7, 0.099, 0.001, 0.0):
        redis = connect(redis_url, timeout=1.0)
        assert isinstance(redis, Redis)
        asked.append(Asked(redis))
        await asked[-1].begin(fresh)
        await asyncio.sleep(pause)
    stand_still(2.0)
    for each in asked:
        await each.end()


@pytest.mark.usefixtures("starts_servers")
async def test_a_silent_server_is_given_up_though_the_loop_stalls_now_and_then():
    silent = socket.socket()
    silent.bind(("127.0.0.1", 0))
    silent.listen()
    redis = connect(f"redis://127.0.0.1:{silent.getsockname()[1]}", timeout=0.2)
    store = QuotaStore(redis, timeout=0.2)

    async def stall() -> None:
        while True:
            await asyncio.sleep(0.05)
            stand_still(0.05)

    async with running(stall()):
        start = time.monotonic()
        for _ in range(3):
            with contextlib.suppress(Unavailable):
                await store.call(redis.ping)
        assert store.away
        assert time.monotonic() - start < 20
    await store.close()
    await redis.aclose()
    silent.close()


async def test_the_metrics_say_how_long_the_loop_stood_still(gateway: Gateway):
    async def stall_is_reported() -> bool:
        # The gateway runs on this test's loop.
        stand_still(0.3)
        await asyncio.sleep(0.1)
        page = (await gateway.admin.get("/metrics")).body.decode()
        [line] = [line for line in page.splitlines() if line.startswith("loraplex_gateway_loop_lag_max_seconds ")]
        return float(line.split()[1]) >= 0.2

    await until(stall_is_reported)
