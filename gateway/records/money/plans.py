"""Plans: named terms and prices of tenants."""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
from sqlalchemy import Row, bindparam, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.errors import BadRequest, Conflict, RecordNotFound
from gateway.records.audit import record_change
from gateway.records.caches.changes import PRICES, count_change, count_changes_of_plan
from gateway.records.money.prices import Price
from gateway.records.sql.database import Database
from gateway.records.sql.name_locks import lock_creation
from gateway.records.sql.tables import plans, tenants
from gateway.records.tenants.tenants import read_tenant, term_columns
from gateway.records.tenants.terms import NO_TERMS, Terms, given_terms, own_terms, read_terms, resolve, write_terms
from gateway.records.unchanged import check_unchanged

PLAN_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
NO_PLAN = "There is no plan of this name."


class TenantPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A plan. prices: by the base model's name, "*/*" for all adapters, or "*" for everything.

    num_tenants: how many tenants have the plan.
    """

    name: str
    terms: Terms = NO_TERMS
    prices: dict[str, Price] = {}
    updated_at: datetime
    num_tenants: int = 0


class Plans:
    """The table of plans. Raises RecordNotFound."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def list(self) -> list[TenantPlan]:
        async with self._database.read() as connection:
            rows = (await connection.execute(_PLANS.order_by(plans.c.name))).all()
        return [_read(row) for row in rows]

    async def terms(self) -> dict[str, Terms]:
        """Return the terms of all plans by name."""
        async with self._database.read() as connection:
            rows = (await connection.execute(select(plans.c.name, plans.c.terms))).all()
        return {row.name: read_terms(row.terms) for row in rows}

    async def get(self, name: str) -> TenantPlan:
        check_plan(name)
        async with self._database.read() as connection:
            return await _find(connection, name)

    async def put(
        self, name: str, terms: Terms, prices: Mapping[str, Price], actor: str, *, seen: TenantPlan | None = None
    ) -> TenantPlan:
        """Create a plan or replace its terms and prices. The plan's tenants get the new terms in the same transaction.

        seen: the plan on which the change is based. Raises BadRequest for a bad name, Changed if the plan is no longer
        as `seen`.
        """
        if not PLAN_NAME.fullmatch(name):
            raise BadRequest(
                "name: expected a plan name of 1 to 64 characters a-z, 0-9, '.', '_' and '-', starting with a letter "
                "or digit.",
                param="name",
            )
        async with self._database.write() as connection:
            await lock_creation(connection, "plan", name)
            before = await _locked(connection, name)
            _check_unchanged(before, seen)
            values = {"terms": write_terms(terms), "prices": _encode(prices), "updated_at": datetime.now(UTC)}
            if before is None:
                await connection.execute(insert(plans).values(name=name, **values))
            else:
                await connection.execute(update(plans).where(plans.c.name == name).values(**values))
                await _apply(connection, name, before.terms, terms)
            new = given_terms(terms) | {"prices": dict(prices)}
            old = None if before is None else _earlier(before, new)
            await record_change(connection, actor, "plan.put", name, new, before=old)
            await _count(connection, name)
            return await _find(connection, name)

    async def put_prices(
        self, name: str, prices: Mapping[str, Price], actor: str, *, seen: TenantPlan | None = None
    ) -> TenantPlan:
        """Replace the prices of a plan. seen: as in `put`. Raises Changed."""
        check_plan(name)
        async with self._database.write() as connection:
            before = await _locked(connection, name)
            if before is None:
                raise RecordNotFound(NO_PLAN, param="plan")
            _check_unchanged(before, seen)
            values = {"prices": _encode(prices), "updated_at": datetime.now(UTC)}
            await connection.execute(update(plans).where(plans.c.name == name).values(**values))
            old = {"prices": before.prices}
            await record_change(connection, actor, "plan.put", name, {"prices": dict(prices)}, before=old)
            await count_change(connection, PRICES)
            return await _find(connection, name)

    async def delete(self, name: str, actor: str) -> None:
        """Delete a plan. Raises Conflict with the number of tenants that have it."""
        check_plan(name)
        async with self._database.write() as connection:
            if await _locked(connection, name) is None:
                raise RecordNotFound(NO_PLAN, param="plan")
            used = (await connection.execute(select(func.count()).where(tenants.c.plan == name))).scalar_one()
            if used:
                whose = "1 tenant has" if used == 1 else f"{used} tenants have"
                raise Conflict(
                    f"The plan '{name}' cannot be deleted: {whose} it. Give them another plan first.",
                    code="plan_in_use",
                )
            await connection.execute(delete(plans).where(plans.c.name == name))
            await record_change(connection, actor, "plan.delete", name)
            await count_change(connection, PRICES)


_COUNT = select(func.count()).where(tenants.c.plan == plans.c.name).correlate(plans).scalar_subquery()
_PLANS = select(plans, _COUNT.label("num_tenants"))


async def _find(connection: AsyncConnection, name: str) -> TenantPlan:
    row = (await connection.execute(_PLANS.where(plans.c.name == name))).one_or_none()
    if row is None:
        raise RecordNotFound(NO_PLAN, param="plan")
    return _read(row)


async def _locked(connection: AsyncConnection, name: str) -> TenantPlan | None:
    """Return the plan, locked: until this transaction ends, no other one can change it or assign it to a tenant."""
    query = _PLANS.where(plans.c.name == name).with_for_update(of=plans)
    row = (await connection.execute(query)).one_or_none()
    return None if row is None else _read(row)


def _check_unchanged(now: TenantPlan | None, seen: TenantPlan | None) -> None:
    """Raise Changed if the plan's terms or prices differ from those in `seen`; None: any."""
    if seen is not None:
        check_unchanged(now and (now.terms, now.prices), (seen.terms, seen.prices))


async def _apply(connection: AsyncConnection, name: str, old: Terms, new: Terms) -> None:
    """Store the effective terms of the plan's tenants."""
    query = select(tenants).where(tenants.c.plan == name).order_by(tenants.c.id).with_for_update()
    changed = []
    for row in (await connection.execute(query)).all():
        tenant = read_tenant(row)
        own = own_terms(tenant.own, old, tenant.terms())
        values = term_columns(resolve(new, own), row) | {"own_terms": write_terms(own)}
        changed.append({"tenant_id": row.id, **values})
    if changed:
        await connection.execute(update(tenants).where(tenants.c.id == bindparam("tenant_id")), changed)


async def _count(connection: AsyncConnection, name: str) -> None:
    """Count a change of prices and of each tenant of the plan. The tenants come first, in the order of their ids."""
    await count_changes_of_plan(connection, name)
    await count_change(connection, PRICES)


def _earlier(before: TenantPlan, new: Mapping[str, Any]) -> dict[str, Any]:
    old = given_terms(before.terms) | {"prices": before.prices}
    return {field: old.get(field) for field in {**old, **new}}


def check_plan(name: str) -> None:
    """Raise RecordNotFound for an impossible name, before its characters reach a database that may refuse them."""
    if not PLAN_NAME.fullmatch(name):
        raise RecordNotFound(NO_PLAN, param="plan")


def _encode(prices: Mapping[str, Price]) -> str:
    return msgspec.json.encode(prices).decode()


def _read(row: Row[Any]) -> TenantPlan:
    return TenantPlan(
        name=row.name,
        terms=read_terms(row.terms),
        prices=msgspec.json.decode(row.prices, type=dict[str, Price]),
        updated_at=row.updated_at,
        num_tenants=row.num_tenants,
    )
