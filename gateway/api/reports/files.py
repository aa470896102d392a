"""Files that a browser saves: streams of CSV and JSON with their headers, page by page, in bounded memory."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import msgspec
from aiohttp import web

from gateway.errors import GatewayError
from wire.csv_cells import csv_lines

log = logging.getLogger(__name__)


async def send_file(
    request: web.Request, name: str, kind: str, parts: AsyncIterator[bytes], seconds: float | None = None
) -> web.StreamResponse:
    """Stream a file to save. kind: its media type. seconds: the longest time.

    A failure or a time-out breaks the connection, so that nobody takes a part for the whole file.
    """
    headers = {
        "Content-Disposition": f'attachment; filename="{name}"',
        "Content-Type": f"{kind}; charset=utf-8" if kind.startswith("text/") else kind,
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
    }
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    if request.method == "HEAD":
        # A client would take a body after HEAD for the connection's next answer.
        return response
    try:
        async with asyncio.timeout(seconds):
            async for part in parts:
                await response.write(part)
            await response.write_eof()
    except (GatewayError, TimeoutError) as error:
        log.warning("the export %s was aborted: %s", name, getattr(error, "message", "it took too long"))
        if request.transport is not None:
            request.transport.abort()
    return response


async def csv_parts(head: Sequence[str], pages: AsyncIterator[Iterable[Iterable[Any]]]) -> AsyncIterator[bytes]:
    """Yield a CSV file. pages: its rows."""
    yield csv_lines([head]).encode()
    async for rows in pages:
        yield csv_lines(rows).encode()


async def json_parts(pages: AsyncIterator[Iterable[Any]]) -> AsyncIterator[bytes]:
    """Yield a JSON array with an item on each line. pages: its items."""
    mark = b"[\n"
    async for items in pages:
        part = bytearray()
        for item in items:
            part += mark + msgspec.json.encode(item)
            mark = b",\n"
        yield bytes(part)
    yield b"[]\n" if mark == b"[\n" else b"\n]\n"
