"""Wrong keys, counted by where they come from. Whoever sends too many is told to wait; a right key is served from
anywhere, so that nobody can lock out the others behind one address."""

import ipaddress
import logging
import math
import time
from collections import OrderedDict

from aiohttp import web
from aiohttp.typedefs import Middleware

from gateway.caller import CALLER, parse_address
from gateway.errors import Handler, TooManyFailures, WrongKey
from gateway.metrics import Metrics

log = logging.getLogger(__name__)

# A token bucket for each address: so many wrong keys at once, then one again every so often.
BURST = 10
SECONDS_EACH = 6.0
# Addresses remembered; beyond it the one heard of longest ago is forgotten.
MAX_ADDRESSES = 10_000
# An IPv6 customer is given a whole network of this size.
IPV6_PREFIX = 64


class FailedLogins:
    """One process's count, in bounded memory."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        # Address -> the moment at which it will have paid off all its failures (monotonic).
        self._paid_off: OrderedDict[str, float] = OrderedDict()

    def middleware(self) -> Middleware:
        """Goes inside the error boundary."""

        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            try:
                return await handler(request)
            except WrongKey:
                caller = CALLER.get()
                assert caller is not None  # gateway/access.py's, further out
                self.count(who(caller.address))
                raise

        return middleware

    def count(self, address: str) -> None:
        """One more wrong key. Raises TooManyFailures in place of its 401."""
        self._metrics.login_failed()
        now = time.monotonic()
        debt = max(0.0, self._paid_off.get(address, 0.0) - now)
        wait = debt - (BURST - 1) * SECONDS_EACH
        if wait > 0:
            raise TooManyFailures(retry_after=math.ceil(wait))
        self._paid_off[address] = now + debt + SECONDS_EACH
        self._paid_off.move_to_end(address)
        if len(self._paid_off) > MAX_ADDRESSES:
            self._paid_off.popitem(last=False)
        if wait + SECONDS_EACH > 0:  # that was the last one for now
            log.warning("many wrong API keys from %s: told to wait", address)


def who(address: str) -> str:
    """Whom an address is taken for: of IPv6, its whole network."""
    parsed = parse_address(address)
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((parsed, IPV6_PREFIX), strict=False))
    return address
