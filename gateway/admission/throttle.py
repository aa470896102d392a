"""Wrong keys, counted by where they come from. Whoever sends too many is told to wait; a right key is served from
anywhere, so that nobody can lock out the others behind one address."""

import ipaddress
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Sequence

from aiohttp import web
from aiohttp.typedefs import Middleware

from gateway.errors import Handler, TooManyFailures, WrongKey
from gateway.metrics import Metrics
from gateway.settings import Network

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

    def __init__(self, metrics: Metrics, trusted_proxies: Sequence[Network]) -> None:
        self._metrics = metrics
        self._trusted = tuple(trusted_proxies)
        # Address -> the moment at which it will have paid off all its failures (monotonic).
        self._paid_off: OrderedDict[str, float] = OrderedDict()

    def middleware(self) -> Middleware:
        """Goes inside the error boundary."""

        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            try:
                return await handler(request)
            except WrongKey:
                self.count(self.address(request.remote, request.headers.getall("X-Forwarded-For", ())))
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

    def address(self, peer: str | None, forwarded: Sequence[str]) -> str:
        """Who asks: the connection's other end or, behind trusted proxies only, the last of X-Forwarded-For that is
        none of them. What a client wrote there itself stands further left and is never read."""
        hops = [hop.strip() for line in forwarded for hop in line.split(",")]
        address = _parse(peer)
        while address is not None and hops and any(address in network for network in self._trusted):
            further = _parse(hops.pop())
            if further is None:
                break
            address = further
        if isinstance(address, ipaddress.IPv6Address):
            return str(ipaddress.IPv6Network((address, IPV6_PREFIX), strict=False))
        # A Unix socket's peer has no address.
        return str(address or "local")


def _parse(text: str | None) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(text or "")
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
