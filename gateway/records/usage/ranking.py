"""Usage of a period as a ranking of groups, with their curves: a page of the groups in any order, in bounded memory."""

import itertools
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import ColumnElement, Subquery, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.records.concurrent_reads import together
from gateway.records.sql.database import Database
from gateway.records.sql.sums import int_sum
from gateway.records.sql.tables import api_keys
from gateway.records.usage.end_user_sums import EndUserSums, read_largest
from gateway.records.usage.ranked_groups import (
    CURVES,
    KEYS,
    Curves,
    GroupBy,
    Identity,
    Measure,
    Part,
    RankedGroup,
    Ranking,
    Step,
    identity_of,
)
from gateway.records.usage.rows import days_of, rows_of, whole_days
from gateway.records.usage.steps import Steps, measured
from gateway.records.usage.tenant_sums import SUMMED, TenantSums

# Maximum requests that the curves and the comparison of a ranking by end user read, where sums do not suffice.
MAX_COMPARED = 100_000
# FIRST_TENANTS: minimum number of tenants whose groups a ranking of all groups reads first. MAX_TENANTS: maximum
# number that it reads. By Zipf's law the first n groups belong to about the first n / 4 tenants.
FIRST_TENANTS, MAX_TENANTS = 15, 2000
# Maximum number of groups that a ranking keeps in memory.
MAX_GROUPS = 1000


class UsageRanking:
    """Queries of rankings. They raise Unavailable, and BadRequest as a report by end user does."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._sums = TenantSums(database)
        self._end_users = EndUserSums(database)

    async def groups(
        self,
        part: Part,
        group_by: GroupBy,
        order: str,
        *,
        descending: bool = True,
        offset: int = 0,
        limit: int = 50,
    ) -> Ranking:
        """Return a page of groups. order: a column of SUMMED, "tokens" or "name"."""
        part = await self._with_tenant(part)
        window = _Window(group_by, order, descending, offset, limit)
        is_long = part.criteria.is_of_all and descending and order != "name" and offset + limit < MAX_GROUPS
        first: Sequence[Any] | None = None
        is_partial = lacks_usage = False
        summed: Collection[datetime] = ()
        if is_long and group_by in ("model", "key") and await self._sums.complete():
            first = await self._first(part, window)
        if group_by == "end_user":
            found_days = await self._end_users.summed((group_by,), part.criteria, part.since, part.until)
            criteria, summed, lacks_usage = found_days
            part = msgspec.structs.replace(part, criteria=criteria)
            if is_long and summed.issuperset(days_of(part.since, part.until)):
                first, is_partial = await self._first_end_users(part, window, summed)
            else:
                (await self._end_users.reads(part.criteria, part.since, part.until, summed)).check()
        is_light = first is not None and group_by == "end_user"
        if first is not None:
            found = first[offset:]
        else:
            found = await self._found(part, window, summed)
            first = None if offset else found
        has_more = len(found) > limit
        shown, leaders = found[:limit], (first or ())[:CURVES]
        if is_light:
            shown, leaders = await self._with_all_sums(part, window, (shown, leaders), summed)
        async with self._database.read() as connection:
            ids = [row.key_id for row in (*shown, *leaders)] if group_by == "key" else []
            labels = await _labels(connection, ids) if ids else {}
        number = None if has_more or (offset and not shown) else offset + len(shown)
        return Ranking(
            groups=[_group(row._mapping, group_by, labels) for row in shown],
            first=None if first is None else [_group(row._mapping, group_by, labels) for row in leaders],
            number=number,
            has_more=has_more,
            is_partial=is_partial,
            lacks_usage=lacks_usage,
        )

    async def _found(self, part: Part, window: "_Window", summed: Collection[datetime] = ()) -> Sequence[Any]:
        """Return the groups of a window, and one more if there is one. summed: see `_rows`."""
        rows = await self._rows(part, (window.group_by,), summed, window.measures)
        if rows is None:
            return []
        names = KEYS[window.group_by]
        keys = [rows.c[name] for name in names]
        grouped = select(*keys, *_sums(rows, window.measures)).group_by(*keys).cte("grouped")
        ordered = [_order(grouped, window.order)] if window.order != "name" else []
        first = ordered or [grouped.c[name] for name in names[1:] or names]
        by = [column.desc() if window.descending else column for column in first]
        query = select(grouped).order_by(*by, *(grouped.c[name] for name in names))
        async with self._database.read() as connection:
            return (await connection.execute(query.offset(window.offset).limit(window.limit + 1))).all()

    async def _with_all_sums(
        self, part: Part, window: "_Window", parts: tuple[Sequence[Any], ...], summed: Collection[datetime]
    ) -> tuple[Sequence[Any], ...]:
        """Return parts of a ranking whose groups were found by one measure, with all sums of each group.

        The sums are read later, so the order may differ. A group that retention has removed is left out.
        """
        identities = {identity_of(row, window.group_by) for each in parts for row in each}
        if not identities:
            return parts
        rows = await self._rows(part.of_groups(window.group_by, identities), (window.group_by,), summed)
        if rows is None:
            return tuple([] for _ in parts)
        keys = [rows.c[name] for name in KEYS[window.group_by]]
        query = select(*keys, *_sums(rows)).where(tuple_(*keys).in_(identities)).group_by(*keys)
        async with self._database.read() as connection:
            whole = {identity_of(row, window.group_by): row for row in await connection.execute(query)}
        found = ([whole.get(identity_of(row, window.group_by)) for row in each] for each in parts)
        kept = ([row for row in each if row is not None] for each in found)
        return tuple(sorted(each, key=lambda row: -_value(row, window.order)) for each in kept)

    async def _first(self, part: Part, window: "_Window") -> Sequence[Any] | None:
        """Return the first groups up to the end of the window and one more; None if too many groups or tenants have to
        be read.

        Only the groups of the largest tenants are read. No group is larger than its tenant, so the groups are complete
        once no other tenant could come before the last of them. The order of equal groups begins with their tenants'
        ids, which are hexadecimal: all databases and Python order them alike.
        """
        end = window.offset + window.limit + 1
        rows = await self._rows(part, ("tenant",), measures=window.ordering)
        if rows is None:
            return []
        amount = _measured(rows, window.order)
        largest = select(rows.c.tenant_id, amount).group_by(rows.c.tenant_id).order_by(amount.desc(), rows.c.tenant_id)
        async with self._database.read() as connection:
            tenants: Sequence[Any] = (await connection.execute(largest.limit(MAX_TENANTS + 1))).all()
        found: list[Any] = []
        read, needed = 0, min(len(tenants), max(FIRST_TENANTS, end // 4))
        while read < needed <= MAX_TENANTS:
            ids = [row[0] for row in tenants[read:needed]]
            # Both halves have large and small tenants, and are read at the same time.
            halves = [part.of_tenants(half) for half in (ids[::2], ids[1::2]) if half]
            reads = (self._found(half, window._replace(offset=0, limit=end - 1)) for half in halves)
            found += itertools.chain(*await together(*reads))
            found = sorted(found, key=lambda row: (-_value(row, window.order), row.tenant_id))[:end]
            read, needed = needed, min(len(tenants), max(end, 2 * needed))
            if len(found) == end:
                last = (-_value(found[-1], window.order), found[-1].tenant_id)
                needed = sum((-row[1], row[0]) < last for row in tenants)
        return found if needed <= read else None

    async def _first_end_users(
        self, part: Part, window: "_Window", summed: Collection[datetime]
    ) -> tuple[Sequence[Any], bool]:
        """Return the first end users up to the end of the window and one more, and whether some may be missing.

        Tens of thousands of sums are sorted by end user, most of them for end users that are not on the page. Therefore
        only the measure of the order is read, which takes SQLite two thirds of the time.
        """
        end = window.offset + window.limit + 1
        light = window._replace(offset=0, limit=end - 1, measures=window.ordering)
        candidates = await self._end_users.candidates(window.ordering, part.since, part.until, summed)

        async def read(ids: list[str]) -> Sequence[Any]:
            return await self._found(part.of_tenants(ids), light, summed)

        return await read_largest(candidates, end, read, lambda row: _value(row, window.order))

    async def earlier(
        self, part: Part, group_by: GroupBy, groups: Sequence[RankedGroup], measure: Measure
    ) -> list[RankedGroup]:
        """Return the groups with their measure in `part`, the period before; None if some of its usage is removed."""
        if "tenant" not in KEYS[group_by] or not groups:
            return list(groups)
        own = [identity_of(group, group_by) for group in groups]
        rows = await self._rows_of_groups(part.of_groups(group_by, own), (group_by,), must_be_whole=True)
        if rows is None:
            return list(groups)
        keys = [rows.c[name] for name in KEYS[group_by]]
        query = select(*keys, _measured(rows, measure)).where(tuple_(*keys).in_(own)).group_by(*keys)
        async with self._database.read() as connection:
            found = {tuple(row[:-1]): row[-1] for row in await connection.execute(query)}
        return [
            msgspec.structs.replace(group, before=found.get(identity, 0))
            for group, identity in zip(groups, own, strict=True)
        ]

    async def total(self, part: Part) -> dict[str, int]:
        """Return the sums over all groups."""
        rows = await self._rows(await self._with_tenant(part), ())
        if rows is None:
            return dict.fromkeys(SUMMED, 0)
        async with self._database.read() as connection:
            found = (await connection.execute(select(*_sums(rows)))).one()
        return dict(found._mapping)

    async def steps(self, part: Part, step: Step) -> Steps:
        """Return the sums over all groups in each step that has usage, in the order of time."""
        rows = await self._rows(await self._with_tenant(part), (step,))
        if rows is None:
            return {}
        query = select(rows.c[step], *_sums(rows)).group_by(rows.c[step]).order_by(rows.c[step])
        async with self._database.read() as connection:
            found = (await connection.execute(query)).all()
        return {row[0]: dict(zip(SUMMED, row[1:], strict=True)) for row in found}

    async def curves(
        self, part: Part, group_by: GroupBy, groups: Sequence[RankedGroup], measure: Measure, step: Step, steps: Steps
    ) -> Curves:
        """Return the curves of these groups and of all groups together. steps: the sums of all groups."""
        curves = []
        found = await self._steps_of(await self._with_tenant(part), group_by, groups, measure, step)
        if found is not None:
            for group in groups:
                values = found.get(identity_of(group, group_by), {})
                curves.append((group, [values.get(start, 0) for start in steps]))
        return Curves(starts=list(steps), groups=curves, total=[measured(sums, measure) for sums in steps.values()])

    async def _steps_of(
        self, part: Part, group_by: GroupBy, groups: Sequence[RankedGroup], measure: Measure, step: Step
    ) -> dict[Identity, dict[datetime, int]] | None:
        """Return the measure of each tenant's group by step; None if it would read too much, or for groups of times."""
        if "tenant" not in KEYS[group_by] or not groups:
            return None
        own = {identity_of(group, group_by) for group in groups}
        rows = await self._rows_of_groups(part.of_groups(group_by, own), (group_by, step))
        if rows is None:
            return None
        found: dict[Identity, dict[datetime, int]] = {}
        for *key, start, value in await self._by(rows, (*KEYS[group_by], step), measure):
            if tuple(key) in own:
                found.setdefault(tuple(key), {})[start] = value
        return found

    async def _by(self, rows: Subquery, names: Sequence[str], measure: Measure) -> Sequence[Any]:
        """Return rows of the columns `names` and, last, the measure."""
        keys = [rows.c[name] for name in names]
        async with self._database.read() as connection:
            return (await connection.execute(select(*keys, _measured(rows, measure)).group_by(*keys))).all()

    async def _rows_of_groups(
        self, part: Part, group_by: Sequence[str], *, must_be_whole: bool = False
    ) -> Subquery | None:
        """Return the rows of few groups; None without any, or if too many requests would be read.

        must_be_whole: return None also if retention has removed some.
        """
        summed: Collection[datetime] = ()
        if "end_user" in group_by:
            criteria, summed, lacks_usage = await self._end_users.summed(
                group_by, part.criteria, part.since, part.until
            )
            if must_be_whole and lacks_usage:
                return None
            if len(whole_days(part.since, part.until, summed)) < len(days_of(part.since, part.until)):
                reads = await self._end_users.reads(criteria, part.since, part.until, summed)
                if reads.requests > MAX_COMPARED:
                    return None
        return await self._rows(part, group_by, summed)

    async def _rows(
        self,
        part: Part,
        group_by: Sequence[str],
        summed: Collection[datetime] = (),
        measures: Sequence[str] = SUMMED,
    ) -> Subquery | None:
        """Return the rows of a part; None without any. summed: the days whose sums by end user are complete."""
        complete = await self._sums.complete()
        return rows_of(
            *(self._database.dialect, group_by, part.criteria, part.since, part.until),
            by_tenant=complete,
            summed=summed,
            measures=measures,
        )

    async def _with_tenant(self, part: Part) -> Part:
        """Return the part, restricted to the tenant of its key, because indexes of the sums begin with the tenant."""
        if part.criteria.key_id is None or not part.criteria.is_of_all:
            return part
        async with self._database.read() as connection:
            owner = select(api_keys.c.tenant_id).where(api_keys.c.id == part.criteria.key_id)
            tenant_id = (await connection.execute(owner)).scalar_one_or_none()
        return part if tenant_id is None else part.of_tenants([tenant_id])


class _Window(NamedTuple):
    """Part of a ranking. order: a column of SUMMED, "tokens" or "name". measures: the columns of sums that are read."""

    group_by: GroupBy
    order: str
    descending: bool
    offset: int
    limit: int
    measures: Sequence[str] = SUMMED

    @property
    def ordering(self) -> Sequence[str]:
        """Return the columns whose sum is the order."""
        return ("prompt_tokens", "completion_tokens") if self.order == "tokens" else (self.order,)


def _sums(rows: Subquery, measures: Sequence[str] = SUMMED) -> list[ColumnElement[int]]:
    return [int_sum(rows.c[name]).label(name) for name in measures]


def _measured(rows: Subquery, measure: str) -> ColumnElement[int]:
    value = rows.c.prompt_tokens + rows.c.completion_tokens if measure == "tokens" else rows.c[measure]
    return int_sum(value)


def _order(grouped: Any, order: str) -> ColumnElement[Any]:
    if order == "tokens":
        tokens: ColumnElement[Any] = grouped.c.prompt_tokens + grouped.c.completion_tokens
        return tokens
    column: ColumnElement[Any] = grouped.c[order]
    return column


def _value(row: Any, order: str) -> int:
    return int(measured(row._mapping, order))


def _group(row: Any, group_by: GroupBy, labels: dict[str, str]) -> RankedGroup:
    values = {name: row[name] for name in (*KEYS[group_by], *SUMMED)}
    if "tenant" not in values:
        values["start"] = values.pop(group_by)
    return RankedGroup(**values, key=labels.get(values.get("key_id", "")))


async def _labels(connection: AsyncConnection, ids: Sequence[str]) -> dict[str, str]:
    query = select(api_keys.c.id, api_keys.c.label).where(api_keys.c.id.in_(sorted(set(ids))))
    return {row.id: row.label for row in await connection.execute(query)}
