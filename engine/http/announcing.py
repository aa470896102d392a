"""Announcements of the engine to gateways, sent periodically, and its withdrawal at the end: `POST` and `DELETE
/internal/engines`.

An unreachable gateway is retried; the engine serves regardless.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from aiohttp import ClientSession, ClientTimeout

from wire.headers import ANNOUNCE_TOKEN_HEADER, INTERNAL_TOKEN_HEADER
from wire.http_errors import HTTP_ERRORS

logger = logging.getLogger(__name__)

# Gateways drop an engine 10 s after its last announcement.
PERIOD_S = 3.0
TIMEOUT = ClientTimeout(total=2.0)


@asynccontextmanager
async def announcing(
    gateways: Sequence[str], url: str, internal_token: str | None, announce_token: str | None = None
) -> AsyncIterator[None]:
    """Announce the engine at `url` to each gateway during the block, then withdraw it.

    announce_token: secret for announcements, if it differs from the internal token.
    """
    if announce_token:
        headers = {ANNOUNCE_TOKEN_HEADER: announce_token}
    else:
        headers = {INTERNAL_TOKEN_HEADER: internal_token or ""}
    async with ClientSession(headers=headers, timeout=TIMEOUT) as session:
        tasks = [asyncio.create_task(_keep_announcing(session, gateway, url)) for gateway in gateways]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
            await asyncio.gather(*(_send(session, "DELETE", gateway, url) for gateway in gateways))


async def _keep_announcing(session: ClientSession, gateway: str, url: str) -> None:
    last_problem = None
    while True:
        problem = await _send(session, "POST", gateway, url)
        if problem != last_problem:
            level = logging.WARNING if problem else logging.INFO
            logger.log(level, "announced to %s: %s", gateway, problem or "accepted")
            last_problem = problem
        await asyncio.sleep(PERIOD_S)


async def _send(session: ClientSession, method: str, gateway: str, url: str) -> str:
    """Send an announcement or a withdrawal. Return the problem, "" if there is none."""
    target = f"{gateway.rstrip('/')}/internal/engines"
    try:
        async with session.request(method, target, json={"url": url}, allow_redirects=False) as response:
            return "" if response.status == 204 else f"status {response.status}, expected 204"
    except HTTP_ERRORS as error:
        return type(error).__name__
