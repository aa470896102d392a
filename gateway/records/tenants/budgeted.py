"""Tenants that have a budget, in pages, so that the event loop decodes few rows at a time."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Row, func, or_, select

from gateway.limits.kinds import BUDGET_KINDS, BUDGET_NAMES, SOFT_BUDGET
from gateway.records.sql.database import Database
from gateway.records.sql.tables import tenants
from gateway.records.tenants.limits import LIMIT_COLUMNS, read_limits, read_soft_budgets
from gateway.records.tenants.tenants import read_shares

# Number of rows decoded without a pause: 2 ms of one core.
AT_ONCE = 100


class BudgetedTenant(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant with a budget or a soft budget.

    budgets: in micro-units, above 0, by the letter of their kind. soft: soft budgets, by the letter of the kind with
    the same period. warn_at: shares of `budgets` at which there is an event. has_own: whether
    they differ from the default.
    """

    id: str
    name: str
    budgets: dict[str, int]
    soft: dict[str, int] = {}
    warn_at: tuple[float, ...]
    has_own: bool
    suspended: bool = False


class BudgetedTenants:
    """Queries of tenants with budgets. Raises Unavailable while the database is away."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def pages(self) -> AsyncIterator[list[BudgetedTenant]]:
        """Yield all tenants with a budget in the order of their ids. Each page is read in a transaction of its own."""
        after = ""
        while True:
            query = _QUERY.where(_HAS_BUDGET, tenants.c.id > after).order_by(tenants.c.id).limit(AT_ONCE)
            async with self._database.read() as connection:
                rows = (await connection.execute(query)).all()
            yield [tenant for row in rows if (tenant := _read(row)).budgets or tenant.soft]
            if len(rows) < AT_ONCE:
                return
            after = rows[-1].id

    async def with_ids(self, ids: Sequence[str]) -> AsyncIterator[list[BudgetedTenant]]:
        """Yield those of the tenants that have a budget, in pages."""
        for start in range(0, len(ids), AT_ONCE):
            query = _QUERY.where(_HAS_BUDGET, tenants.c.id.in_(ids[start : start + AT_ONCE]))
            async with self._database.read() as connection:
                rows = (await connection.execute(query)).all()
            yield [tenant for row in rows if (tenant := _read(row)).budgets or tenant.soft]

    async def named(self, names: Sequence[str]) -> list[BudgetedTenant]:
        """Return the named tenants that have a budget."""
        found: list[BudgetedTenant] = []
        for start in range(0, len(names), AT_ONCE):
            query = _QUERY.where(_HAS_BUDGET, tenants.c.name.in_(names[start : start + AT_ONCE]))
            async with self._database.read() as connection:
                rows = (await connection.execute(query)).all()
            found += [tenant for row in rows if (tenant := _read(row)).budgets]
        return found

    async def page(self, q: str, *, only_own: bool, limit: int, offset: int) -> tuple[list[BudgetedTenant], int]:
        """Return tenants by name, and the number of all that match. q: part of the name. only_own: with own shares."""
        conditions = [_HAS_BUDGET, tenants.c.name.contains(q.lower(), autoescape=True)]
        if only_own:
            conditions.append(tenants.c.budget_warn_at.is_not(None))
        query = _QUERY.where(*conditions).order_by(tenants.c.name).limit(limit).offset(offset)
        async with self._database.read() as connection:
            rows = (await connection.execute(query)).all()
            counted = select(func.count()).select_from(tenants).where(*conditions)
            total = (await connection.execute(counted)).scalar_one()
        return [_read(row) for row in rows], total


# The JSON of limits has only the limits that are set.
_HAS_BUDGET: ColumnElement[bool] = or_(
    tenants.c.budget_per_month > 0,
    *(tenants.c.limits.contains(f'"{name}":') for name in BUDGET_NAMES if name != "budget_per_month"),
)
_COLUMNS = ("id", "name", "suspended", "budget_warn_at", *LIMIT_COLUMNS)
_QUERY = select(*(tenants.c[name] for name in _COLUMNS))


def _read(row: Row[Any]) -> BudgetedTenant:
    limits, soft = read_limits(row), read_soft_budgets(row)
    return BudgetedTenant(
        id=row.id,
        name=row.name,
        budgets={kind.letter: value for kind in BUDGET_KINDS if (value := getattr(limits, kind.name))},
        soft={kind.letter: value for kind in BUDGET_KINDS if (value := getattr(soft, SOFT_BUDGET[str(kind.period)]))},
        warn_at=read_shares(row.budget_warn_at),
        has_own=row.budget_warn_at is not None,
        suspended=row.suspended,
    )
