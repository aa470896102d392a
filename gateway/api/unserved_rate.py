"""Rate limit of requests that no engine serves: reads, refusals, repeated answers, and requests whose client leaves.

Each issued key, and each address without one, has a token bucket. While it is empty, further requests wait before they
are handled. They are not refused, because an attacker would repeat a refused request at once, and a refusal costs
almost as much time of the event loop as a small answer. Requests that an engine serves do not count, so an honest
client never waits. Requests for which there is no engine count too: no limit of the tenant does. A request whose key is
not verified, for example because its route checks none, counts by address: a tenant can make any number of keys. A
revoked key is verified before it is refused, so it counts by itself.

A bucket of 100 requests is 120 ms of the event loop. So after the first ones, an owner's next request begins only some
milliseconds after each of them: other requests then find most iterations of the event loop free.
"""

import asyncio
import time
from collections.abc import Callable, Container

from aiohttp import web
from aiohttp.typedefs import Middleware

from gateway.api.access_log import PROBES
from gateway.api.idempotency import REPLAYED
from gateway.api.requests.body_reader import COST
from gateway.caller import CALLER, Caller, client_network
from gateway.errors import ERROR_CODE, Handler, InvalidKey, NoEngine, NoEngineOfBase
from gateway.fleet.discovery.sleeping import BaseAsleep
from gateway.metrics import Metrics
from gateway.sharing.start_limiter import StartLimiter
from wire.bounded_dict import BoundedDict
from wire.http_requests import has_bad_head

# Size of a bucket in seconds of the rate, and the part of it that an owner may use without rests.
BURST_SECONDS, FREE_SECONDS = 5.0, 1.0
# Rest of an owner after each further request: four times the event loop's time for a refusal. At a rate of more than
# 200 requests a second, it is the time of one request at that rate.
REST_SECONDS = 0.005
# Maximum wait of a request with an issued key, and of one without. Many clients may share an address.
KEY_SECONDS, ADDRESS_SECONDS = 10.0, 5.0
# Each piece of this size that was read or decompressed of a refused body counts as one more request.
PIECE_BYTES = 2**16
MAX_OWNERS = 10_000
# Codes of refusals of requests for which there is no engine at present. The client did not cause them, so they delay
# its next requests for this many seconds at most.
ABSENT = {NoEngine.code, NoEngineOfBase.code, BaseAsleep.code}
ABSENT_SECONDS = 1.0
# The rate of a tenant's keys together is this many times a key's.
TENANT_RATE = 5
KEY_PREFIX = "lpx_"
# Number of requests whose client left before its key was verified, from which the key counts by address.
COUNTED_BY_ADDRESS = 2


class UnservedRate:
    """Token buckets of one process. rate: requests a second. is_proved: returns whether a secret is
    certainly not a guess: an issued key, or a strong secret of the deployment. keyed: the patterns of the routes that
    check the key in `Authorization`.
    """

    def __init__(
        self, rate: float, is_proved: Callable[[str], bool], metrics: Metrics, keyed: Container[str] = ()
    ) -> None:
        self._seconds_each = 1 / rate
        self._is_proved = is_proved
        self._metrics = metrics
        self._keyed = keyed
        self._start_limiter = StartLimiter()
        # Owner -> time (monotonic) at which its bucket is full again, least recently charged first.
        self._full = BoundedDict[str, float](MAX_OWNERS)
        # Key on record -> the owner of its tenant's bucket; an operator's key maps to itself. Added at the key's first
        # request.
        self._tenants = BoundedDict[str, str](MAX_OWNERS)
        # Issued keys that were deleted, or that no request has verified -> how often their client left before. From
        # COUNTED_BY_ADDRESS on, which one refusal is as well, their requests count by address.
        self._unverified = BoundedDict[str, int](MAX_OWNERS)

    def middleware(self) -> Middleware:
        """Return the middleware, which goes outside the error boundary and the work of a request."""

        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            caller = CALLER.get()
            assert caller is not None  # set by gateway/api/access_log.py, an outer middleware
            if _is_probe(request):
                await self._start_limiter.begin(f"probes of {client_network(caller.address)}")
                return await handler(request)
            key = self._issued_key(request)
            owner, longest = self._owner(key, caller)
            has_begun = False
            try:
                await self._wait(owner)
                has_begun = True
                response = await handler(request)
            except asyncio.CancelledError:
                if has_begun:
                    owner, longest = self._payer(request, key, caller, (owner, longest), None)
                self._charge(request, caller, owner, longest, rests=has_begun)
                raise
            owner, longest = self._payer(request, key, caller, (owner, longest), response.status)
            is_absent = request.get(ERROR_CODE) in ABSENT
            # A 3xx answers a form, with a session or without. The client did not cause other 5xx.
            is_refused = is_absent or 300 <= response.status < 500
            if is_refused or request.method in ("GET", "HEAD", "OPTIONS") or REPLAYED in response.headers:
                self._charge(request, caller, owner, min(longest, ABSENT_SECONDS) if is_absent else longest)
            return response

        return middleware

    def _payer(
        self, request: web.Request, key: str, caller: Caller, expected: tuple[str, float], status: int | None
    ) -> tuple[str, float]:
        """Return the owner that pays for a request, and its maximum wait, now that its key is verified or not.

        expected: both, before the request. status: the answer's status code; None if the client left.
        """
        owner, _ = expected
        if key and key == KEY_PREFIX + (caller.key_id or ""):
            self._tenants.put(key, key if caller.tenant_id is None else f"tenant {caller.tenant_id}")
            self._unverified.pop(key, None)
            return key, KEY_SECONDS
        # A request may be refused before its key is checked, for example for a query parameter.
        is_known = owner in self._tenants and request.get(ERROR_CODE) != InvalidKey.code
        if caller.key_id is not None or is_known or not owner.startswith(KEY_PREFIX):
            return expected
        if status is not None and status >= 500:
            # The client did not cause the failure, for example of the database, so the key counts by itself.
            return expected
        # A client may leave once for a good reason.
        self._tenants.pop(owner, None)
        self._unverified.put(owner, self._unverified.get(owner, 0) + 1 if status is None else COUNTED_BY_ADDRESS)
        return client_network(caller.address), ADDRESS_SECONDS

    def _charge(self, request: web.Request, caller: Caller, owner: str, longest: float, *, rests: bool = True) -> None:
        """Count a request that no engine served. Operators' requests do not count.

        rests: whether the owner rests after it. No rest follows a request that ends before it begins.
        """
        if caller.is_operator:
            return
        cost = self._seconds_each * (1 + request.get(COST, 0) // PIECE_BYTES)
        owed = self._take(owner, cost, longest)
        # Not the tenant of a session, whose owner is an address, nor the one for which an operator asks.
        if (tenant := self._tenants.get(owner, owner)) != owner:
            self._take(tenant, cost / TENANT_RATE, longest)
        if rests and owed > FREE_SECONDS:
            self._start_limiter.rest(owner, min(REST_SECONDS, self._seconds_each))

    def _take(self, owner: str, cost: float, longest: float) -> float:
        """Take from an owner's bucket. Return the seconds until it is full again."""
        now = time.monotonic()
        full = min(max(now, self._full.get(owner, 0.0)) + cost, now + BURST_SECONDS + longest)
        self._full.put(owner, full)
        return full - now

    async def _wait(self, owner: str) -> None:
        """Wait while the bucket of the owner or of its tenant is empty, then for an iteration of the event loop.

        The waits of one owner end at the same time.
        """
        full = max(self._full.get(owner, 0.0), self._full.get(self._tenants.get(owner, owner), 0.0))
        wait = full - BURST_SECONDS - time.monotonic()
        if wait > 0:
            self._metrics.delayed()
            await asyncio.sleep(wait)
        await self._start_limiter.begin(owner)

    def _issued_key(self, request: web.Request) -> str:
        """Return the part of the request's secret that identifies it. It is empty if the secret may be a guess, and on
        routes that do not check it.
        """
        resource = request.match_info.route.resource
        if resource is None or resource.canonical not in self._keyed:
            return ""
        presented = request.headers.get("Authorization", "").partition(" ")[2].strip()
        return presented[:20] if self._is_proved(presented) else ""

    def _owner(self, key: str, caller: Caller) -> tuple[str, float]:
        """Return the request's issued key or else its address, and the maximum wait of such an owner."""
        if key and not self._may_be_unverified(key):
            return key, KEY_SECONDS
        return client_network(caller.address), ADDRESS_SECONDS

    def _may_be_unverified(self, key: str) -> bool:
        """Return whether an issued key was not verified or, once more such keys were used than are remembered, may have
        been used so.

        Otherwise such keys that are used in turn, each after it was forgotten, would have no rate.
        """
        is_forgotten = len(self._unverified) >= MAX_OWNERS and key.startswith(KEY_PREFIX) and key not in self._tenants
        return is_forgotten or self._unverified.get(key, 0) >= COUNTED_BY_ADDRESS


def _is_probe(request: web.Request) -> bool:
    """Return whether a request is a load balancer's probe, which has no rate. Refused ones have one, like others."""
    return request.path in PROBES and request.method in ("GET", "HEAD") and not has_bad_head(request)
