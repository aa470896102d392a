"""A gateway's way out, before its requests' own time runs: nobody who was let in is cut off.

Load balancers are told, kept-alive connections end with their next answer, who has connected is served.
"""

import asyncio
import select
from collections.abc import Iterable
from typing import Any

from aiohttp import hdrs, web

# A client that has a kept-alive connection may be sending on it right now; one that sends nothing for so long is idle.
IDLE_SECONDS = 1.0
LOOK_SECONDS = 0.02


class Drain:
    def __init__(self) -> None:
        self.begun = False

    async def close_connection(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        """On each answer that begins: from the drain on its client must take another connection for the next."""
        if self.begun:
            response.force_close()
            response.headers[hdrs.CONNECTION] = "close"

    async def run(self, runner: web.AppRunner, delay_seconds: float) -> None:
        """Stops listening, `delay_seconds` after `/readyz` has begun to say so, and lets connections end by themselves.
        Requests that run are left to the runner's cleanup."""
        self.begun = True
        await asyncio.sleep(delay_seconds)
        # Closing a listening socket resets who waits in its queue: they are let in first.
        listening = [fd for site in runner.sites for fd in _descriptors(site)]
        while True:
            if not _readable(listening):
                break
            await asyncio.sleep(0)
        for site in runner.sites:
            await site.stop()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + IDLE_SECONDS
        while True:
            if runner.server is None or not runner.server.connections or loop.time() >= deadline:
                break
            await asyncio.sleep(LOOK_SECONDS)


def _descriptors(site: web.BaseSite) -> list[int]:
    # uvloop's server is none of asyncio's classes, and has its sockets all the same.
    server: Any = site._server
    return [listener.fileno() for listener in server.sockets] if server is not None else []


def _readable(descriptors: Iterable[int]) -> bool:
    """Whether anybody waits to be let in. `poll`, since `select` knows no descriptor above 1023."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))
