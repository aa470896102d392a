"""Sums of usage by end user: which days have them, how much a report by end user or by version reads, and the tenants
whose end users may be the largest.
"""

from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import BigInteger, Select, case, func, literal, literal_column, null, select, union_all

from gateway.errors import BadRequest
from gateway.records.activity.tables import ACTIVITY, ENGINE
from gateway.records.concurrent_reads import together
from gateway.records.sql.database import Database
from gateway.records.sql.sums import int_sum
from gateway.records.sql.tables import usage, usage_daily, usage_hourly
from gateway.records.usage.end_user_tables import usage_end_user_days
from gateway.records.usage.rows import (
    DAY,
    HOUR,
    Moment,
    UsageFilter,
    can_sum_end_users,
    days_of,
    rows_of,
    whole_days,
)
from gateway.records.usage.tenant_sums import TenantSums

# Maximum number of requests and sums by end user that a report of a tenant reads. The database takes a few
# microseconds for each.
MAX_ROWS = 500_000
# Maximum number that a ranking of all tenants' end users reads, in how many at a time, and of how many tenants.
MAX_RANKED, RANKED_AT_ONCE, MAX_TENANTS = 300_000, 40_000, 2000
# Number of reads at the same time for the tenants that are read at once, each in a connection of its own.
READS_AT_ONCE = 2


class Reads(NamedTuple):
    """Size of a report. requests: rows of requests to read. sums: sums by end user to read."""

    requests: int
    sums: int

    def check(self) -> None:
        """Raise BadRequest if a report would read too much."""
        if sum(self) > MAX_ROWS:
            raise BadRequest(
                f"since: expected a period of at most {MAX_ROWS} requests for a report by version or by end user, got "
                f"{sum(self)}; choose a shorter period or a tenant. By end user, without a filter by key or model, the "
                "requests of an end user in a whole day count as one.",
                param="since",
            )


class Candidate(NamedTuple):
    """A tenant whose end users a ranking may have to read. most: upper bound of any one's value. size: see Reads."""

    tenant_id: str
    most: int
    size: int


class Summed(NamedTuple):
    """Days of a report whose sums by end user are to be read, as they are complete or no rows are left.

    criteria: the filter, by the tenants' ids. lacks_usage: retention has removed usage of the period, so that end users
    may be missing.
    """

    criteria: UsageFilter
    days: frozenset[datetime]
    lacks_usage: bool


class EndUserSums:
    """Queries about the sums by end user. Raises Unavailable."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._tenants = TenantSums(database)

    async def summed(self, group_by: Sequence[str], criteria: UsageFilter, since: Moment, until: Moment) -> Summed:
        """Return the days of a report whose sums by end user are to be read.

        Gateways of an earlier release write no such sums, and a day in which they served lacks some until it is
        rebuilt (gateway/billing/end_user_rebuild.py). Raises BadRequest like `rows_of`.
        """
        if not can_sum_end_users(group_by, criteria):
            lacks_usage = "end_user" in group_by and await self._lacks_rows(criteria, since, await self._oldest())
            return Summed(criteria, frozenset(), lacks_usage)
        days = days_of(since, until)
        criteria = await self._by_id(criteria, days)
        incomplete = await self._incomplete(days, _ids_of(criteria))
        oldest = await self._oldest() if incomplete else None
        lacks_usage = any(oldest is None or day <= oldest for day in incomplete)
        lacks_usage = lacks_usage and await self._lacks_rows(criteria, since, oldest)
        # A day that ended before the oldest row has none to read instead.
        with_rows = {day for day in incomplete if oldest is not None and oldest < day + DAY}
        return Summed(criteria, frozenset(days) - with_rows, lacks_usage)

    async def _oldest(self) -> Moment:
        """Return the time of the oldest usage row.

        None if no row exists, because retention removed all or none was written.
        """
        async with self._database.read() as connection:
            return (await connection.execute(select(func.min(usage.c.created_at)))).scalar_one()

    async def _lacks_rows(self, criteria: UsageFilter, since: Moment, oldest: Moment) -> bool:
        """Return whether a report's period has full hours with requests before the oldest row."""
        if since is None:
            return False
        hour = usage_hourly.c["hour"]
        query = criteria.narrow(select(usage_hourly)).where(hour >= since)
        if oldest is not None:
            query = query.where(hour <= oldest - HOUR)
        async with self._database.read() as connection:
            return (await connection.execute(query.limit(1))).first() is not None

    async def _by_id(self, criteria: UsageFilter, days: Sequence[datetime]) -> UsageFilter:
        """Return the filter with the ids of the tenants of its name, because the sums have an index by id only."""
        if criteria.tenant is None or not days or criteria.tenant_id is not None or criteria.tenant_ids is not None:
            return criteria
        of, day = usage_daily.c, usage_daily.c["day"]
        query = select(of.tenant_id).where(of.tenant == criteria.tenant, day >= days[0], day <= days[-1]).distinct()
        async with self._database.read() as connection:
            ids = sorted((await connection.execute(query)).scalars())
        return msgspec.structs.replace(criteria, tenant_ids=ids)

    async def _incomplete(self, days: Sequence[datetime], ids: Sequence[str] | None) -> set[datetime]:
        """Return the days whose sums by end user lack requests, by sums that every release has written.

        A single statement reads both, so that it sees a row that is being written in both or in neither.
        """
        own, zero = usage_end_user_days.c, literal_column("0", BigInteger)
        summed = select(own.day.label("day"), zero.label("start"), int_sum(own.requests).label("more"))
        summed = summed.where(own.day.in_(days)).group_by(own.day)
        starts = {int(day.timestamp()): day for day in days}
        known: Select[Any]
        if ids is None and await self._tenants.complete():
            # The sums for charts by engine are the fewest.
            table = ACTIVITY[86400]
            known = select(null(), table.c.start, -int_sum(table.c.requests)).group_by(table.c.start)
            known = known.where(table.c.kind == ENGINE, table.c.start.in_(starts))
        else:
            day = usage_daily.c["day"]
            known = select(day, zero, -int_sum(usage_daily.c.requests)).where(day.in_(days)).group_by(day)
        if ids is not None:
            summed = summed.where(own.tenant_id.in_(ids))
            known = known.where(usage_daily.c.tenant_id.in_(ids))
        differences: Counter[datetime] = Counter()
        async with self._database.read() as connection:
            for day_start, start, more in await connection.execute(union_all(summed, known)):
                differences[day_start or starts[start]] += more
        return {each for each, difference in differences.items() if difference}

    async def reads(self, criteria: UsageFilter, since: Moment, until: Moment, summed: Collection[datetime]) -> Reads:
        """Return how much a report reads. Filters by key and model do not reduce it.

        Requests before the oldest row are in the sums, but have no rows to read.
        """
        owners = UsageFilter(tenant_id=criteria.tenant_id, tenant=criteria.tenant, tenant_ids=criteria.tenant_ids)
        days, own = whole_days(since, until, summed), usage_end_user_days.c
        oldest, rows = await self._oldest(), None
        if oldest is not None:
            first = oldest.replace(hour=0, minute=0, second=0, microsecond=0)
            start = first if first in days else oldest
            since = start if since is None else max(since, start)
            complete = await self._tenants.complete()
            rows = rows_of(self._database.dialect, (), owners, since, until, by_tenant=complete)
        number = literal(0) if rows is None else select(int_sum(rows.c.requests)).scalar_subquery()
        of_days = int_sum(own.requests if since is None else case((own.day >= since, own.requests), else_=0))
        query = select(number, of_days, int_sum(own.end_users)).where(own.day.in_(days))
        ids = _ids_of(criteria)
        if ids is not None:
            query = query.where(own.tenant_id.in_(ids))
        async with self._database.read() as connection:
            requests, summed_requests, sums = (await connection.execute(query)).one()
        return Reads(max(0, requests - summed_requests), sums)

    async def candidates(
        self, measures: Iterable[str], since: Moment, until: Moment, summed: Collection[datetime]
    ) -> list[Candidate]:
        """Return tenants by the upper bound of their end users' values, the largest first, MAX_TENANTS + 1 at most.

        measures: the columns whose sum is the value. summed: all days of the period. At its edges an end user's value
        is at most that of the whole day, and as many requests are read as the day has.
        """
        own, whole = usage_end_user_days.c, whole_days(since, until, summed)
        first, *others = (own[f"most_{name}"] for name in measures)
        most = int_sum(sum(others, start=first))
        size = int_sum(case((own.day.in_(whole), own.end_users), else_=own.requests))
        query = (
            select(own.tenant_id, most.label("most"), size).where(own.day.in_(sorted(summed))).group_by(own.tenant_id)
        )
        async with self._database.read() as connection:
            found = await connection.execute(query.order_by(most.desc(), own.tenant_id).limit(MAX_TENANTS + 1))
            return [Candidate(*row) for row in found]


async def read_largest(
    candidates: Sequence[Candidate],
    number: int,
    read: Callable[[list[str]], Awaitable[Sequence[Any]]],
    value: Callable[[Any], int],
) -> tuple[list[Any], bool]:
    """Return the largest end users of all tenants, `number` at most, and whether others might belong among them.

    read: returns the largest of some tenants, ordered. value: their value. Tenants are read in the order of their upper
    bounds, until no other could have an end user that comes before the last one found. The first `number` tenants often
    suffice: each has an end user as large as its bound, if the period is a day. Each further round reads twice as many.
    A tenant that is too large for the rest of MAX_RANKED is left out, so that it cannot make the ranking slow for
    others.
    """
    found: list[Any] = []

    def may_matter(candidate: Candidate) -> bool:
        last = (-value(found[-1]), found[-1].tenant_id) if len(found) == number else None
        return last is None or (-candidate.most, candidate.tenant_id) < last

    left, unread = MAX_RANKED, list(candidates[MAX_TENANTS:])
    waiting = deque(candidates[:MAX_TENANTS])
    most_tenants = number
    while waiting and may_matter(waiting[0]):
        some: list[str] = []
        size = 0
        while waiting and len(some) < most_tenants and (not some or size + waiting[0].size <= RANKED_AT_ONCE):
            candidate = waiting.popleft()
            if candidate.size > left:
                unread.append(candidate)
                continue
            some.append(candidate.tenant_id)
            size += candidate.size
            left -= candidate.size
        # Each part has large and small tenants.
        parts = [some[i::READS_AT_ONCE] for i in range(min(READS_AT_ONCE, len(some)))]
        for rows in await together(*map(read, parts)):
            found += rows
        found = sorted(found, key=lambda row: (-value(row), row.tenant_id))[:number]
        most_tenants *= 2
    return found, any(may_matter(candidate) for candidate in unread)


def _ids_of(criteria: UsageFilter) -> Sequence[str] | None:
    return [criteria.tenant_id] if criteria.tenant_id is not None else criteria.tenant_ids
