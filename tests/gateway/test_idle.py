"""Work of a gateway without requests: few commands and statements, and full speed as soon as a request runs."""

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from sqlalchemy import Engine, event

from gateway.fleet.queueing import shared_service
from gateway.fleet.queueing.service_counters import ServiceCounters
from gateway.fleet.queueing.shared_service import SharedService
from gateway.process.background import running as in_background
from gateway.records.caches.changes import IDLE_SECONDS
from testing.gateway.running import Gateway, running, settings, until
from testing.gateway.upstream import Upstream

SECONDS = 3.0
CHANGES = "tenant_changes AS rows"


@pytest.fixture
def statements() -> Any:
    """Count the statements of this process."""
    counts: Counter[str] = Counter()

    def count(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        counts["changes" if CHANGES in statement else "others"] += 1

    event.listen(Engine, "before_cursor_execute", count)
    yield counts
    event.remove(Engine, "before_cursor_execute", count)


async def commands(redis: Redis) -> Counter[str]:
    found = await redis.info("commandstats")
    return Counter({name.removeprefix("cmdstat_"): each["calls"] for name, each in found.items()})


async def test_an_idle_gateway_asks_seldom(
    tmp_path: Path, model_dir: Path, upstream: Upstream, redis_url: str, statements: Counter[str]
):
    redis = Redis.from_url(redis_url)
    # Usage events of earlier tests are work.
    await redis.flushall()
    async with running(settings(tmp_path, model_dir, [upstream.url], redis_url)) as gateway:
        await gateway.tenant("acme")
        # The exchange of service ends its first interval.
        await asyncio.sleep(0.5)
        statements.clear()
        before, began = await commands(redis), time.monotonic()
        await asyncio.sleep(SECONDS)
        sent, asked = await commands(redis) - before, Counter(statements)
        # Longer than SECONDS on a busy machine.
        seconds = time.monotonic() - began
    await redis.aclose()
    assert 0 < asked["changes"] <= seconds / IDLE_SECONDS + 1
    assert asked["others"] <= 12 * seconds
    # The wait for reports of deaths, and the scripts of all periodic tasks.
    assert 0 < sent["xread"] <= seconds + 1
    assert sent["evalsha"] <= 2 * seconds


async def test_a_running_request_ends_the_idle_interval(
    gateway: Gateway, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
):
    acme = await gateway.tenant("acme")
    monkeypatch.setattr("gateway.access.auth.IDLE_SECONDS", 3600.0)
    # The interval that had begun ends.
    await asyncio.sleep(0.6)
    asked = acme.complete(stream=True, max_tokens=200, x_engine={"tokens": 200, "delay": 1.0})
    stream = asyncio.ensure_future(asked)

    async def arrived() -> bool:
        return bool(upstream.requests)

    await until(arrived)
    key_id = (acme.key or "").split("_")[1]
    await gateway.admin.call("DELETE", f"/admin/api/keys/{key_id}")
    async with asyncio.timeout(20):
        assert (await stream).events[-1]["error"]["code"] == "invalid_api_key"


async def test_the_first_request_ends_the_idle_interval(redis_url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shared_service, "IDLE_SECONDS", 3600.0)
    redis, counters = Redis.from_url(redis_url), ServiceCounters()
    shared = SharedService(redis, "idle", counters)
    exchanged = asyncio.Event()
    async with in_background(shared.watch(lambda: None, exchanged.set)):
        for tenant in ("acme", "globex"):
            await asyncio.sleep(2 * shared_service.SECONDS)
            assert not exchanged.is_set()
            counters.enter(tenant, 1.0)
            async with asyncio.timeout(20):
                await exchanged.wait()
            counters.leave(tenant)

            async def is_idle() -> bool:
                return counters.number == 0

            await until(is_idle)
            await asyncio.sleep(0)
            exchanged.clear()
    await redis.aclose()
