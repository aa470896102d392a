"""Exports of usage as CSV, JSON or Parquet: sums or rows of one snapshot, streamed. They equal the ledger's exactly."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, UnsetType

from gateway.api.reports.files import csv_parts, json_parts, send_file
from gateway.api.reports.parquet import Field, ParquetWriter
from gateway.api.requests.fields import parse_period, parse_text
from gateway.errors import BadRequest, Unavailable
from gateway.records.usage.report import GROUPS, UsageReport
from gateway.records.usage.rows import UsageFilter
from wire.money import exact_money

FORMATS = {"csv": "text/csv", "json": "application/json", "parquet": "application/vnd.apache.parquet"}
QUERY = ("format", "group_by", "since", "until", "tenant", "model", "key")
ROWS_QUERY = ("format", "since", "until", "tenant", "model", "key")
# Groups read and encoded at a time, a few ms of the event loop; rows of a Parquet row group, encoded in a thread.
AT_ONCE, ROW_GROUP = 200, 2000
# Maximum concurrent exports, because each holds a database connection.
EXPORTS = 3
FIELDS = (
    Field("tenant", "text"),
    Field("deleted", "flag"),
    Field("month", "time", optional=True),
    Field("day", "time", optional=True),
    Field("hour", "time", optional=True),
    Field("model", "text", optional=True),
    Field("version", "integer", optional=True),
    Field("key_id", "text", optional=True),
    Field("key", "text", optional=True),
    Field("end_user", "text", optional=True),
    Field("requests", "integer"),
    Field("prompt_tokens", "integer"),
    Field("cached_tokens", "integer"),
    Field("completion_tokens", "integer"),
    Field("cost", "money"),
    Field("currency", "text"),
)
# Fields of the ledger's rows.
ROW_FIELDS = (
    Field("request_id", "text"),
    Field("created_at", "time"),
    Field("tenant_id", "text"),
    Field("tenant", "text"),
    Field("key_id", "text"),
    Field("endpoint", "text"),
    Field("model", "text"),
    Field("version", "integer", optional=True),
    Field("base", "text", optional=True),
    Field("adapter_digest", "text", optional=True),
    Field("served_digest", "text", optional=True),
    Field("engine", "text", optional=True),
    Field("end_user", "text", optional=True),
    Field("status", "text"),
    Field("finish_reason", "text", optional=True),
    Field("error_code", "text", optional=True),
    Field("limit_name", "text", optional=True),
    Field("prompt_tokens", "integer"),
    Field("cached_tokens", "integer"),
    Field("completion_tokens", "integer"),
    Field("surcharge", "integer"),
    Field("reserved_tokens", "integer", optional=True),
    Field("cost", "money"),
    Field("currency", "text"),
    Field("admission_ms", "integer", optional=True),
    Field("queue_ms", "integer", optional=True),
    Field("ttft_ms", "integer", optional=True),
    Field("latency_ms", "integer"),
)
# Media types of the files beside JSON.
FILES = tuple(kind for form, kind in FORMATS.items() if form != "json")
_TYPES: dict[str, Any] = {
    "text": str,
    "flag": bool,
    "time": Annotated[str, Meta(extra_json_schema={"format": "date-time"})],
    "integer": int,
    "money": Annotated[str, Meta(description="An exact decimal.")],
}


def _file_struct(name: str, fields: Sequence[Field], *, may_lack: bool) -> Any:
    """Return the struct of a file's rows in JSON. may_lack: whether optional fields may be absent."""
    types: list[Any] = []
    for field in fields:
        kind = _TYPES[field.kind]
        if field.optional and may_lack:
            types.append((field.name, kind | UnsetType | None, UNSET))
        else:
            types.append((field.name, kind | None if field.optional else kind))
    return msgspec.defstruct(name, types, frozen=True, kw_only=True)


ExportedSums = _file_struct("ExportedSums", FIELDS, may_lack=True)
ExportedRow = _file_struct("ExportedRow", ROW_FIELDS, may_lack=False)
Rows = AsyncIterator[list[dict[str, Any]]]
Parts = AsyncGenerator[list[dict[str, Any]]]
# Fields that a report has only if it groups by one of the values.
_ONLY_BY = {"version": ("version",), "key_id": ("key",), "key": ("key",), "model": ("model", "version")}


class UsageExport:
    """Routes `/admin/api/usage/export` (sums) and `/admin/api/usage/rows`; the page of usage has the former's file too.

    currency: the costs' currency.
    """

    def __init__(self, report: UsageReport, currency: str) -> None:
        self._report = report
        self._currency = currency
        self._places = asyncio.Semaphore(EXPORTS)

    async def get(self, request: web.Request) -> web.StreamResponse:
        """Stream the sums of `?group_by=` in the format of `?format=`.

        Raises BadRequest, and Unavailable if too many exports are running.
        """
        form, group_by = read_format(request), _read_groups(request)
        since, until = parse_period(request.query)
        parts = self._sums(group_by, read_usage_filter(request), since, until)
        return await self._send(request, f"usage-{'-'.join(group_by)}", form, fields_of(group_by), parts)

    async def rows(self, request: web.Request) -> web.StreamResponse:
        """Stream the ledger's rows in the format of `?format=`, the oldest first. Raises like `get`."""
        form, (since, until) = read_format(request), parse_period(request.query)
        parts = self._report.stream_rows(read_usage_filter(request), since, until, AT_ONCE)
        return await self._send(request, "usage-rows", form, ROW_FIELDS, parts)

    async def _send(
        self, request: web.Request, name: str, form: str, fields: Sequence[Field], parts: Parts
    ) -> web.StreamResponse:
        """Stream a file. parts: its rows, without the currency."""
        if self._places.locked():
            raise Unavailable(f"{EXPORTS} exports are running; try again when one has ended.")
        async with self._places:
            try:
                return await send_rows(request, f"{name}.{form}", fields, parts, self._currency)
            finally:
                await parts.aclose()

    async def _sums(
        self, group_by: Sequence[str], criteria: UsageFilter, since: datetime | None, until: datetime | None
    ) -> Parts:
        async with aclosing(self._report.stream(group_by, criteria, since, until, AT_ONCE)) as parts:
            async for part in parts:
                yield [msgspec.structs.asdict(sums) for sums in part]


def fields_of(group_by: Sequence[str]) -> list[Field]:
    """Return the fields of a file of sums by these groups."""
    return [field for field in FIELDS if _is_in(field.name, group_by)]


async def send_rows(
    request: web.Request, name: str, fields: Sequence[Field], parts: Parts, currency: str
) -> web.StreamResponse:
    """Stream rows as a file, whose name ends with one of FORMATS. Raises an error that `parts` raises before its first
    part.
    """
    form = name.rpartition(".")[2]
    # The first part is read before the answer begins, so that an error still sets the HTTP status.
    first: list[dict[str, Any]] = await anext(parts, [])
    rows = _with_currency(first, parts, currency)
    encoded = {"csv": _csv, "json": _json, "parquet": _parquet}[form](rows, fields)
    return await send_file(request, name, FORMATS[form], encoded)


async def _with_currency(first: list[dict[str, Any]], parts: Parts, currency: str) -> Rows:
    yield [row | {"currency": currency} for row in first]
    async for part in parts:
        yield [row | {"currency": currency} for row in part]


def _is_in(name: str, group_by: Sequence[str]) -> bool:
    needed = _ONLY_BY.get(name, (name,) if name in GROUPS and name != "tenant" else None)
    return needed is None or any(group in group_by for group in needed)


def read_usage_filter(request: web.Request) -> UsageFilter:
    """Return the filter of the query. Raises BadRequest."""
    tenant, model, key = (parse_text(request.query, name) for name in ("tenant", "model", "key"))
    return UsageFilter(tenant=tenant, models=None if model is None else [model], key_id=key)


def read_format(request: web.Request) -> str:
    given = request.query.get("format", "")
    if given not in FORMATS:
        raise BadRequest(f"format: expected one of {', '.join(FORMATS)}.", param="format")
    return given


def _read_groups(request: web.Request) -> list[str]:
    given = (request.query.get("group_by") or "tenant").split(",")
    if not set(given) <= set(GROUPS):
        raise BadRequest(f"group_by: expected one or more of {', '.join(GROUPS)}, comma separated.", param="group_by")
    return [name for name in GROUPS if name in given]


def _csv(rows: Rows, fields: Sequence[Field]) -> AsyncIterator[bytes]:
    pages = ([[_plain(field, row[field.name]) for field in fields] for row in part] async for part in rows)
    return csv_parts([field.name for field in fields], pages)


def _json(rows: Rows, fields: Sequence[Field]) -> AsyncIterator[bytes]:
    pages = ([{field.name: _plain(field, row[field.name]) for field in fields} for row in part] async for part in rows)
    return json_parts(pages)


async def _parquet(rows: Rows, fields: Sequence[Field]) -> AsyncIterator[bytes]:
    writer = ParquetWriter(fields)
    yield writer.begin()
    held: list[dict[str, Any]] = []
    async for part in rows:
        held += part
        if len(held) >= ROW_GROUP:
            yield await asyncio.to_thread(writer.rows, held)
            held = []
    yield await asyncio.to_thread(writer.rows, held)
    yield writer.end()


def _plain(field: Field, value: Any) -> Any:
    if field.kind == "money":
        return exact_money(value)
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat().removesuffix("+00:00") + "Z"
    return value
