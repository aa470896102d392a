"""Rate limit of requests that no engine serves: reads, refusals, and requests whose client leaves.

Each key, or address without an issued key, has a token bucket of them. Past it, its next requests wait before they are
handled. Waiting beats a refusal here: an attacker would repeat a refused request at once, and a refusal costs almost as
much of the event loop as a small answer. Requests that an engine serves are free, so an honest client never waits.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable

from aiohttp import web
from aiohttp.typedefs import Middleware

from gateway.access.caller import CALLER, Caller
from gateway.access.credentials import basic_password
from gateway.access.throttle import client_network
from gateway.api.access_log import PROBES
from gateway.api.requests.pieces import COST
from gateway.errors import Handler
from gateway.metrics import Metrics

# Seconds of the rate that may come at once.
BURST_SECONDS = 5.0
# Longest wait of a request with an issued key, and of one without. Many clients may share an address.
KEY_SECONDS, ADDRESS_SECONDS = 10.0, 5.0
# A refused body costs as much as a further request for each piece of this size that was read or decompressed.
PIECE_BYTES = 2**16
MAX_OWNERS = 10_000
# Routes of load balancers and Prometheus, which never wait.
EXEMPT = (*PROBES, "/metrics")


class UnservedRate:
    """The buckets of one process. rate: requests a second. is_issued: tells an issued key from a guess."""

    def __init__(self, rate: float, is_issued: Callable[[str], bool], metrics: Metrics) -> None:
        self._seconds_each = 1 / rate
        self._is_issued = is_issued
        self._metrics = metrics
        # Owner -> the moment at which its bucket is full again (monotonic), the one charged longest ago first.
        self._full: OrderedDict[str, float] = OrderedDict()
        # No owner waits after this moment.
        self._calm = 0.0

    def middleware(self) -> Middleware:
        """Return the middleware, which goes outside of everything that costs."""

        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            caller = CALLER.get()
            assert caller is not None  # gateway/api/access_log.py's, further out
            if request.path in EXEMPT:
                return await handler(request)
            if time.monotonic() < self._calm:
                await self._wait(request, caller)
            try:
                response = await handler(request)
            except asyncio.CancelledError:
                self.charge(request, caller)
                raise
            # A 5xx is not the client's fault.
            if 400 <= response.status < 500 or request.method in ("GET", "HEAD"):
                self.charge(request, caller)
            return response

        return middleware

    def charge(self, request: web.Request, caller: Caller) -> None:
        """Count a request that no engine served. Operators' requests are free."""
        if caller.key_id is not None and caller.tenant is None:
            return
        owner, longest = self._owner(request, caller)
        cost = self._seconds_each * (1 + request.get(COST, 0) // PIECE_BYTES)
        now = time.monotonic()
        full = min(max(now, self._full.get(owner, 0.0)) + cost, now + BURST_SECONDS + longest)
        self._full[owner] = full
        self._full.move_to_end(owner)
        self._calm = max(self._calm, full - BURST_SECONDS)
        if len(self._full) > MAX_OWNERS:
            self._full.popitem(last=False)

    async def _wait(self, request: web.Request, caller: Caller) -> None:
        owner, _ = self._owner(request, caller)
        wait = self._full.get(owner, 0.0) - BURST_SECONDS - time.monotonic()
        if wait > 0:
            self._metrics.delayed()
            await asyncio.sleep(wait)

    def _owner(self, request: web.Request, caller: Caller) -> tuple[str, float]:
        """Return the request's issued key or else its address, and the longest wait of such an owner."""
        scheme, _, secret = request.headers.get("Authorization", "").partition(" ")
        presented = basic_password(secret) if scheme.lower() == "basic" else secret.strip()
        if presented is not None and self._is_issued(presented):
            return presented[:20], KEY_SECONDS
        return client_network(caller.address), ADDRESS_SECONDS
