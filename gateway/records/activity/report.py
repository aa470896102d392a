"""Activity of a period for charts: sums, percentiles and curves of requests, by tenant, model or engine.

Every query reads the sums by minute, hour and day (`tables.py`) in the longest periods that fit, so its cost
depends on the length of the period and the number of series, not on the number of requests.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import msgspec
from sqlalchemy import BigInteger, ColumnElement, Subquery, and_, func, literal_column, or_, select, union, union_all
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.errors import BadRequest
from gateway.process.page_threads import in_page_thread
from gateway.records.activity.figures import (
    COLUMNS,
    SHOWN,
    ActivityReport,
    Group,
    Refusals,
    Values,
    added,
    as_curve,
    as_sums,
    as_times,
    rest_of,
)
from gateway.records.activity.tables import ACTIVITY, BASE, ENGINE, MODEL, OWN_BASE, TENANT, activity_series, aggregate
from gateway.records.concurrent_reads import together
from gateway.records.periods import DAY, HOUR, MINUTE, Period, Segments, cover, moment, whole_period
from gateway.records.requests.refusal_tables import refusal_counts
from gateway.records.requests.refused import ALL_TENANTS
from gateway.records.sql.database import Database
from gateway.records.sql.tables import tenants

MAX_GROUPS = 50
# Name of the subqueries with the rows of a period.
ROWS = "covered"
# Tenants whose models are ranked, for each model to find.
OWNERS_EACH = 4

GroupBy = Literal["tenant", "model", "engine"]
Order = Literal["requests", "tokens", "cost"]
GROUPS: tuple[GroupBy, ...] = ("tenant", "model", "engine")
ORDERS: tuple[Order, ...] = ("requests", "tokens", "cost")


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that a report is about; None: all. tenant: by name, also of a deleted tenant, or by id."""

    tenant: str | None = None
    tenant_id: str | None = None
    model: str | None = None
    engine: str | None = None

    @property
    def of_tenant(self) -> bool:
        return self.tenant is not None or self.tenant_id is not None


class Activity:
    """Queries of activity. minutes_kept: how long minute sums are kept. Raises Unavailable without the database."""

    def __init__(self, database: Database, minutes_kept: timedelta = timedelta(hours=48)) -> None:
        self._database = database
        self._minutes_kept = minutes_kept

    async def report(
        self,
        *,
        since: datetime,
        until: datetime | None = None,
        scope: Scope = Scope(),  # noqa: B008  (frozen)
        group_by: GroupBy | None = None,
        order: Order = "requests",
        top: int = 8,
        step: int | None = None,
        has_times: bool = True,
    ) -> ActivityReport:
        """Return the activity of a period. until: None for now. top: number of groups. step: one of STEPS; None chooses
        it. has_times: whether to read percentiles, whose histograms are four fifths of the columns.

        The totals and the groups are read at the same time, half of the work each, in two transactions that begin at
        different times. Requests that are recorded meanwhile may be in one of them only.
        Raises BadRequest for a step that has too many points or no sums, and for a grouping without sums.
        """
        period = whole_period(since, until, step, self._minutes_kept, datetime.now(UTC))
        _check_groups(scope, group_by)
        levels = [level for level in (DAY, HOUR, MINUTE) if period.step % level == 0]
        curve_of = cover(period.since, period.end, levels)
        whole, before = cover(period.since, period.end), cover(period.before, period.since)
        segments, names = (curve_of, whole, before), COLUMNS if has_times else SHOWN

        async def totals() -> tuple[dict[int, Values], dict[int, Values], list[Refusals]]:
            async with self._database.read() as connection:
                kept = await _kept(connection, scope)
                by_step = await _by_step(connection, kept, curve_of, period.step, names)
                earlier = await _by_step(connection, kept, before, DAY, names)
                return by_step, earlier, await _refusals(connection, scope, segments, period)

        async def grouped() -> tuple[_Ranked, list[Group], int]:
            async with self._database.read() as connection:
                ranked = _Ranked([], 0, None)
                if group_by is not None:
                    members = await _grouped(connection, scope, group_by)
                    ranked = await _first(connection, members, whole, order, top)
                groups = await _groups(connection, ranked.ids, segments, period) if ranked.ids else []
                active = 1 if scope.of_tenant else ranked.tenants
                return ranked, groups, await _active(connection, whole) if active is None else active

        (by_step, earlier, refusals), (ranked, groups, active) = await together(totals(), grouped())
        # Hundreds of steps with sixty sums each take 10 ms.
        return await in_page_thread(_report, period, by_step, earlier, ranked, groups, active, refusals)

    async def cost_of_day(self, day: datetime) -> int:
        """Return the cost of all requests of the UTC day that begins at `day`, in micro-units."""
        start = int(day.timestamp())
        rows = _Kept((ENGINE,)).select([(DAY, start, start + DAY)], ("cost",))
        async with self._database.read() as connection:
            return int((await connection.execute(select(*_totals(("cost",))).select_from(rows))).scalar_one())


def _report(
    period: Period,
    by_step: Mapping[int, Values],
    earlier: Mapping[int, Values],
    ranked: "_Ranked",
    groups: list[Group],
    active: int,
    refusals: list[Refusals],
) -> ActivityReport:
    """Return the report of what was read. by_step: sums by step; earlier: those of the period before, by day."""
    curve = as_curve(period.starts, by_step)
    shown = rest_of(curve, [group.curve for group in groups]) if ranked.number != len(groups) else None
    return ActivityReport(
        since=moment(period.since),
        until=moment(period.until),
        before_since=moment(period.before),
        step=period.step,
        starts=[moment(start) for start in period.starts],
        total=as_sums(added(by_step.values())),
        before=as_sums(added(earlier.values())),
        curve=curve,
        times=as_times(period.starts, by_step),
        groups=groups,
        others=shown,
        num_groups=ranked.number,
        active_tenants=active,
        refusals=refusals,
    )


_SUMMED = {name: f"{aggregate(name)}({name}) AS {name}" for name in COLUMNS}


class _Kept(msgspec.Struct, frozen=True):
    """Series to read: all of some kinds, or those of these ids."""

    kinds: Sequence[int] = ()
    ids: Sequence[int] | None = None

    def select(self, segments: Segments, names: Sequence[str], *, by_start: bool = False) -> Subquery:
        """Return the sums of the segments with these columns, beside `start` and `series_id`, as the subquery ROWS.

        by_start: return one row for each start, with the sums of all series, without `series_id`.
        """
        parts = []
        for level, start, end in segments:
            table = ACTIVITY[level]
            # Series of known ids are read by the index of ids, all series of a kind by the primary key. The sums of a
            # single kind are in the order of their starts, by which SQLite then groups without sorting.
            which: ColumnElement[bool]
            if self.ids is not None:
                which = table.c.series_id.in_(self.ids)
            else:
                which = or_(*(table.c.kind == kind for kind in self.kinds))
            columns: list[ColumnElement[Any]] = [table.c.start, *([] if by_start else [table.c.series_id])]
            if names:
                # A single text is built and compiled much faster than sixty columns.
                columns.append(literal_column(", ".join(_SUMMED[name] if by_start else name for name in names)))
            part = select(*columns).where(which, table.c.start >= start, table.c.start < end)
            parts.append(part.group_by(table.c.start) if by_start else part)
        return union_all(*parts).subquery(ROWS)


class _Ranked(msgspec.Struct, frozen=True):
    """Ids of the first series, and the number of series with requests; None if not all were looked at.

    tenants: the number of tenants with requests, None if it is not known.
    """

    ids: Sequence[int]
    number: int | None
    tenants: int | None


async def _find(connection: AsyncConnection, *which: ColumnElement[bool]) -> list[int]:
    return list((await connection.execute(select(activity_series.c.id).where(*which))).scalars())


def _of_tenant(scope: Scope) -> list[ColumnElement[bool]]:
    columns = activity_series.c
    by_name = [] if scope.tenant is None else [columns.tenant == scope.tenant]
    return by_name if scope.tenant_id is None else [*by_name, columns.tenant_id == scope.tenant_id]


async def _kept(connection: AsyncConnection, scope: Scope) -> _Kept:
    """Return the series whose sum is the scope's."""
    columns = activity_series.c
    if scope.engine is not None:
        return _Kept(ids=await _find(connection, columns.kind == ENGINE, columns.name == scope.engine))
    if scope.model is not None:
        kinds = (MODEL, OWN_BASE) if scope.of_tenant else (MODEL, BASE)
        which = (*_of_tenant(scope), columns.kind.in_(kinds), columns.name == scope.model)
        return _Kept(ids=await _find(connection, *which))
    if scope.of_tenant:
        return _Kept(ids=await _find(connection, columns.kind == TENANT, *_of_tenant(scope)))
    return _Kept((ENGINE,))


def _check_groups(scope: Scope, group_by: GroupBy | None) -> None:
    """Raise BadRequest if there are no sums of such groups."""
    if group_by is None:
        return
    if scope.engine is not None or (group_by == "engine" and (scope.of_tenant or scope.model is not None)):
        raise BadRequest("group_by: there are no sums by engine and by tenant or model together.", param="group_by")


async def _grouped(connection: AsyncConnection, scope: Scope, group_by: GroupBy) -> _Kept:
    """Return the series that are the groups of the scope."""
    columns = activity_series.c
    if group_by == "engine":
        return _Kept((ENGINE,))
    if scope.model is not None:
        which = (*_of_tenant(scope), columns.kind.in_((MODEL, OWN_BASE)), columns.name == scope.model)
        return _Kept(ids=await _find(connection, *which))
    if group_by == "tenant":
        return await _kept(connection, scope) if scope.of_tenant else _Kept((TENANT,))
    if scope.of_tenant:
        return _Kept(ids=await _find(connection, columns.kind.in_((MODEL, OWN_BASE)), *_of_tenant(scope)))
    return _Kept((MODEL, BASE))


# Sums as `int_sum` makes them, of the subqueries ROWS. Made once: sixty sums take 10 ms of the event loop to build.
_SUMS = {
    name: literal_column(f"CAST(coalesce({aggregate(name)}({ROWS}.{name}), 0) AS BIGINT)", BigInteger).label(name)
    for name in (*COLUMNS, "requests")
}


def _totals(names: Sequence[str]) -> list[ColumnElement[Any]]:
    """Return the sums of columns of the subquery ROWS."""
    return [_SUMS[name] for name in names]


async def _by_step(
    connection: AsyncConnection, kept: _Kept, segments: Segments, step: int, names: Sequence[str]
) -> dict[int, Values]:
    """Return the sums of each step that has any. names: the columns."""
    # The rows of a start are next to each other, so that only their sums are sorted by step.
    rows = kept.select(segments, names, by_start=True)
    at = (rows.c.start - rows.c.start % step).label("at")
    found = await connection.execute(select(at, *_totals(names)).group_by(at))
    return {row[0]: dict(zip(names, row[1:], strict=True)) for row in found}


async def _by_series(connection: AsyncConnection, kept: _Kept, segments: Segments) -> dict[int, Values]:
    """Return the sums of each series."""
    rows = kept.select(segments, COLUMNS)
    found = await connection.execute(select(rows.c.series_id, *_totals(COLUMNS)).group_by(rows.c.series_id))
    return {row[0]: dict(zip(COLUMNS, row[1:], strict=True)) for row in found}


async def _first(connection: AsyncConnection, kept: _Kept, segments: Segments, order: Order, top: int) -> _Ranked:
    """Return the first series.

    The models of all tenants are ranked among those of the first tenants, if no other tenant has more requests than the
    last model found: no model has more than its tenant.
    """
    num_tenants = None
    if MODEL in kept.kinds:
        owners, num_tenants = await _rank(connection, _Kept((TENANT,)), segments, order, OWNERS_EACH * top + 1)
        if num_tenants > OWNERS_EACH * top:
            columns = activity_series.c
            tenant_ids = select(columns.tenant_id).where(columns.id.in_([each for each, _ in owners[:-1]]))
            of_first = and_(columns.kind == MODEL, columns.tenant_id.in_(tenant_ids))
            # The ids are read first: for a subquery PostgreSQL would expect too many, and read all sums of days.
            ids = await _find(connection, or_(of_first, columns.kind == BASE))
            found, _ = await _rank(connection, _Kept(ids=ids), segments, order, top)
            if len(found) == top and owners[-1][1] <= found[-1][1]:
                return _Ranked([each for each, _ in found], None, num_tenants)
    found, number = await _rank(connection, kept, segments, order, top)
    return _Ranked([each for each, _ in found], number, number if TENANT in kept.kinds else num_tenants)


async def _rank(
    connection: AsyncConnection, kept: _Kept, segments: Segments, order: Order, top: int
) -> tuple[list[tuple[int, int]], int]:
    """Return the first series with their amounts, and the number of series with requests."""
    names = ("prompt_tokens", "completion_tokens") if order == "tokens" else (order,)
    rows = kept.select(segments, names)
    amount: ColumnElement[Any] = literal_column(" + ".join(f"sum({ROWS}.{name})" for name in names))
    query = select(rows.c.series_id, amount, func.count().over()).group_by(rows.c.series_id)
    found = (await connection.execute(query.order_by(amount.desc(), rows.c.series_id).limit(top))).all()
    return [(row[0], int(row[1])) for row in found], found[0][2] if found else 0


async def _groups(
    connection: AsyncConnection, ids: Sequence[int], segments: tuple[Segments, Segments, Segments], period: Period
) -> list[Group]:
    """Return the groups of these series. segments: those of the curve, of the whole period and of the period before."""
    columns = activity_series.c
    kept = _Kept(ids=ids)
    named = await connection.execute(select(activity_series).where(columns.id.in_(ids)))
    names = {row.id: row for row in named}
    whole = await _by_series(connection, kept, segments[1])
    before = await _by_series(connection, kept, segments[2])
    rows = kept.select(segments[0], SHOWN)
    at = (rows.c.start - rows.c.start % period.step).label("at")
    query = select(rows.c.series_id, at, *_totals(SHOWN)).group_by(rows.c.series_id, at)
    curves: dict[int, dict[int, Values]] = {series_id: {} for series_id in ids}
    for row in await connection.execute(query):
        curves[row[0]][row[1]] = dict(zip(SHOWN, row[2:], strict=True))
    groups = []
    for series_id in ids:
        if (series := names.get(series_id)) is not None:
            is_tenant = series.kind == TENANT
            groups.append(
                Group(
                    name=series.tenant if is_tenant else series.name,
                    tenant=None if is_tenant else series.tenant or None,
                    sums=as_sums(whole.get(series_id, {})),
                    before=as_sums(before.get(series_id, {})),
                    curve=as_curve(period.starts, curves[series_id]),
                )
            )
    return groups


async def _refusals(
    connection: AsyncConnection, scope: Scope, segments: tuple[Segments, Segments, Segments], period: Period
) -> list[Refusals]:
    """Return the failed requests by code, the most frequent first. There are no numbers by model or engine."""
    if scope.model is not None or scope.engine is not None:
        return []
    table = refusal_counts
    if scope.tenant_id is not None:
        tenant_ids = [scope.tenant_id]
    elif scope.tenant is not None:
        named = select(activity_series.c.tenant_id).where(activity_series.c.tenant == scope.tenant)
        known = select(tenants.c.id).where(tenants.c.name == scope.tenant)
        tenant_ids = list((await connection.execute(union(named, known))).scalars())
    else:
        tenant_ids = [ALL_TENANTS]

    def rows_of(covered: Segments) -> Subquery:
        columns = (table.c.start, table.c.code, table.c.status, table.c.limit_name, table.c.requests)
        parts = [
            select(*columns).where(
                *(table.c.tenant_id.in_(tenant_ids), table.c.level == level),
                *(table.c.start >= start, table.c.start < end),
            )
            for level, start, end in covered
        ]
        return union_all(*parts).subquery(ROWS)

    async def totals(covered: Segments, step: int) -> Iterable[Any]:
        rows = rows_of(covered)
        at = rows.c.start - rows.c.start % step
        keys = (rows.c.code, rows.c.status, rows.c.limit_name, at.label("at"))
        return await connection.execute(select(*keys, *_totals(("requests",))).group_by(*keys))

    curves: dict[tuple[str, int, str], dict[int, int]] = {}
    for code, status, limit, at, number in await totals(segments[0], period.step):
        curves.setdefault((code, status, limit), {})[at] = number
    earlier: Counter[tuple[str, int, str]] = Counter()
    for code, status, limit, _, number in await totals(segments[2], DAY):
        earlier[code, status, limit] += number
    found = [
        Refusals(
            code=key[0],
            status=key[1],
            limit=key[2],
            requests=sum(curves.get(key, {}).values()),
            before=earlier[key],
            curve=[curves.get(key, {}).get(start, 0) for start in period.starts],
        )
        for key in {**curves, **earlier}
    ]
    return sorted(found, key=lambda each: (-each.requests, -each.before, each.code))


async def _active(connection: AsyncConnection, segments: Segments) -> int:
    """Return the number of tenants with requests."""
    rows = _Kept((TENANT,)).select(segments, ())
    return int((await connection.execute(select(func.count(rows.c.series_id.distinct())))).scalar_one())
