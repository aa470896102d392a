"""Export of the request log as CSV or JSON: every entry of a filter, page by page, in bounded memory."""

import csv
import io
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import datetime
from typing import Any

import msgspec
from aiohttp import web

from gateway.api.reports.files import send_file
from gateway.errors import BadRequest
from gateway.records.money.prices import exact_money
from gateway.records.requests.log import LogEntry, LogFilter, LogPage
from wire.csv_cells import cell

# Entries that are read and encoded at a time: a few ms of the event loop.
AT_ONCE = 200
FORMATS = {"csv": "text/csv", "json": "application/json"}
Describe = Callable[[LogEntry], dict[str, Any]]
LIMIT_FIELDS = ("limit_name", "limit_owner", "limit_value", "limit_needed", "limit_remaining")
FIELDS = (
    *(name for name in LogEntry.__struct_fields__ if name not in ("limit", "cost")),
    *(*LIMIT_FIELDS, "cost", "cost_micros", "currency"),
)


def describe_entry(entry: LogEntry, currency: str) -> dict[str, Any]:
    """Return an entry with its fields FIELDS. Its cost is an exact decimal, and in micro-units as `cost_micros`."""
    values = msgspec.structs.asdict(entry)
    limit = values.pop("limit")
    amounts = (None,) * 5 if limit is None else msgspec.structs.astuple(limit)
    values |= dict(zip(LIMIT_FIELDS, amounts, strict=True))
    values |= {"cost": exact_money(entry.cost), "cost_micros": entry.cost, "currency": currency}
    return {name: values[name] for name in FIELDS}


async def export_log(
    request: web.Request,
    read: Callable[..., Awaitable[LogPage]],
    which: LogFilter,
    currency: str,
    fields: Sequence[str] = FIELDS,
) -> web.StreamResponse:
    """Stream the entries of the filter in the format of `?format=`. Raises BadRequest, Unavailable before it begins.

    read: as `RequestLog.page`. fields: of FIELDS, to write.
    """
    given = request.query.get("format", "")
    if given not in FORMATS:
        raise BadRequest(f"format: expected one of {', '.join(FORMATS)}.", param="format")
    first = await read(which, limit=AT_ONCE)
    pages = _pages(read, which, first)

    def describe(entry: LogEntry) -> dict[str, Any]:
        values = describe_entry(entry, currency)
        return {name: values[name] for name in fields}

    parts = _csv(pages, fields, describe) if given == "csv" else _json(pages, describe)
    return await send_file(request, f"requests.{given}", FORMATS[given], parts)


async def _pages(
    read: Callable[..., Awaitable[LogPage]], which: LogFilter, page: LogPage
) -> AsyncIterator[Sequence[LogEntry]]:
    yield page.entries
    while page.next is not None:
        page = await read(which, after=page.next, limit=AT_ONCE)
        yield page.entries


async def _csv(
    pages: AsyncIterator[Sequence[LogEntry]], fields: Sequence[str], describe: Describe
) -> AsyncIterator[bytes]:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(fields)
    async for entries in pages:
        for entry in entries:
            writer.writerow([_plain(value) for value in describe(entry).values()])
        yield text.getvalue().encode()
        text.seek(0)
        text.truncate()


async def _json(pages: AsyncIterator[Sequence[LogEntry]], describe: Describe) -> AsyncIterator[bytes]:
    """Yield a JSON array with an entry on each line."""
    mark = b"[\n"
    async for entries in pages:
        part = bytearray()
        for entry in entries:
            part += mark + msgspec.json.encode(describe(entry))
            mark = b",\n"
        yield bytes(part)
    yield b"[]\n" if mark == b"[\n" else b"\n]\n"


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else cell(value)
