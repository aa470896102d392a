"""Throttle of wrong keys by client address.

Beyond a limit, further guesses from an address are refused without a comparison, so that no answer reveals whether a
guess was right. Issued keys are served from any address, because their check digits, which cannot be computed without
the pepper, distinguish them from guesses. An attacker therefore cannot lock out a tenant that shares the address.

Secrets that the operator chose (the bootstrap admin key, the tokens of engines) have no check digits. A correct one of
at least STRONG_BITS is served from any address as well, because it cannot be guessed at any rate. A weaker one is
refused until the address is below the limit. An admin port has its own count of wrong keys: the public port then never
compares a weak bootstrap key, so two counts do not allow more guesses, and clients of the public port cannot lock out
the operator.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware

from gateway.caller import CALLER, client_network
from gateway.errors import Handler, TooManyWrongKeys, WrongKey
from gateway.metrics import Metrics
from gateway.process.admin_port import is_admin_port
from gateway.process.outage import Outage
from gateway.redis.errors import REDIS_ERRORS
from gateway.redis.keys import wrong_keys_key
from wire.bounded_dict import BoundedDict
from wire.headers import ANNOUNCE_TOKEN_HEADER, INTERNAL_TOKEN_HEADER

log = logging.getLogger(__name__)

# Token bucket of an address: wrong keys that are compared at once, and the seconds until one more is.
BURST = 10
SECONDS_EACH = 6.0
# Maximum number of buckets; beyond it the one least recently charged is dropped.
MAX_ADDRESSES = 10_000
# Time limit of the Redis call for a wrong key.
SHARE_SECONDS = 0.25
# KEYS: an address's bucket. ARGV: seconds that one wrong key costs. Returns the milliseconds until the bucket's debt is
# paid off.
SCRIPT = """
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1000000
local debt = math.max(0, tonumber(redis.call('GET', KEYS[1]) or '0') - now) + tonumber(ARGV[1])
redis.call('SET', KEYS[1], string.format('%.6f', now + debt), 'PX', math.ceil(debt * 1000))
return math.ceil(debt * 1000)
"""


class WrongKeyThrottle:
    """Buckets of this process, in bounded memory. Each compared wrong key is also added to a bucket in Redis that all
    processes share, and the process adopts the shared level. So n processes compare at most n - 1 more guesses than a
    single one.
    """

    def __init__(
        self,
        metrics: Metrics,
        is_proved: Callable[[str], bool],
        redis: Any | None = None,
        deployment: str = "",
        admin_port: int | None = None,
    ) -> None:
        """is_proved: returns whether a secret is known to be right, and so is not a guess. redis: None to count in this
        process only. deployment: a value that is the same in all processes of one deployment, such as the database's
        URL; it separates deployments on the same Redis. admin_port: the port that has counts of its own.
        """
        self._metrics = metrics
        self._is_proved = is_proved
        self._admin_port = admin_port
        self._script = redis.register_script(SCRIPT) if redis is not None else None
        self._deployment = deployment
        self._outage = Outage(log, "sharing the count of wrong keys")
        # Address -> time (monotonic) at which its debt is paid off.
        self._paid_off = BoundedDict[str, float](MAX_ADDRESSES)

    def middleware(self) -> Middleware:
        """Return the middleware, which goes inside the error boundary."""

        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            presented = list(_presented(request))
            self._refuse_guesses(request, presented)
            try:
                return await handler(request)
            except WrongKey:
                await self._count(request, presented)
                raise

        return middleware

    def refuse_guess(self, request: web.Request, presented: str) -> None:
        """Raise TooManyWrongKeys for a secret from a form, under the same conditions as for one from a header."""
        self._refuse_guesses(request, [presented])

    async def count_form(self, request: web.Request, presented: str) -> None:
        """Count a wrong key from a form. The form's handler answers with a page, so no WrongKey is raised."""
        await self._count(request, [presented])

    async def _count(self, request: web.Request, presented: Iterable[str]) -> None:
        """Count a wrong key.

        An issued key (deleted, or for another log-in page) is compared even while guesses are refused. It does not
        lengthen their wait then, because a few minutes of such requests would refuse guesses for days.
        """
        bucket = self._bucket(request)
        if self._wait(bucket) > 0 and all(map(self._is_proved, presented)):
            self._metrics.count_wrong_key()
        else:
            await self.count(bucket)

    def _refuse_guesses(self, request: web.Request, presented: Iterable[str]) -> None:
        wait = self._wait(self._bucket(request))
        if wait > 0 and not all(map(self._is_proved, presented)):
            self._metrics.count_refused_key()
            raise TooManyWrongKeys(retry_after=math.ceil(wait))

    def _bucket(self, request: web.Request) -> str:
        """Return the name of the bucket of the request's address and port."""
        caller = CALLER.get()
        assert caller is not None  # set by gateway/api/access_log.py, an outer middleware
        address = client_network(caller.address)
        return f"admin/{address}" if is_admin_port(request, self._admin_port) else address

    async def count(self, address: str) -> None:
        """Count a compared wrong key."""
        self._metrics.count_wrong_key()
        was_calm = self._wait(address) <= 0
        # Charge the bucket before the first await, so that concurrent guesses see it.
        now = time.monotonic()
        self._remember(address, max(now, self._paid_off.get(address, 0.0)) + SECONDS_EACH)
        shared = await self._share(address)
        if shared is not None:
            self._remember(address, max(self._paid_off.get(address, 0.0), time.monotonic() + shared))
        if was_calm and self._wait(address) > 0:
            log.warning("too many wrong API keys from %s: further guesses are refused", address)

    def _wait(self, address: str) -> float:
        """Return the seconds until a guess from the address is compared again; 0 or less means now."""
        return self._paid_off.get(address, 0.0) - time.monotonic() - (BURST - 1) * SECONDS_EACH

    def _remember(self, address: str, paid_off: float) -> None:
        self._paid_off.put(address, paid_off)

    async def _share(self, address: str) -> float | None:
        """Add a wrong key to the shared bucket. Return its debt in seconds, None while Redis is away."""
        if self._script is None:
            return None
        try:
            async with asyncio.timeout(SHARE_SECONDS):
                debt = await self._script(keys=[wrong_keys_key(self._deployment, address)], args=[SECONDS_EACH])
        except REDIS_ERRORS as error:
            self._outage.failed(type(error).__name__, "each process counts alone")
            return None
        self._outage.over()
        return int(debt) / 1000


def _presented(request: web.Request) -> Iterator[str]:
    """Yield the secrets in a request's headers."""
    for header in (INTERNAL_TOKEN_HEADER, ANNOUNCE_TOKEN_HEADER):
        yield from request.headers.getall(header, ())
    for given in request.headers.getall("Authorization", ()):
        yield given.partition(" ")[2].strip()
