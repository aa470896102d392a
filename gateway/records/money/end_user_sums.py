"""Sums of usage by end user: which days have them, how much a report by end user or by version reads, and the tenants
whose end users may be the largest.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Select, case, select

from gateway.errors import BadRequest
from gateway.records.activity.tables import ACTIVITY, ENGINE
from gateway.records.database import Database
from gateway.records.money.end_user_tables import usage_end_user_days
from gateway.records.money.tenant_sums import TenantSums
from gateway.records.money.usage_rows import Moment, UsageFilter, can_sum_end_users, days_of, rows_of, whole_days
from gateway.records.sums import int_sum
from gateway.records.tables import usage_daily

# Maximum number of requests and sums by end user that a report of a tenant reads. The database takes a few
# microseconds for each.
MOST_ROWS = 500_000
# Maximum number that a ranking of all tenants' end users reads, in how many at a time, and of how many tenants.
MOST_RANKED, RANKED_AT_ONCE, MOST_TENANTS = 300_000, 20_000, 2000


class Reads(NamedTuple):
    """Size of a report. requests: rows of requests to read. sums: sums by end user to read."""

    requests: int
    sums: int

    def check(self) -> None:
        """Raise BadRequest if a report would read too much."""
        if sum(self) > MOST_ROWS:
            raise BadRequest(
                f"since: expected a period of at most {MOST_ROWS} requests for a report by version or by end user, got "
                f"{sum(self)}; choose a shorter period or a tenant. By end user, without a filter by key or model, the "
                "requests of an end user in a whole day count as one.",
                param="since",
            )


class Candidate(NamedTuple):
    """A tenant whose end users a ranking may have to read. most: upper bound of any one's value. size: see Reads."""

    tenant_id: str
    most: int
    size: int


class EndUserSums:
    """Queries about the sums by end user. Raises Unavailable."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._tenants = TenantSums(database)

    async def summed(
        self, group_by: Sequence[str], which: UsageFilter, since: Moment, until: Moment
    ) -> tuple[UsageFilter, frozenset[datetime]]:
        """Return the days of a report whose sums by end user are complete, and the filter by the tenants' ids.

        Gateways of an earlier release write no such sums, and a day in which they served lacks some until it is
        rebuilt (gateway/billing/end_user_rebuild.py). Raises BadRequest like `rows_of`.
        """
        if not can_sum_end_users(group_by, which):
            return which, frozenset()
        days = days_of(since, until)
        which = await self._by_id(which, days)
        ids = _ids_of(which)
        known = await self._known(days, ids)
        own = usage_end_user_days.c
        query = select(own.day, int_sum(own.requests)).where(own.day.in_(days))
        if ids is not None:
            query = query.where(own.tenant_id.in_(ids))
        async with self._database.read() as connection:
            found: dict[datetime, int] = dict((await connection.execute(query.group_by(own.day))).all())
        return which, frozenset(day for day in days if found.get(day, 0) == known.get(day, 0))

    async def _by_id(self, which: UsageFilter, days: Sequence[datetime]) -> UsageFilter:
        """Return the filter with the ids of the tenants of its name, because the sums have an index by id only."""
        if which.tenant is None or not days or which.tenant_id is not None or which.tenant_ids is not None:
            return which
        of, day = usage_daily.c, usage_daily.c["day"]
        query = select(of.tenant_id).where(of.tenant == which.tenant, day >= days[0], day <= days[-1]).distinct()
        async with self._database.read() as connection:
            ids = sorted((await connection.execute(query)).scalars())
        return msgspec.structs.replace(which, tenant_ids=ids)

    async def _known(self, days: Sequence[datetime], ids: Sequence[str] | None) -> dict[datetime, int]:
        """Return the requests of each day by sums that every release has written."""
        if ids is None and await self._tenants.complete():
            # The sums for charts by engine are the fewest.
            table = ACTIVITY[86400]
            starts = {int(day.timestamp()): day for day in days}
            query: Select[Any] = select(table.c.start, int_sum(table.c.requests)).group_by(table.c.start)
            async with self._database.read() as connection:
                found = await connection.execute(query.where(table.c.kind == ENGINE, table.c.start.in_(starts)))
                return {starts[start]: number for start, number in found}
        day = usage_daily.c["day"]
        query = select(day, int_sum(usage_daily.c.requests)).where(day.in_(days)).group_by(day)
        if ids is not None:
            query = query.where(usage_daily.c.tenant_id.in_(ids))
        async with self._database.read() as connection:
            return dict((await connection.execute(query)).all())

    async def reads(self, which: UsageFilter, since: Moment, until: Moment, summed: Collection[datetime]) -> Reads:
        """Return how much a report reads. Filters by key and model do not reduce it."""
        owners = UsageFilter(tenant_id=which.tenant_id, tenant=which.tenant, tenant_ids=which.tenant_ids)
        complete = await self._tenants.complete()
        rows = rows_of(self._database.dialect, (), owners, since, until, by_tenant=complete)
        days, own = whole_days(since, until, summed), usage_end_user_days.c
        if rows is None:
            return Reads(0, 0)
        of_days = select(int_sum(own.requests), int_sum(own.end_users)).where(own.day.in_(days))
        ids = _ids_of(which)
        if ids is not None:
            of_days = of_days.where(own.tenant_id.in_(ids))
        async with self._database.read() as connection:
            number = (await connection.execute(select(int_sum(rows.c.requests)))).scalar_one()
            requests, sums = (await connection.execute(of_days)).one()
        return Reads(max(0, number - requests), sums)

    async def candidates(
        self, measures: Iterable[str], since: Moment, until: Moment, summed: Collection[datetime]
    ) -> list[Candidate]:
        """Return tenants by the upper bound of their end users' values, the largest first, MOST_TENANTS + 1 at most.

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
            found = await connection.execute(query.order_by(most.desc(), own.tenant_id).limit(MOST_TENANTS + 1))
            return [Candidate(*row) for row in found]


async def read_largest(
    candidates: Sequence[Candidate],
    number: int,
    read: Callable[[list[str]], Awaitable[Sequence[Any]]],
    value: Callable[[Any], int],
) -> tuple[list[Any], bool]:
    """Return the largest end users of all tenants, `number` at most, and whether others might belong among them.

    read: returns the largest of some tenants, ordered. value: their value. Tenants are read in the order of their upper
    bounds, until no other could have an end user that comes before the last one found. A tenant that is too large for
    the rest of MOST_RANKED is left out, so that it cannot make the ranking slow for others.
    """
    found: list[Any] = []

    def may_matter(candidate: Candidate) -> bool:
        last = (-value(found[-1]), found[-1].tenant_id) if len(found) == number else None
        return last is None or (-candidate.most, candidate.tenant_id) < last

    left, unread = MOST_RANKED, list(candidates[MOST_TENANTS:])
    waiting = deque(candidates[:MOST_TENANTS])
    while waiting and may_matter(waiting[0]):
        some: list[Candidate] = []
        while waiting and (not some or sum(each.size for each in some) + waiting[0].size <= RANKED_AT_ONCE):
            candidate = waiting.popleft()
            if candidate.size > left:
                unread.append(candidate)
                continue
            some.append(candidate)
            left -= candidate.size
        if some:
            found += await read([candidate.tenant_id for candidate in some])
            found = sorted(found, key=lambda row: (-value(row), row.tenant_id))[:number]
    return found, any(may_matter(candidate) for candidate in unread)


def _ids_of(which: UsageFilter) -> Sequence[str] | None:
    return [which.tenant_id] if which.tenant_id is not None else which.tenant_ids
