"""Request log: admitted requests from `usage` and refused ones from `refused_requests`, newest first, in pages.

A query reads at most SCANNED rows of each table along an index of their times. Filters without an index of their own
may therefore end a page early: its `next` continues the search.
"""

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any

import msgspec
from sqlalchemy import ColumnElement, FromClause, Table, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.sql.base import ReadOnlyColumnCollection

from gateway.errors import BadRequest, Exceeded
from gateway.records.cursors import check_moment, decode_cursor, encode_cursor
from gateway.records.requests.refusal_tables import refused_requests
from gateway.records.requests.rows_of_owner import in_order, owned
from gateway.records.sql.database import Database
from gateway.records.sql.tables import api_keys, usage

# Maximum number of rows of each table that a query reads for filters without an index.
SCANNED = 20_000
MAX_PAGE = 1000
# Status of a request that was refused before its admission. The other statuses are those of usage rows.
NOT_ADMITTED = "not_admitted"
STATUSES = ("ok", "cancelled", "revoked", "limited", "refused", "error", "abandoned", NOT_ADMITTED)
ROUTES = {"chat.completions": "/v1/chat/completions", "completions": "/v1/completions"}
TIMES: dict[Table, ColumnElement[Any]] = {usage: usage.c.created_at, refused_requests: refused_requests.c.at}
Columns = ReadOnlyColumnCollection[str, ColumnElement[Any]]
_ID = re.compile(r"(?:req_|chatcmpl-|cmpl-)([0-9a-zA-Z_-]{1,60})")

Position = tuple[datetime, Annotated[str, msgspec.Meta(max_length=64)]]
"""Time and id of an entry; entries are ordered by both. An empty id: before all entries of the time."""


class LogFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Filter of requests; None: any.

    tenant: the name, also of a deleted tenant. models: only these. statuses: names in STATUSES. code: the error's code.
    limit_name: name of the limit that refused the request or ended its answer. end_user: the body's `user`. since,
    until: bounds of the time of admission or refusal, `until` exclusive.
    """

    tenant: str | None = None
    tenant_id: str | None = None
    key_id: str | None = None
    model: str | None = None
    models: Sequence[str] | None = None
    version: int | None = None
    engine: str | None = None
    statuses: Sequence[str] | None = None
    code: str | None = None
    limit_name: str | None = None
    end_user: str | None = None
    min_latency_ms: int | None = None
    since: datetime | None = None
    until: datetime | None = None


class LogEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A request. Times are in ms from its arrival, except `queue_ms`, the wait in queues after the admission.

    at: the admission, or the refusal's arrival. key: the label of the key `key_id`, None if it is gone. status: a name
    in STATUSES. http_status, param, limit, address: set for a refused request only. code: the error's code. base: None
    for a refused request. ended_by: name of the limit that ended the answer. The other fields are those of UsageRow.
    """

    request_id: str
    at: datetime
    tenant_id: str
    tenant: str
    key_id: str
    key: str | None = None
    route: str
    model: str | None
    version: int | None = None
    adapter_digest: str | None = None
    served_digest: str | None = None
    engine: str | None = None
    end_user: str | None
    status: str
    http_status: int | None = None
    code: str | None
    param: str | None = None
    limit: Exceeded | None = None
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    surcharge: int = 0
    reserved_tokens: int | None = None
    cost: int = 0
    admission_ms: int | None = None
    queue_ms: int | None = None
    ttft_ms: int | None = None
    latency_ms: int
    address: str | None = None
    base: str | None = None
    ended_by: str | None = None

    @property
    def is_admitted(self) -> bool:
        return self.status != NOT_ADMITTED


class Step(msgspec.Struct, frozen=True):
    """Step of a request, in ms from its arrival.

    name: "admission", "queue" (wait in the gateway's queue and the engine's), "first token" (until it), "engine" (all
    of its work, if the first token's time is unknown) or "answer".
    """

    name: str
    start_ms: int
    end_ms: int


class LogPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of entries, newest first. next: where the next page starts; None after the last entry.

    A page with fewer entries than its limit, or none, can have a `next`: a query reads at most SCANNED rows.
    """

    entries: list[LogEntry]
    next: str | None


class _Found(msgspec.Struct):
    """Entries of one table. horizon: the position of the last row that the search could read, None if it read all."""

    entries: list[LogEntry]
    horizon: Position | None


class RequestLog:
    """Queries of the request log. Raises Unavailable while the database is away."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def page(self, criteria: LogFilter, *, after: str | None = None, limit: int = 50) -> LogPage:
        """Return a page. after: the previous page's `next`. Raises BadRequest for a malformed one."""
        start = None if after is None else _position(after)
        async with self._database.read() as connection:
            found = [await _search(connection, table, criteria, start, limit) for table in _tables(criteria)]
            horizon = max((each.horizon for each in found if each.horizon is not None), default=None)
            entries = sorted((entry for each in found for entry in each.entries), key=_place, reverse=True)
            # Beyond the horizon one of the tables may have rows that were not read.
            entries = [entry for entry in entries if horizon is None or _place(entry) >= horizon]
            labels = await _labels(connection, entries[:limit])
        following = _place(entries[limit - 1]) if len(entries) > limit else horizon
        shown = [msgspec.structs.replace(entry, key=labels.get(entry.key_id)) for entry in entries[:limit]]
        return LogPage(entries=shown, next=None if following is None else encode_cursor(following))

    async def find(self, request_or_answer_id: str, *, tenant_id: str | None = None) -> LogEntry | None:
        """Return a request by its id (`req_...`) or its answer's (`chatcmpl-...`, `cmpl-...`); None if there is none.

        tenant_id: finds only this tenant's. Raises BadRequest for a text of another form.
        """
        request_id = read_id(request_or_answer_id)
        async with self._database.read() as connection:
            for table in TIMES:
                query = select(table).where(table.c.request_id == request_id)
                if tenant_id is not None:
                    query = query.where(table.c.tenant_id == tenant_id)
                if (row := (await connection.execute(query)).first()) is not None:
                    entry = _entry(table, row)
                    labels = await _labels(connection, [entry])
                    return msgspec.structs.replace(entry, key=labels.get(entry.key_id))
        return None


def steps(entry: LogEntry) -> list[Step]:
    """Return the steps of a request in order, as far as their times are known; the last one ends with the request."""
    if entry.admission_ms is None:
        return []
    ends = [("admission", entry.admission_ms)]
    if entry.queue_ms is not None:
        ends.append(("queue", entry.admission_ms + entry.queue_ms))
        if entry.ttft_ms is not None:
            ends.append(("first token", entry.ttft_ms))
        ends.append(("engine" if entry.ttft_ms is None else "answer", entry.latency_ms))
    found, start = [], 0
    for name, end in ends:
        # Times are rounded one by one, so a step could end before its start.
        end = min(max(start, end), entry.latency_ms)
        found.append(Step(name, start, end))
        start = end
    return found


def read_id(request_or_answer_id: str) -> str:
    """Return the request's id, given it or the answer's id. Raises BadRequest."""
    match = _ID.fullmatch(request_or_answer_id)
    if match is None:
        expected = "a request's id (req_...) or an answer's (chatcmpl-... or cmpl-...)"
        raise BadRequest(f"id: expected {expected}.", param="id")
    return f"req_{match[1]}"


def _tables(criteria: LogFilter) -> list[Table]:
    """Return the tables that can have such entries."""
    admitted = criteria.statuses is None or any(status != NOT_ADMITTED for status in criteria.statuses)
    refused = criteria.statuses is None or NOT_ADMITTED in criteria.statuses
    refused = refused and criteria.engine is None and criteria.version is None
    return [*([usage] if admitted else ()), *([refused_requests] if refused else ())]


async def _search(
    connection: AsyncConnection, table: Table, criteria: LogFilter, start: Position | None, limit: int
) -> _Found:
    """Return the first entries of a table after a position, at least one more than `limit` if there are."""
    at, dialect = TIMES[table].name, connection.dialect.name
    index = [*(column.name for column, _ in _owners(table, criteria)[:1]), at]
    bounds = _bounds(table, criteria, start, dialect)
    if not _conditions(table.c, criteria):
        query = select(table).where(*bounds, *_behind(table.c, at, start))
        rows = (await connection.execute(query.order_by(*_newest(table, *index, "request_id")).limit(limit + 1))).all()
        return _Found([_entry(table, row) for row in rows], None)
    oldest = select(table.c[at]).where(*bounds).order_by(*_newest(table, *index))
    horizon = (await connection.execute(oldest.offset(SCANNED - 1).limit(1))).scalar_one_or_none()
    within = bounds if horizon is None else _bounds(table, criteria, start, dialect, horizon)
    # Further rows may have the time of the horizon.
    read = in_order(dialect, select(table).where(*within), _newest(table, *index), 2 * SCANNED)
    query = select(read).where(*_behind(read.c, at, start), *_conditions(read.c, criteria))
    rows = (await connection.execute(query.order_by(*_newest(read, *index, "request_id")).limit(limit + 1))).all()
    entries = [_entry(table, row) for row in rows]
    if horizon is None or len(entries) > limit:
        return _Found(entries, None)
    # The empty id is below all ids, because the rows of that time have been read.
    return _Found(entries, (horizon, ""))


def _newest(rows: FromClause, *columns: str) -> list[ColumnElement[Any]]:
    """Return the descending order of columns."""
    return [rows.c[name].desc() for name in columns]


def _owners(table: Table, criteria: LogFilter) -> list[tuple[ColumnElement[str], str]]:
    """Return the columns of the tenant and their values."""
    found = ((table.c.tenant_id, criteria.tenant_id), (table.c.tenant, criteria.tenant))
    return [(column, value) for column, value in found if value is not None]


def _bounds(
    table: Table, criteria: LogFilter, start: Position | None, dialect: str, horizon: datetime | None = None
) -> list[ColumnElement[bool]]:
    """Return the conditions that an index serves: the tenant and the time. horizon: time of the oldest row to read."""
    at, owners = TIMES[table], _owners(table, criteria)
    since = max((moment for moment in (criteria.since, horizon) if moment is not None), default=None)
    until = min((moment for moment in (criteria.until, start and start[0]) if moment is not None), default=None)
    found = [column == value for column, value in owners[1:]]
    if owners:
        found += owned(dialect, *owners[0], at, since, until)
    else:
        found += [*([] if since is None else [at >= since]), *([] if until is None else [at <= until])]
    if until is not None and (until == criteria.until or (start and not start[1])):
        found.append(at < until)
    return found


def _behind(columns: Columns, at: str, start: Position | None) -> list[ColumnElement[bool]]:
    """Return the condition for rows behind a position of its very time. at: the name of the time's column."""
    if start is None or not start[1]:
        return []
    return [or_(columns[at] < start[0], columns.request_id < start[1])]


def _conditions(columns: Columns, criteria: LogFilter) -> list[ColumnElement[bool]]:
    """Return the conditions without an index. columns: the columns of either table."""
    of_usage = "error_code" in columns
    values = {"key_id": criteria.key_id, "model": criteria.model, "end_user": criteria.end_user}
    values["error_code" if of_usage else "code"] = criteria.code
    values["limit_name"] = criteria.limit_name
    values |= {"engine": criteria.engine} if of_usage else {}
    found = [columns[name] == value for name, value in values.items() if value is not None]
    if criteria.version is not None:
        found.append(columns.version == criteria.version)
    if criteria.models is not None:
        found.append(columns.model.in_(criteria.models))
    if criteria.statuses is not None and of_usage:
        found.append(columns.status.in_(criteria.statuses))
    if criteria.min_latency_ms is not None:
        found.append(columns.latency_ms >= criteria.min_latency_ms)
    return found


def _entry(table: Table, row: Any) -> LogEntry:
    values = dict(row._mapping)
    if table is usage:
        endpoint = str(values.pop("endpoint"))
        at, code = values.pop("created_at"), values.pop("error_code")
        ended_by = values.pop("limit_name")
        return LogEntry(**values, at=at, route=ROUTES.get(endpoint, endpoint), code=code, ended_by=ended_by)
    names = ("limit_name", "limit_owner", "limit_value", "needed", "remaining", "retry_after")
    amounts = [values.pop(name) for name in names]
    limit = None
    if amounts[0] is not None:
        limit = Exceeded(**dict(zip(Exceeded.__struct_fields__, amounts, strict=True)))
    values.pop("method")
    return LogEntry(**values | {"status": NOT_ADMITTED, "http_status": values["status"], "limit": limit})


async def _labels(connection: AsyncConnection, entries: Sequence[LogEntry]) -> dict[str, str]:
    """Return the labels of the entries' keys by id."""
    ids = {entry.key_id for entry in entries}
    if not ids:
        return {}
    rows = await connection.execute(select(api_keys.c.id, api_keys.c.label).where(api_keys.c.id.in_(sorted(ids))))
    return {row.id: row.label for row in rows}


def _place(entry: LogEntry) -> Position:
    return entry.at, entry.request_id


def _position(cursor: str) -> Position:
    """Read a cursor. Raises BadRequest."""
    try:
        at, request_id = decode_cursor(cursor, Position)
        check_moment(at)
        if not request_id.isprintable():
            raise ValueError
    except ValueError as error:
        raise BadRequest("after: expected the `next` of another page.", param="after") from error
    return at, request_id
