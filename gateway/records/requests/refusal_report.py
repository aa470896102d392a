"""Refused requests of a period by tenant, limit and code: exact counts, their curve, and evidence from single rows."""

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NamedTuple

import msgspec
from sqlalchemy import ColumnElement, Subquery, and_, case, func, or_, select, union_all
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.errors import RateLimited
from gateway.records.periods import DAY, HOUR, MINUTE, Period, Segments, cover, moment, whole_period
from gateway.records.requests.refusal_tables import refusal_counts, refused_requests
from gateway.records.requests.refused import ALL_TENANTS
from gateway.records.sql.database import Database
from gateway.records.sql.sums import int_sum
from gateway.records.sql.tables import usage

LIMITED = 429
# Maximum rows of a report, and of the evidence for one cause.
MAX_CAUSES, MAX_EVIDENCE = 1000, 2000
# Number of causes with evidence, and of curves beside "others".
EXPLAINED, CURVES = 5, 8
# Limits of one cause with evidence: a limit's value may change often.
EXPLAINED_LIMITS = 10
OTHERS = "*"
# Limits for the comparison of reserved with settled tokens: its period, and the number of its newest rows.
RESERVED_HOURS, NEWEST = 24, 20_000

# "cut": a limit had no room for the rest of a running answer. "failed": the request failed otherwise after admission.
Outcome = Literal["refused", "cut", "failed"]
GroupBy = Literal["limit", "tenant", "code"]
GROUPS: tuple[GroupBy, ...] = ("limit", "tenant", "code")


class RefusalFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Refusals of a report; None: any.

    status: HTTP status, 0 for requests that failed after their admission. with_cut: whether LIMITED includes answers
    that a limit cut, whose status is 0.
    """

    tenant: str | None = None
    code: str | None = None
    limit_name: str | None = None
    status: int | None = LIMITED
    with_cut: bool = True


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a cause's recorded rows; if a limit is the cause, of those by one owner's limit with one value.

    rows: their number. needed, remaining: averages. longest_wait: the longest Retry-After, in seconds. The last five
    are None without a limit.
    """

    rows: int
    first: datetime
    last: datetime
    owner: str | None
    value: int | None
    needed: float | None
    remaining: float | None
    longest_wait: int | None


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """Number of a tenant's refusals by a limit, or with a code if there is none.

    tenant: "" for requests without a verified key. status: 0 for requests that failed after their admission. peak: the
    step with most refusals, and their number there. evidence: for the first causes, the figures of each limit of this
    name (the tenant's, a key's, another value of it), the one with most rows first.
    """

    tenant_id: str
    tenant: str
    code: str
    status: int
    limit_name: str
    requests: int
    outcome: Outcome
    peak: tuple[datetime, int] | None = None
    evidence: list[Evidence] = []


class RefusalSums(msgspec.Struct, frozen=True, kw_only=True):
    """Refusals of `[since, until)`, in whole minutes or hours.

    curves: as many values as `starts` by the names of the grouping, the greatest first; OTHERS for the others. before:
    the number in the period before.
    """

    since: datetime
    until: datetime
    step: int
    starts: list[datetime]
    total: int
    before: int
    causes: list[Cause]
    curves: dict[str, list[int]]


class Refused(NamedTuple):
    """Requests that a limit refused. tenants: their names, the one with most refusals first."""

    limit_name: str
    requests: int
    tenants: list[str]


class Reserved(msgspec.Struct, frozen=True, kw_only=True):
    """Reserved and settled tokens of a tenant's admitted requests."""

    tenant: str
    requests: int
    reserved: int
    settled: int

    @property
    def unused(self) -> int:
        return max(0, self.reserved - self.settled)

    @property
    def unused_share(self) -> float:
        return self.unused / self.reserved if self.reserved else 0.0


class RefusalReport:
    """Queries of refusals. minutes_kept: how long sums by minute are kept. Raises Unavailable."""

    def __init__(self, database: Database, minutes_kept: timedelta = timedelta(hours=48)) -> None:
        self._database = database
        self._minutes_kept = minutes_kept

    async def sums(
        self, criteria: RefusalFilter, *, since: datetime, until: datetime, group_by: GroupBy = "limit"
    ) -> RefusalSums:
        """Return the refusals of a period. Raises BadRequest for a period that has not begun."""
        period = whole_period(since, until, None, self._minutes_kept, datetime.now(UTC))
        levels = [level for level in (DAY, HOUR, MINUTE) if period.step % level == 0]
        # The sums of the present hour and day reach up to now, so an open period takes them whole.
        steps = cover(period.since, -(-period.end // period.step) * period.step, levels)
        async with self._database.read() as connection:
            causes = await _causes(connection, criteria, cover(period.since, period.end))
            before = await _number(connection, criteria, cover(period.before, period.since))
            curves = await _curves(connection, criteria, steps, period, (group_by, causes))
            explained = [await _explain(connection, cause, steps, period) for cause in causes[:EXPLAINED]]
        return RefusalSums(
            since=moment(period.since),
            until=moment(period.until),
            step=period.step,
            starts=[moment(start) for start in period.starts],
            total=sum(cause.requests for cause in causes),
            before=before,
            causes=[*explained, *causes[EXPLAINED:]],
            curves=curves,
        )

    async def by_limit(self, since: datetime, until: datetime) -> list[Refused]:
        """Return the limits that refused tenants' requests in a period, the one that refused most first.

        Raises BadRequest for a period that has not begun.
        """
        period = whole_period(since, until, None, self._minutes_kept, datetime.now(UTC))
        async with self._database.read() as connection:
            causes = await _causes(connection, RefusalFilter(with_cut=False), cover(period.since, period.end))
        found: dict[str, dict[str, int]] = {}
        for cause in causes:
            if cause.tenant and cause.limit_name:
                of = found.setdefault(cause.limit_name, {})
                of[cause.tenant] = of.get(cause.tenant, 0) + cause.requests
        refused = [Refused(limit, sum(of.values()), list(of)) for limit, of in found.items()]
        return sorted(refused, key=lambda each: (-each.requests, each.limit_name))

    async def reserved(
        self, *, since: datetime, until: datetime, tenant: str | None = None, limit: int = 50
    ) -> list[Reserved]:
        """Return the tenants with most unused reservations.

        Only the newest NEWEST requests within the last RESERVED_HOURS of the period are counted.
        """
        start = max(since, until - timedelta(hours=RESERVED_HOURS))
        criteria = [usage.c.created_at >= start, usage.c.created_at < until]
        if tenant is not None:
            criteria.append(usage.c.tenant == tenant)
        tokens = (usage.c.prompt_tokens + usage.c.completion_tokens + usage.c.surcharge).label("settled")
        newest = select(usage.c.tenant, usage.c.reserved_tokens, tokens).where(*criteria)
        rows = newest.order_by(usage.c.created_at.desc()).limit(NEWEST).subquery()
        reserved, used = int_sum(rows.c.reserved_tokens), int_sum(rows.c.settled)
        query = (
            select(
                rows.c.tenant,
                func.count().label("requests"),
                reserved.label("reserved"),
                used.label("settled"),
            )
            .where(rows.c.reserved_tokens.is_not(None))
            .group_by(rows.c.tenant)
            .order_by((reserved - used).desc(), rows.c.tenant)
            .limit(limit)
        )
        async with self._database.read() as connection:
            return [Reserved(**row._mapping) for row in await connection.execute(query)]


def _rows(criteria: RefusalFilter, segments: Segments, tenant_id: str | None = None) -> Subquery:
    """Return the counts of the segments. tenant_id: the counted tenant; ALL_TENANTS for the sums over all tenants."""
    table = refusal_counts
    columns = (table.c.start, table.c.tenant_id, table.c.tenant, table.c.code, table.c.status, table.c.limit_name)
    parts = []
    for level, start, end in segments:
        query = select(*columns, table.c.requests).where(
            table.c.level == level,
            table.c.start >= start,
            table.c.start < end,
            table.c.tenant_id != ALL_TENANTS if tenant_id is None else table.c.tenant_id == tenant_id,
        )
        for name in ("tenant", "code", "limit_name"):
            if (value := getattr(criteria, name)) is not None:
                query = query.where(table.c[name] == value)
        if criteria.status is not None:
            query = query.where(_has_status(criteria, criteria.status))
        parts.append(query)
    return union_all(*parts).subquery()


def _has_status(criteria: RefusalFilter, status: int) -> ColumnElement[bool]:
    has_status = refusal_counts.c.status == status
    if status != LIMITED or not criteria.with_cut:
        return has_status
    return or_(has_status, and_(refusal_counts.c.status == 0, refusal_counts.c.code == RateLimited.code))


def _all_tenants(criteria: RefusalFilter) -> str | None:
    """Return the id under which the sums over all tenants are stored, if the filter is about all of them."""
    return ALL_TENANTS if criteria.tenant is None else None


async def _causes(connection: AsyncConnection, criteria: RefusalFilter, segments: Segments) -> list[Cause]:
    if not segments:
        return []
    rows = _rows(criteria, segments)
    keys = [rows.c[name] for name in ("tenant_id", "tenant", "code", "status", "limit_name")]
    number = int_sum(rows.c.requests).label("requests")
    query = select(*keys, number).group_by(*keys).order_by(number.desc(), *keys).limit(MAX_CAUSES)
    return [Cause(**row._mapping, outcome=_outcome(row)) for row in await connection.execute(query)]


def _outcome(row: Any) -> Outcome:
    if row.status:
        return "refused"
    return "cut" if row.code == RateLimited.code else "failed"


async def _number(connection: AsyncConnection, criteria: RefusalFilter, segments: Segments) -> int:
    if not segments:
        return 0
    rows = _rows(criteria, segments, _all_tenants(criteria))
    return int((await connection.execute(select(int_sum(rows.c.requests)))).scalar_one())


async def _curves(
    connection: AsyncConnection,
    criteria: RefusalFilter,
    segments: Segments,
    period: Period,
    ranked: tuple[GroupBy, Sequence[Cause]],
) -> dict[str, list[int]]:
    """Return the curves of the CURVES greatest groups of the causes, and of all others together as OTHERS."""
    if not segments:
        return {}
    group_by, causes = ranked
    rows = _rows(criteria, segments, None if group_by == "tenant" else _all_tenants(criteria))
    # A refusal without a limit is grouped by its code.
    by_limit = case((rows.c.limit_name == "", rows.c.code), else_=rows.c.limit_name)
    name = {"limit": by_limit, "tenant": rows.c.tenant, "code": rows.c.code}[group_by]
    sizes: Counter[str] = Counter()
    for cause in causes:
        known = {"limit": cause.limit_name or cause.code, "tenant": cause.tenant, "code": cause.code}
        sizes[known[group_by]] += cause.requests
    first = [group for group, _ in sorted(sizes.items(), key=lambda item: (-item[1], item[0]))[:CURVES]]
    shown = case((name.in_(first), name), else_=OTHERS).label("name")
    at = (rows.c.start - rows.c.start % period.step).label("at")
    found: dict[str, dict[int, int]] = {group: {} for group in first}
    for group, start, number in await connection.execute(
        select(shown, at, int_sum(rows.c.requests)).group_by(shown, at)
    ):
        found.setdefault(group, {})[start] = number
    return {group: [values.get(start, 0) for start in period.starts] for group, values in found.items()}


async def _explain(connection: AsyncConnection, cause: Cause, segments: Segments, period: Period) -> Cause:
    """Return the cause with its peak, and with the figures of its newest rows in the period."""
    names = {name: getattr(cause, name) for name in ("tenant", "code", "limit_name", "status")}
    same = RefusalFilter(**names, with_cut=False)
    counts = _rows(same, segments, cause.tenant_id)
    at = (counts.c.start - counts.c.start % period.step).label("at")
    number = int_sum(counts.c.requests)
    highest = await connection.execute(select(at, number).group_by(at).order_by(number.desc(), at).limit(1))
    peak = highest.first()
    table = refused_requests
    newest = (
        select(table)
        .where(*_same_rows(cause), table.c.at >= moment(period.since), table.c.at < moment(period.end))
        .order_by(table.c.at.desc())
        .limit(MAX_EVIDENCE)
        .subquery()
    )
    figures = (
        func.count().label("rows"),
        func.min(newest.c.at).label("first"),
        func.max(newest.c.at).label("last"),
        newest.c.limit_owner.label("owner"),
        newest.c.limit_value.label("value"),
        func.avg(newest.c.needed).label("needed"),
        func.avg(newest.c.remaining).label("remaining"),
        func.max(newest.c.retry_after).label("longest_wait"),
    )
    limits = (newest.c.limit_owner, newest.c.limit_value)
    order = (func.count().desc(), *limits)
    rows = await connection.execute(select(*figures).group_by(*limits).order_by(*order).limit(EXPLAINED_LIMITS))
    evidence = [_evidence(row._mapping) for row in rows]
    found = None if peak is None else (moment(peak[0]), int(peak[1]))
    return msgspec.structs.replace(cause, peak=found, evidence=evidence)


def _evidence(row: Mapping[Any, Any]) -> Evidence:
    values = dict(row)
    for name in ("needed", "remaining"):
        # PostgreSQL's average of bigints is a numeric.
        values[name] = None if values[name] is None else float(values[name])
    return Evidence(**values)


def _same_rows(cause: Cause) -> Sequence[ColumnElement[bool]]:
    table = refused_requests
    limit = table.c.limit_name
    return (
        table.c.tenant_id == cause.tenant_id,
        table.c.code == cause.code,
        table.c.status == cause.status,
        limit.is_(None) if not cause.limit_name else limit == cause.limit_name,
    )
