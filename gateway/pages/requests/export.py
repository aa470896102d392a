"""Export of the request log as CSV or JSON: every entry of a filter, page by page, in bounded memory."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import msgspec
from aiohttp import web

from gateway.api.reports.files import csv_parts, json_parts, send_file
from gateway.errors import BadRequest
from gateway.records.requests.log import LogEntry, LogFilter, LogPage
from wire.money import exact_money

# Entries that are read and encoded at a time: a few ms of the event loop.
AT_ONCE = 200
FORMATS = {"csv": "text/csv", "json": "application/json"}
LIMIT_FIELDS = ("limit_name", "limit_owner", "limit_value", "limit_needed", "limit_remaining", "limit_retry_after")
FIELDS = (
    *(name for name in LogEntry.__struct_fields__ if name not in ("limit", "cost")),
    *(*LIMIT_FIELDS, "cost", "cost_micros", "currency"),
)


def describe_entry(entry: LogEntry, currency: str) -> dict[str, Any]:
    """Return an entry with its fields FIELDS. Its cost is an exact decimal, and in micro-units as `cost_micros`."""
    values = msgspec.structs.asdict(entry)
    limit = values.pop("limit")
    amounts = (None,) * len(LIMIT_FIELDS) if limit is None else msgspec.structs.astuple(limit)
    values |= dict(zip(LIMIT_FIELDS, amounts, strict=True))
    values |= {"cost": exact_money(entry.cost), "cost_micros": entry.cost, "currency": currency}
    return {name: values[name] for name in FIELDS}


async def export_log(
    request: web.Request,
    read: Callable[..., Awaitable[LogPage]],
    criteria: LogFilter,
    currency: str,
    fields: Sequence[str] = FIELDS,
) -> web.StreamResponse:
    """Stream the entries of the filter in the format of `?format=`. Raises BadRequest, Unavailable before it begins.

    read: a method like `RequestLog.page`. fields: columns to write, names in FIELDS.
    """
    given = request.query.get("format", "")
    if given not in FORMATS:
        raise BadRequest(f"format: expected one of {', '.join(FORMATS)}.", param="format")
    first = await read(criteria, limit=AT_ONCE)
    described = (
        [describe_entry(entry, currency) for entry in entries] async for entries in _pages(read, criteria, first)
    )
    chosen = ([{name: each[name] for name in fields} for each in entries] async for entries in described)
    csv_rows = ([each.values() for each in entries] async for entries in chosen)
    parts = csv_parts(fields, csv_rows) if given == "csv" else json_parts(chosen)
    return await send_file(request, f"requests.{given}", FORMATS[given], parts)


async def _pages(
    read: Callable[..., Awaitable[LogPage]], criteria: LogFilter, page: LogPage
) -> AsyncIterator[Sequence[LogEntry]]:
    yield page.entries
    while page.next is not None:
        page = await read(criteria, after=page.next, limit=AT_ONCE)
        yield page.entries
