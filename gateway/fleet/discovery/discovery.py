"""Discovery of engines: a fixed list, the addresses of a DNS name, and announcements.

All gateways share the announcements in a sorted set in Redis, scored by Redis' own clock. So a fleet grows without a
restart, and an engine that stops announcing itself is removed after ANNOUNCEMENT_SECONDS.
"""

import asyncio
import logging
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from gateway.fleet.discovery.addresses import parse_address
from gateway.fleet.engines.engine import Address
from gateway.process.loop_lag import deadline
from gateway.process.outage import Outage
from gateway.redis.errors import REDIS_ERRORS
from gateway.redis.keys import ANNOUNCED_ENGINES_KEY

log = logging.getLogger(__name__)

ANNOUNCEMENT_SECONDS = 10
DNS_SECONDS = 2.0
# KEYS: the set. ARGV: seconds an announcement lasts, an engine's URL or "", 1 to announce it or 0 to withdraw it.
SCRIPT = """
local now = tonumber(redis.call('TIME')[1])
if ARGV[2] ~= '' then
  if ARGV[3] == '1' then redis.call('ZADD', KEYS[1], now, ARGV[2]) else redis.call('ZREM', KEYS[1], ARGV[2]) end
end
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - tonumber(ARGV[1]))
return redis.call('ZRANGE', KEYS[1], 0, -1)
"""


class Announcements:
    """Engines that announced themselves to any gateway."""

    def __init__(self, redis: Any, timeout: float) -> None:
        self._script = redis.register_script(SCRIPT)
        self._timeout = timeout

    async def all(self) -> list[str]:
        """Return the addresses as the engines sent them. Raises RedisError, OSError or TimeoutError."""
        return await self._call("", 0)

    async def announce(self, url: str) -> None:
        """Add an engine, or renew its announcement. Raises as `all`."""
        await self._call(url, 1)

    async def withdraw(self, url: str) -> None:
        """Remove an engine. Raises as `all`."""
        await self._call(url, 0)

    async def _call(self, url: str, alive: int) -> list[str]:
        async with deadline(self._timeout):
            found = await self._script(keys=[ANNOUNCED_ENGINES_KEY], args=[ANNOUNCEMENT_SECONDS, url, alive])
        return [item.decode() if isinstance(item, bytes) else item for item in found]


class Discovery:
    """All sources together. A source that is away keeps its last result.

    announcements: None if engines may not announce themselves.
    """

    def __init__(self, addresses: Sequence[Address], announcements: Announcements | None) -> None:
        self._addresses = addresses
        self._announcements = announcements
        self._last: dict[str, list[Address]] = {}
        self._outages = {address.url: Outage(log, f"resolving {address.url}") for address in addresses}
        self._outages[ANNOUNCED_ENGINES_KEY] = Outage(log, "listing announced engines")

    async def __call__(self) -> list[Address]:
        found: list[Address] = []
        for address in self._addresses:
            found += await self._resolve(address) if address.url.startswith("dns://") else [address]
        if self._announcements is not None:
            # An announcement never changes a listed engine, such as its kind or key.
            listed = {address.url for address in found}
            found += [each for each in await self._announced(self._announcements) if each.url not in listed]
        return found

    async def _announced(self, announcements: Announcements) -> list[Address]:
        try:
            self._last[ANNOUNCED_ENGINES_KEY] = _valid(await announcements.all())
            self._outages[ANNOUNCED_ENGINES_KEY].over()
        except REDIS_ERRORS as error:
            self._outages[ANNOUNCED_ENGINES_KEY].failed(type(error).__name__, "the last listed engines stay in use")
        return self._last.get(ANNOUNCED_ENGINES_KEY, [])

    async def _resolve(self, address: Address) -> list[Address]:
        parts = urlsplit(address.url)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(DNS_SECONDS):
                infos = await loop.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
        except (OSError, TimeoutError) as error:
            self._outages[address.url].failed(type(error).__name__, "the last resolved engines stay in use")
        else:
            self._outages[address.url].over()
            hosts = sorted({str(info[4][0]) for info in infos})
            urls = [f"http://{f'[{host}]' if ':' in host else host}:{parts.port}" for host in hosts]
            self._last[address.url] = [replace(address, url=url) for url in urls]
        return self._last.get(address.url, [])


def _valid(announced: Sequence[str]) -> list[Address]:
    """Return the addresses that this release accepts; a gateway of another release may have accepted others."""
    addresses = []
    for text in announced:
        try:
            addresses.append(parse_address(text))
        except ValueError:
            log.debug("an announced engine has an address in a form that this gateway does not support")
    return addresses
