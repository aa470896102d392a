"""Usage sums of the ledger up to a given time, for limits whose state Redis has lost."""

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Select, Table, case, func, literal, null, select, union_all

from gateway.records.adapters.removed_versions import all_versions
from gateway.records.bases.registry import Bases
from gateway.records.keys.removed import successors_of
from gateway.records.sql.database import Database
from gateway.records.sql.sums import int_sum
from gateway.records.sql.tables import adapter_versions, adapters, api_keys, usage, usage_daily, usage_hourly
from gateway.records.usage.rows import TIMES, segments
from wire.mixtures import names_in

# Rows of a sum that are read at once, about 5 ms of the event loop.
ROWS_AT_ONCE = 2000

# (table, what to group by, amount, conditions)
Summand = tuple[Table, ColumnElement[Any], ColumnElement[int], Sequence[ColumnElement[bool]]]


class UsagePart(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Part of a tenant's usage: by a family of keys, or by models. Without any field, all of it.

    models: names, which include the tenant's other names with a version of the same content. besides: all adapters
    except those that these names would select as `models`.
    """

    family: str | None = None
    models: tuple[str, ...] | None = None
    besides: tuple[str, ...] | None = None


ALL = UsagePart()


class PastUsage:
    """Usage sums of a tenant or a part of it, exact to the microsecond of a row's `created_at`.

    Raises Unavailable if the database is away.
    """

    def __init__(self, database: Database, bases: Bases) -> None:
        self._database = database
        self._bases = bases

    async def cost(self, tenant_id: str, since: datetime, until: datetime, part: UsagePart = ALL) -> int:
        """Return the cost, in micro-units, of the requests in `[since, until)`."""
        parts = [
            (table, literal(0), table.c.cost, self._within(table, start, end, tenant_id, part))
            for table, start, end in segments(since, until)
        ]
        return (await self._sums(parts, tenant_id, part)).get(0, 0)

    async def cost_by_day(
        self, tenant_id: str, since: datetime, until: datetime, part: UsagePart = ALL
    ) -> dict[datetime, int]:
        """Return the cost of the requests in `[since, until)` by day (UTC), in micro-units. Days without requests lack.

        since: the start of a day.
        """
        last = literal(until.replace(hour=0, minute=0, second=0, microsecond=0), usage_daily.c.day.type)
        parts = [
            (
                table,
                table.c.day if table is usage_daily else last,
                table.c.cost,
                self._within(table, start, end, tenant_id, part),
            )
            for table, start, end in segments(since, until)
        ]
        return await self._sums(parts, tenant_id, part)

    async def by_hour(
        self, tenant_id: str, since: datetime, until: datetime, part: UsagePart = ALL, *, tokens: bool = True
    ) -> list[tuple[datetime, int]]:
        """Return (start of the hour, tokens of the token rates) of the requests in `[since, until)`, in order.

        since: the start of an hour. tokens: False to return numbers of requests instead of tokens.
        """
        hour = until.replace(minute=0, second=0, microsecond=0)
        parts = [
            (
                table,
                at,
                table.c.prompt_tokens + table.c.completion_tokens + table.c.surcharge if tokens else requests,
                self._within(table, start, end, tenant_id, part),
            )
            for table, at, requests, start, end in (
                (usage_hourly, usage_hourly.c["hour"], usage_hourly.c.requests, since, hour),
                (usage, literal(hour, usage_hourly.c["hour"].type), literal(1), hour, until),
            )
        ]
        return sorted((await self._sums(parts, tenant_id, part)).items())

    async def _sums(self, parts: Sequence[Summand], tenant_id: str, part: UsagePart) -> dict[Any, int]:
        """Return the sums of the amounts by group.

        The names of each mixture are compared here: in SQL, each text of a tenant would be compared with each of its
        names, and a tenant may have used 100,000 texts and have thousands of names.
        """
        if not parts:
            return {}
        # A single statement reads both tables in one snapshot, so a row being written is seen in both or in neither.
        every = union_all(
            *(
                select(
                    group.label("group"),
                    case((table.c.model.contains("*"), table.c.model)).label("mixture")
                    if part.models is not None
                    else null().label("mixture"),
                    amount.label("amount"),
                ).where(*where)
                for table, group, amount, where in parts
            )
        ).subquery()
        columns = every.c["group"], every.c.mixture
        query = select(*columns, int_sum(every.c.amount).label("amount")).group_by(*columns)
        sums: dict[Any, int] = {}
        async with self._database.read() as connection:
            names = set(part.models or ())
            if part.models is not None:
                names.update((await connection.execute(_same_content(tenant_id, part.models))).scalars())
            async with connection.stream(query) as rows:
                # Rows are read in pieces, so that the event loop has turns between them.
                async for piece in rows.partitions(ROWS_AT_ONCE):
                    for group, mixture, amount in piece:
                        if mixture is None or not names.isdisjoint(names_in(mixture)):
                            sums[group] = sums.get(group, 0) + amount
        return sums

    async def valid_families(self, tenant_id: str, families: Collection[str], since: datetime) -> set[str]:
        """Return those of a tenant's families of keys with a key that has not ended before a given time."""
        of, id_ = api_keys.c.family_id, api_keys.c.id
        query = select(func.coalesce(of, id_)).where(
            api_keys.c.tenant_id == tenant_id,
            # Both sides have an index, unlike `coalesce`.
            of.in_(families) | of.is_(None) & id_.in_(families),
            api_keys.c.revoked_at.is_(None) | (api_keys.c.revoked_at > since),
            api_keys.c.expires_at.is_(None) | (api_keys.c.expires_at > since),
        )
        async with self._database.read() as connection:
            return set((await connection.execute(query.distinct())).scalars())

    def _within(
        self, table: Table, start: datetime | None, end: datetime | None, tenant_id: str, part: UsagePart
    ) -> list[ColumnElement[Any]]:
        at = TIMES[table]
        found: list[ColumnElement[Any]] = [table.c.tenant_id == tenant_id]
        found += [at >= start] if start is not None else []
        found += [at < end] if end is not None else []
        if part.family is not None:
            # A gateway of the previous release leaves `family_id` empty for the first key of a family.
            found.append((table.c.key_id == part.family) | table.c.key_id.in_(successors_of(part.family)))
        if part.models is not None:
            same = _same_content(tenant_id, part.models)
            own = table.c.model.in_(part.models) | table.c.model.in_(same)
            # A mixture counts against the limits of the names in its terms; `_sums` selects among the mixtures.
            found.append(own | table.c.model.contains("*"))
        if part.besides is not None:
            names = (*self._bases.names, *part.besides)
            found.append(table.c.model.not_in(names) & table.c.model.not_in(_same_content(tenant_id, part.besides)))
        return found


def _same_content(tenant_id: str, names: Sequence[str]) -> Select[Any]:
    """Select the tenant's names with a version whose content any of `names` has or once had.

    Requests may use any version on record. Sums do not tell versions of a name apart, so all its usage counts.
    """
    ever = all_versions(tenant_id, lambda name, _: name.in_(names))
    return (
        select(adapters.c.name)
        .join_from(adapters, adapter_versions, adapter_versions.c.adapter_id == adapters.c.id)
        .where(adapters.c.tenant_id == tenant_id, adapter_versions.c.digest.in_(select(ever.c.digest)))
    )
