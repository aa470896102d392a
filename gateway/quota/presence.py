"""How many gateways there are: each says every few seconds that it lives, on Redis' clock."""

import uuid
from typing import Any

from gateway.redis.client import Client

GATEWAYS = "loraplex:gateways"
ALIVE_SECONDS = 10
# KEYS: the set. ARGV: this gateway, seconds that its word holds, 1 to stay or 0 to leave.
SCRIPT = """
local now = tonumber(redis.call('TIME')[1])
if ARGV[3] == '1' then redis.call('ZADD', KEYS[1], now, ARGV[1]) else redis.call('ZREM', KEYS[1], ARGV[1]) end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - tonumber(ARGV[2]))
return redis.call('ZCARD', KEYS[1])
"""


class Presence:
    """count: gateways that live, this one among them, as of the last time that Redis said."""

    def __init__(self, redis: Client) -> None:
        self._redis = redis
        self._name = uuid.uuid4().hex
        self.count = 1

    async def stay(self) -> None:
        """Raises RedisError and its like."""
        self.count = max(1, await self._say(1))

    async def leave(self) -> None:
        """Raises RedisError and its like."""
        await self._say(0)

    async def _say(self, here: int) -> Any:
        return await self._redis.execute_command("EVAL", SCRIPT, 1, GATEWAYS, self._name, ALIVE_SECONDS, here)
