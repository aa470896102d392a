"""Usage reports: sums of the ledger's rows over any period, from daily and hourly sums wherever these fit."""

from collections.abc import AsyncGenerator, Sequence
from datetime import datetime
from typing import Annotated, Any

import msgspec
from sqlalchemy import (
    CTE,
    ColumnElement,
    FromClause,
    Subquery,
    literal,
    select,
    true,
    tuple_,
)

from gateway.errors import BadRequest
from gateway.records.cursors import check_moment, decode_cursor, encode_cursor
from gateway.records.sql.database import Database
from gateway.records.sql.sums import int_sum
from gateway.records.sql.tables import api_keys, tenants, usage, usage_daily
from gateway.records.usage.end_user_sums import EndUserSums
from gateway.records.usage.rows import BY_ROWS, Moment, UsageFilter, rows_of
from gateway.records.usage.tenant_sums import PERIODS, SUMMED
from gateway.usage_row import UsageRow
from wire.model_names import MAX_VERSION

# Fields by which a report can group. Each report also groups by tenant.
GROUPS = ("tenant", "model", "version", "key", "end_user", "hour", "day", "month")
_AnyVersion = Annotated[int, msgspec.Meta(ge=0, le=MAX_VERSION)]


class UsageSums(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sums of one tenant and group. Fields that the report does not group by are absent from JSON.

    version: the version of the adapter `model`; absent for the base model and for mixtures. end_user: absent for
    requests without. key: the label of the key `key_id`, if the key still exists. hour, day, month: its start, UTC.
    cost: micro-units. deleted: whether the tenant is deleted.
    """

    tenant: str
    model: str | None = None
    version: int | None = None
    key_id: str | None = None
    key: str | None = None
    end_user: str | None = None
    hour: datetime | None = None
    day: datetime | None = None
    month: datetime | None = None
    requests: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cost: int
    deleted: bool = False


class UsagePage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of groups, the sums over all groups, and the cursor of the next page, None after the last page."""

    groups: list[UsageSums]
    total: dict[str, int]
    next: str | None


class UsageReport:
    """Queries of usage. Raises Unavailable while the database is away."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._end_users = EndUserSums(database)

    async def sums(self, group_by: Sequence[str] = ("model",), **criteria: Any) -> list[UsageSums]:
        """Return all groups at once; see `page`. Give a limit for "model", whose number of groups tenants decide."""
        return (await self.page(group_by, **criteria)).groups

    async def page(
        self,
        group_by: Sequence[str] = ("model",),
        *,
        tenant_id: str | None = None,
        tenant: str | None = None,
        models: Sequence[str] | None = None,
        since: Moment = None,
        until: Moment = None,
        after: str | None = None,
        limit: int | None = None,
    ) -> UsagePage:
        """Return sums of the requests that arrived in `[since, until)`, grouped and ordered by tenant and `group_by`.

        group_by: names in GROUPS; `version` includes `model`, and both it and `end_user` need `since`. tenant: by name
        instead of by id, which also finds deleted tenants of that name. models: only these. after: the previous page's
        `next`. limit: the most groups of a page. Raises BadRequest for a cursor of another report, and for versions or
        end users in a period that is too long or, with `tenant_id`, has too many requests.
        """
        criteria = UsageFilter(tenant_id=tenant_id, tenant=tenant, models=models)
        criteria, summed, _ = await self._end_users.summed(group_by, criteria, since, until)
        if BY_ROWS & set(group_by) and tenant_id is not None and since is not None:
            (await self._end_users.reads(criteria, since, until, summed)).check()
        every = rows_of(self._database.dialect, group_by, criteria, since, until, summed=summed)
        if every is None:
            return UsagePage(groups=[], total=dict.fromkeys(SUMMED, 0), next=None)
        grouped, order = _grouped(every, group_by)
        found = select(grouped).order_by(*order)
        if after is not None:
            found = found.where(tuple_(*order) > tuple_(*_position(after, order)))
        if limit is not None:
            found = found.limit(limit + 1)
        groups, total = found.subquery(), select(*(int_sum(grouped.c[name]).label(name) for name in SUMMED)).subquery()
        totals = [total.c[name].label(f"total_{name}") for name in SUMMED]
        # A single statement sees a row that is being written in `usage` and in the sums, or in neither.
        query = select(*totals, groups).join_from(total, groups, true(), isouter=True)
        query = query.order_by(*(groups.c[column.name] for column in order))
        async with self._database.read() as connection:
            rows = (await connection.execute(query)).all()
        return _page(rows, [column.name for column in grouped.c], [column.name for column in order], limit)

    async def stream(
        self, group_by: Sequence[str], criteria: UsageFilter, since: Moment, until: Moment, at_once: int
    ) -> AsyncGenerator[list[UsageSums]]:
        """Yield all groups, `at_once` at a time, from a single statement, so that all sums are of one moment.

        A connection is in use until the last group. Raises BadRequest like `page`.
        """
        criteria, summed, _ = await self._end_users.summed(group_by, criteria, since, until)
        every = rows_of(self._database.dialect, group_by, criteria, since, until, summed=summed)
        if every is None:
            return
        grouped, order = _grouped(every, group_by)
        columns = [column.name for column in grouped.c]
        async with self._database.read() as connection:
            query = select(grouped).order_by(*order).execution_options(yield_per=at_once)
            async for rows in (await connection.stream(query)).partitions(at_once):
                yield [_sums(dict(zip(columns, row, strict=True))) for row in rows]

    async def stream_rows(
        self, criteria: UsageFilter, since: Moment, until: Moment, at_once: int
    ) -> AsyncGenerator[list[dict[str, Any]]]:
        """Yield the ledger's rows of `[since, until)`, the oldest first, `at_once` at a time, as of one moment.

        A connection is in use until the last row.
        """
        query = criteria.narrow(select(usage)).order_by(usage.c.created_at, usage.c.request_id)
        if since is not None:
            query = query.where(usage.c.created_at >= since)
        if until is not None:
            query = query.where(usage.c.created_at < until)
        async with self._database.read() as connection:
            found = await connection.stream(query.execution_options(yield_per=at_once))
            async for rows in found.partitions(at_once):
                yield [dict(row._mapping) for row in rows]

    async def knows(self, tenant: str) -> bool:
        """Return whether a tenant of this name, deleted or not, has any usage."""
        async with self._database.read() as connection:
            query = select(usage_daily.c.tenant).where(usage_daily.c.tenant == tenant).limit(1)
            return (await connection.execute(query)).first() is not None

    async def recent(self, tenant_id: str | None = None, limit: int = 50) -> list[UsageRow]:
        """Return the newest rows, newest first."""
        query = select(usage).order_by(usage.c.created_at.desc(), usage.c.request_id).limit(limit)
        if tenant_id is not None:
            query = query.where(usage.c.tenant_id == tenant_id)
        async with self._database.read() as connection:
            rows = (await connection.execute(query)).all()
        return [UsageRow(**row._mapping) for row in rows]


def _grouped(every: Subquery, group_by: Sequence[str]) -> tuple[CTE, list[ColumnElement[Any]]]:
    """Return the groups and the columns that order them. The values of these columns are a group's position."""
    keys: list[ColumnElement[Any]] = [every.c.tenant]
    source: FromClause = every.outerjoin(tenants, tenants.c.id == every.c.tenant_id)
    keys += [every.c[name] for name in reversed(PERIODS) if name in group_by]
    if "model" in group_by or "version" in group_by:
        keys.append(every.c.model)
    if "version" in group_by:
        keys.append(every.c.version)
    if "key" in group_by:
        keys.append(every.c.key_id)
    if "end_user" in group_by:
        keys.append(every.c.end_user)
    # Last in the order: it distinguishes an existing tenant from a deleted one of the same name.
    keys.append(tenants.c.id.is_(None).label("deleted"))
    names = [key.name for key in keys]
    if "key" in group_by:
        source = source.outerjoin(api_keys, api_keys.c.id == every.c.key_id)
        keys.append(api_keys.c.label.label("key"))
    sums = (int_sum(every.c[name]).label(name) for name in SUMMED)
    grouped = select(*keys, *sums).select_from(source).group_by(*keys).cte("grouped")
    return grouped, [grouped.c[name] for name in names]


def _page(rows: Sequence[Any], columns: Sequence[str], order: Sequence[str], limit: int | None) -> UsagePage:
    """Read the rows of a page, each of which has the total before its group's own columns."""
    total = dict(zip(SUMMED, rows[0], strict=False))
    own = len(SUMMED)
    found = [dict(zip(columns, row[own:], strict=True)) for row in rows[:limit] if row[own] is not None]
    groups = [_sums(values) for values in found]
    last = None if limit is None or len(rows) <= limit else rows[limit - 1]
    return UsagePage(groups=groups, total=total, next=None if last is None else _cursor(last, order))


def _sums(values: dict[str, Any]) -> UsageSums:
    return UsageSums(**values | {name: values.get(name) or None for name in ("version", "end_user")})


def _cursor(row: Any, order: Sequence[str]) -> str:
    """Return a group's position as a cursor, opaque to clients."""
    return encode_cursor([row._mapping[name] for name in order])


def _position(cursor: str, order: Sequence[ColumnElement[Any]]) -> list[ColumnElement[Any]]:
    """Read a cursor for these columns. Raises BadRequest."""
    known = {**dict.fromkeys(PERIODS, datetime), "deleted": bool, "version": _AnyVersion}
    types = tuple(known.get(column.name, str) for column in order)
    try:
        values = decode_cursor(cursor, tuple.__class_getitem__(types))
        for value in values:
            if isinstance(value, datetime):
                check_moment(value)
    except ValueError as error:
        raise BadRequest("after: expected the `next` of an answer with the same group_by.", param="after") from error
    if any(isinstance(value, str) and not value.isprintable() for value in values):
        # Databases refuse a NUL in a text.
        raise BadRequest("after: expected the `next` of an answer with the same group_by.", param="after")
    return [literal(value, column.type) for value, column in zip(values, order, strict=True)]
