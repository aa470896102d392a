"""A client of a Redis database that no other test uses at the same time."""

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

# The gateways of other tests use the server's first database.
REDIS_DATABASE = 7


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    """Return a client of an empty database, in which nothing else is counted or swept."""
    redis = Redis.from_url(redis_url, db=REDIS_DATABASE)
    await redis.flushdb()
    yield redis
    await redis.aclose()
