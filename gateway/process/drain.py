"""Drain of a gateway that stops, so that no accepted connection is cut off.

`/readyz` fails for load balancers, kept-alive connections close with their next answer, and requests of clients that
are connected are served. The drain precedes the time that running requests get (`shutdown_seconds`); shortly before its
end, the inference requests that still run end with an error of their own.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from aiohttp import hdrs, web

from gateway.errors import Unavailable
from gateway.process.listening import FairListener

# A client may be sending on a kept-alive connection; one that sends nothing for this long is idle.
IDLE_SECONDS = 1.0
LOOK_SECONDS = 0.02
# Time for the connections that have arrived to start.
ARRIVED_SECONDS = 5.0
# Time for the last errors of running requests: a share of `shutdown_seconds`, and its limit in seconds.
MARGIN_SHARE, MARGIN_SECONDS = 0.1, 2.0


class ShuttingDown(Unavailable):
    """The gateway stops, and the request did not end in the time that running requests get."""

    code = "shutting_down"

    def __init__(self) -> None:
        super().__init__("The gateway is shutting down and ended this request; send it again.")


class Drain:
    """Drain of this process. begun: whether it has begun. is_over: whether running inference requests must end."""

    def __init__(self) -> None:
        self.begun = self.is_over = False
        self._limits: set[asyncio.Timeout] = set()

    @contextmanager
    def limiting(self, limit: asyncio.Timeout) -> Iterator[None]:
        """End a request's time limit early if the drain is over before the block is."""
        self._limits.add(limit)
        try:
            if self.is_over:
                self._end(limit)
            yield
        finally:
            self._limits.discard(limit)

    def end_requests(self, seconds: float) -> None:
        """End the inference requests that still run shortly before `seconds` are over, so that each gets its error."""
        margin = min(MARGIN_SECONDS, MARGIN_SHARE * seconds)
        asyncio.get_running_loop().call_later(seconds - margin, self._end_all)

    def _end_all(self) -> None:
        self.is_over = True
        for limit in self._limits:
            self._end(limit)

    @staticmethod
    def _end(limit: asyncio.Timeout) -> None:
        if not limit.expired():
            limit.reschedule(asyncio.get_running_loop().time())

    async def close_connection(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """Make the client open a new connection for its next request. Called for each response; acts during a drain."""
        if self.begun:
            response.force_close()
            response.headers[hdrs.CONNECTION] = "close"

    async def run(self, runner: web.AppRunner, delay_seconds: float) -> None:
        """Fail `/readyz`, stop listening after `delay_seconds`, and wait at most IDLE_SECONDS for connections to close.

        The runner's cleanup ends the requests that still run.
        """
        self.begun = True
        await asyncio.sleep(delay_seconds)
        # Closing a listening socket resets the connections in its queue, so they are accepted first.
        servers: list[Any] = [site._server for site in runner.sites]
        listeners = [server for server in servers if isinstance(server, FairListener)]
        with suppress(TimeoutError):
            async with asyncio.timeout(ARRIVED_SECONDS):
                await asyncio.gather(*(listener.all_started() for listener in listeners))
        for site in runner.sites:
            await site.stop()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + IDLE_SECONDS
        while True:
            if runner.server is None or not runner.server.connections or loop.time() >= deadline:
                break
            await asyncio.sleep(LOOK_SECONDS)
