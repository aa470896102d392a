"""Count of live gateways: each registers itself in Redis every few seconds, by Redis' clock."""

import uuid
from typing import Any

from gateway.redis.client import Client
from gateway.redis.keys import GATEWAYS_KEY

ALIVE_SECONDS = 10
# KEYS: the sorted set. ARGV: this gateway's name, seconds for which an entry is valid, 1 to register, 0 to unregister.
SCRIPT = """
local now = tonumber(redis.call('TIME')[1])
if ARGV[3] == '1' then redis.call('ZADD', KEYS[1], now, ARGV[1]) else redis.call('ZREM', KEYS[1], ARGV[1]) end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - tonumber(ARGV[2]))
return redis.call('ZCARD', KEYS[1])
"""


class Presence:
    """Presence of this gateway. count: the number of live gateways, including this one, when Redis last answered."""

    def __init__(self, redis: Client) -> None:
        self._redis = redis
        self._name = uuid.uuid4().hex
        self.count = 1

    async def register(self) -> None:
        """Register this gateway as alive and update the count. Raises RedisError, OSError."""
        self.count = max(1, await self._update(1))

    async def unregister(self) -> None:
        """Remove this gateway. Raises RedisError, OSError."""
        await self._update(0)

    async def _update(self, here: int) -> Any:
        return await self._redis.execute_command("EVAL", SCRIPT, 1, GATEWAYS_KEY, self._name, ALIVE_SECONDS, here)
