"""Uses of a vLLM server's adapters by several gateway processes are ordered by the time of use, not of report."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from gateway.fleet.kinds.last_uses import LastUses
from testing.gateway.running import until


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    async with Redis.from_url(redis_url) as client:
        yield client


async def order(uses: LastUses, engine: str) -> list[str]:
    found = await uses.all(engine)
    return sorted(found, key=lambda digest: max(found[digest].values()))


async def test_a_use_reported_late_keeps_its_place(redis: Redis):
    one, two = LastUses(redis, 10.0), LastUses(redis, 10.0)
    one.note("http://late", "first")
    assert await order(one, "http://late") == ["first"]
    # This use comes within a second of the last report, so it waits for the next one.
    one.note("http://late", "first")
    await asyncio.sleep(0.5)
    two.note("http://late", "second")
    assert await order(two, "http://late") == ["first", "second"]
    assert await order(one, "http://late") == ["first", "second"]


async def test_uses_during_a_report_are_reported_after_it(redis: Redis):
    one, two = LastUses(redis, 10.0), LastUses(redis, 10.0)
    for digest in ("a", "b", "c"):
        one.note("http://burst", digest)
        await asyncio.sleep(0)

    async def all_known() -> bool:
        return set(await two.all("http://burst")) == {"a", "b", "c"}

    await until(all_known)
