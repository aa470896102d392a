"""Files that a browser saves: streams of CSV and JSON with their headers, page by page, in bounded memory."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import msgspec
from aiohttp import web

from gateway.api.inference.delivery import DELIVERIES
from gateway.api.scopes import AUTH, PRINCIPAL, watched_by
from gateway.errors import ClientGone, GatewayError
from wire.csv_cells import csv_lines

log = logging.getLogger(__name__)

# Longest time of an export in seconds.
EXPORT_SECONDS = 600.0
# Owner of the memory for operators' unread exports, beside the tenants' ids.
OPERATORS = "operators"


async def send_file(request: web.Request, name: str, kind: str, parts: AsyncIterator[bytes]) -> web.StreamResponse:
    """Stream a file to save, for at most EXPORT_SECONDS. kind: its media type.

    A failure, a time-out or the end of the key or session breaks the connection, so that nobody takes a part for the
    whole file. A client that reads too slowly is cut off like the reader of an answer
    (gateway/api/inference/delivery.py).
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
    principal = request.get(PRINCIPAL)
    owner = OPERATORS if principal is None else principal.tenant.id
    try:
        with request.config_dict[DELIVERIES].open(request, owner) as delivery:
            async with asyncio.timeout(EXPORT_SECONDS), request.config_dict[AUTH].while_valid(watched_by(request)):
                async for part in parts:
                    await delivery.write(response, part)
                await response.write_eof()
    except ClientGone:
        pass
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
