"""Throttle wrong keys by client address.

Past a limit, further guesses from an address are refused without a comparison, so that an answer never tells whether a
guess was right. Issued keys are served from any address: their check digits, which nobody can compute without the
pepper, tell them from guesses. An attacker therefore locks no tenant out behind a shared address. Chosen secrets (the
bootstrap admin key, the internal token) have no check digits and wait until the address is below the limit.
"""

import asyncio
import hashlib
import ipaddress
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware
from redis.exceptions import RedisError

from gateway.access.caller import CALLER, parse_address
from gateway.access.credentials import ANNOUNCE_TOKEN, INTERNAL_TOKEN, basic_password
from gateway.errors import Handler, TooManyFailures, WrongKey
from gateway.metrics import Metrics
from gateway.process.outage import Outage

log = logging.getLogger(__name__)

# The token bucket of an address: wrong keys compared at once, and the time until a further one is.
BURST = 10
SECONDS_EACH = 6.0
# Addresses remembered; beyond this the least recently seen is forgotten.
MAX_ADDRESSES = 10_000
# An IPv6 customer is given a whole network of this size.
IPV6_PREFIX = 64
# Time limit of Redis for the answer to a wrong key.
SHARE_SECONDS = 0.25
# KEYS: an address' bucket. ARGV: seconds that one wrong key costs. Returns the seconds until all of it is paid off.
SCRIPT = """
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
local debt = math.max(0, tonumber(redis.call('GET', KEYS[1]) or '0') - now) + tonumber(ARGV[1])
redis.call('SET', KEYS[1], string.format('%.6f', now + debt), 'PX', math.ceil(debt * 1000))
return math.ceil(debt * 1000)
"""


class FailedLogins:
    """The process's buckets, in bounded memory. Each compared wrong key is also added to a bucket in Redis that all
    processes share, and the shared level is adopted. So n processes compare at most n - 1 more guesses than a single
    one.
    """

    def __init__(
        self, metrics: Metrics, is_issued: Callable[[str], bool], redis: Any | None = None, deployment: str = ""
    ) -> None:
        """redis: None to count in this process only. deployment: a value that all processes of a deployment share and
        others do not, such as the database's URL; it separates deployments on the same Redis.
        """
        self._metrics = metrics
        self._is_issued = is_issued
        self._script = redis.register_script(SCRIPT) if redis is not None else None
        self._scope = f"loraplex:wrong-keys:{hashlib.sha256(deployment.encode()).hexdigest()[:8]}"
        self._outage = Outage(log, "sharing the count of wrong keys")
        # Address -> the moment at which it will have paid off all its failures (monotonic).
        self._paid_off: OrderedDict[str, float] = OrderedDict()

    def middleware(self) -> Middleware:
        """Return the middleware, which goes inside the error boundary."""

        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            caller = CALLER.get()
            assert caller is not None  # gateway/api/access_log.py's, further out
            address = client_network(caller.address)
            wait = self._wait(address)
            if wait > 0 and self._may_be_guess(request):
                self._metrics.login_refused()
                raise TooManyFailures(retry_after=math.ceil(wait))
            try:
                return await handler(request)
            except WrongKey:
                await self.count(address)
                raise

        return middleware

    async def count(self, address: str) -> None:
        """Count a compared wrong key."""
        self._metrics.login_failed()
        was_calm = self._wait(address) <= 0
        # Before the first await, so that simultaneous guesses see it.
        now = time.monotonic()
        self._remember(address, max(now, self._paid_off.get(address, 0.0)) + SECONDS_EACH)
        shared = await self._share(address)
        if shared is not None:
            self._remember(address, max(self._paid_off.get(address, 0.0), time.monotonic() + shared))
        if was_calm and self._wait(address) > 0:
            log.warning("many wrong API keys from %s: refused until it is calm", address)

    def _wait(self, address: str) -> float:
        """Return the seconds until a guess from the address is compared again; 0 or less means now."""
        return self._paid_off.get(address, 0.0) - time.monotonic() - (BURST - 1) * SECONDS_EACH

    def _may_be_guess(self, request: web.Request) -> bool:
        """Return whether a request holds a secret that is not an issued key."""
        if INTERNAL_TOKEN in request.headers or ANNOUNCE_TOKEN in request.headers:
            return True
        for given in request.headers.getall("Authorization", ()):
            scheme, _, secret = given.partition(" ")
            presented = basic_password(secret) if scheme.lower() == "basic" else secret.strip()
            if presented is not None and not self._is_issued(presented):
                return True
        return False

    def _remember(self, address: str, paid_off: float) -> None:
        self._paid_off[address] = paid_off
        self._paid_off.move_to_end(address)
        if len(self._paid_off) > MAX_ADDRESSES:
            self._paid_off.popitem(last=False)

    async def _share(self, address: str) -> float | None:
        """Add a wrong key to the shared bucket. Returns its debt in seconds, None while Redis is away."""
        if self._script is None:
            return None
        try:
            async with asyncio.timeout(SHARE_SECONDS):
                debt = await self._script(keys=[f"{self._scope}:{address}"], args=[SECONDS_EACH])
        except (RedisError, OSError, TimeoutError) as error:
            self._outage.failed(type(error).__name__, "each process counts by itself")
            return None
        self._outage.over()
        return int(debt) / 1000


def client_network(address: str) -> str:
    """Return the throttled unit of an address: an IPv4 address, or the network of an IPv6 address."""
    parsed = parse_address(address)
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((parsed, IPV6_PREFIX), strict=False))
    return address
