"""Rate limit of requests that no engine serves: reads, refusals, and requests whose client leaves.

Each issued key, and each address without one, has a token bucket. While it is empty, further requests wait before they
are handled. They are not refused, because an attacker would repeat a refused request at once, and a refusal costs
almost as much time of the event loop as a small answer. Requests that an engine serves do not count, so an honest
client never waits.

A large body is charged when it arrives, because 500 of them that arrive at once would all pass before the first is
refused. The charge is returned when the tenant's quota admits the request, and replaced by that of a refusal when it is
refused. It delays only further large bodies of the same owner: they wait in line, unread.
"""

import asyncio
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial

from aiohttp import web
from aiohttp.typedefs import Middleware

from gateway.access.caller import CALLER, Caller
from gateway.access.credentials import basic_password
from gateway.access.throttle import client_network
from gateway.api.access_log import PROBES
from gateway.api.requests.pieces import COST
from gateway.errors import Handler, TooManyBodies
from gateway.metrics import Metrics
from gateway.sharing.rounds import Rounds
from gateway.sharing.turns import Turns

# Size of a bucket in seconds of the rate.
BURST_SECONDS = 5.0
# Maximum wait of a request with an issued key, and of one without. Many clients may share an address.
KEY_SECONDS, ADDRESS_SECONDS = 10.0, 5.0
# Each piece of this size that was read or decompressed of a refused body counts as one more request.
PIECE_BYTES = 2**16
MAX_OWNERS = 10_000
# Routes of load balancers and Prometheus, which never wait.
EXEMPT = (*PROBES, "/metrics")
# Prefix of an owner: its bucket of large bodies that have arrived and are neither admitted nor refused.
BODIES = "\0bodies of "
# The first body in line is looked at again after this many seconds, because an admission may return a charge.
POLL_SECONDS = 0.05
# Bodies of an owner in line; each holds some 190 KiB of what its client has sent. Further ones are refused.
MAX_IN_LINE = 128


class ArrivingBody:
    """The charge of a request's large body from its arrival until the request is admitted or has ended.

    find_owner: returns the bucket's owner and the maximum wait in seconds, once the request's key is known.
    """

    def __init__(self, rate: "UnservedRate", find_owner: Callable[[], tuple[str, float]]) -> None:
        self._rate = rate
        self._find_owner = find_owner
        self._owner: str | None = None
        # Seconds of the rate.
        self._charged = 0.0

    async def charge(self, num_bytes: int) -> float:
        """Charge further bytes of the body. The first call waits until the owner's bucket has room.

        Returns the wait in seconds.
        """
        began = time.monotonic()
        owner, longest = self._find_owner()
        if self._owner is None:
            self._owner = owner
            await self._rate.wait_in_line(owner, longest)
        self._charged += self._rate.add(BODIES + self._owner, max(1, num_bytes // PIECE_BYTES), longest)
        return time.monotonic() - began

    def refund(self) -> None:
        """Return what was charged."""
        if self._owner is not None:
            self._rate.give_back(BODIES + self._owner, self._charged)
        self._charged = 0.0


ARRIVING_BODY = web.RequestKey("arriving_body", ArrivingBody)


class UnservedRate:
    """Token buckets of one process. rate: requests a second. is_proved: returns whether a secret is
    certainly not a guess: an issued key, or a strong secret of the deployment.
    """

    def __init__(self, rate: float, is_proved: Callable[[str], bool], metrics: Metrics) -> None:
        self._seconds_each = 1 / rate
        self._is_proved = is_proved
        self._metrics = metrics
        # The waits of one owner end at the same time.
        self._rounds = Rounds()
        # Lines of large bodies: the first of each owner waits for its bucket.
        self._lines = Turns(sys.maxsize)
        self._in_line: Counter[str] = Counter()
        # Owner -> time (monotonic) at which its bucket is full again, least recently charged first.
        self._full: OrderedDict[str, float] = OrderedDict()
        # Time (monotonic) after which no owner waits.
        self._calm = 0.0

    def middleware(self) -> Middleware:
        """Return the middleware, which goes outside the error boundary and the work of a request."""

        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            caller = CALLER.get()
            assert caller is not None  # set by gateway/api/access_log.py, an outer middleware
            if request.path in EXEMPT:
                return await handler(request)
            if time.monotonic() < self._calm:
                await self._wait(self._owner(request, caller)[0])
            body = request[ARRIVING_BODY] = ArrivingBody(self, partial(self._owner, request, caller))
            try:
                response = await handler(request)
            except asyncio.CancelledError:
                self.charge(request, caller)
                raise
            finally:
                body.refund()
            # A 5xx is not the client's fault.
            if 400 <= response.status < 500 or request.method in ("GET", "HEAD"):
                self.charge(request, caller)
            return response

        return middleware

    def charge(self, request: web.Request, caller: Caller) -> None:
        """Count a request that no engine served. Operators' requests do not count."""
        if caller.key_id is not None and caller.tenant_name is None:
            return
        owner, longest = self._owner(request, caller)
        self.add(owner, 1 + request.get(COST, 0) // PIECE_BYTES, longest)

    def add(self, owner: str, requests: int, longest: float) -> float:
        """Charge an owner. Return the charge in seconds of the rate: less where the wait would exceed `longest`."""
        now = time.monotonic()
        before = max(now, self._full.get(owner, 0.0))
        full = max(before, min(before + self._seconds_each * requests, now + BURST_SECONDS + longest))
        self._full[owner] = full
        self._full.move_to_end(owner)
        self._calm = max(self._calm, full - BURST_SECONDS)
        if len(self._full) > MAX_OWNERS:
            self._full.popitem(last=False)
        return full - before

    def give_back(self, owner: str, seconds: float) -> None:
        """Return a charge of `add`."""
        if owner in self._full:
            self._full[owner] -= seconds

    async def wait_in_line(self, owner: str, longest: float) -> None:
        """Wait until the owner's bucket has room and its earlier bodies have passed.

        After `longest` seconds a body passes although the bucket is empty, but never faster than the rate.
        Raises TooManyBodies.
        """
        last = time.monotonic() + longest
        if self._in_line[owner] >= MAX_IN_LINE:
            raise TooManyBodies
        self._in_line[owner] += 1
        try:
            await self._wait_first(owner, last)
        finally:
            self._in_line[owner] -= 1
            if not self._in_line[owner]:
                del self._in_line[owner]

    async def _wait_first(self, owner: str, last: float) -> None:
        """Wait for the first place in line, and then for the bucket, until the time `last`."""
        async with self._lines.turn(owner):
            has_waited = False
            while (wait := self._debt(owner) + self._debt(BODIES + owner) - BURST_SECONDS) > 0:
                if not has_waited:
                    has_waited = True
                    self._metrics.delayed()
                if (left := last - time.monotonic()) <= 0:
                    await asyncio.sleep(self._seconds_each)
                    return
                await asyncio.sleep(min(wait, left, POLL_SECONDS))

    def _debt(self, owner: str) -> float:
        return max(0.0, self._full.get(owner, 0.0) - time.monotonic())

    async def _wait(self, owner: str) -> None:
        if (wait := self._debt(owner) - BURST_SECONDS) > 0:
            self._metrics.delayed()
            await asyncio.sleep(wait)
            await self._rounds.begin(owner)

    def _owner(self, request: web.Request, caller: Caller) -> tuple[str, float]:
        """Return the request's issued key or else its address, and the maximum wait of such an owner."""
        scheme, _, secret = request.headers.get("Authorization", "").partition(" ")
        presented = basic_password(secret) if scheme.lower() == "basic" else secret.strip()
        if presented is not None and self._is_proved(presented):
            return presented[:20], KEY_SECONDS
        return client_network(caller.address), ADDRESS_SECONDS
