"""Tenants, with the effective values of their limits and other terms."""

import re
import uuid
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import UNSET
from sqlalchemy import Row, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.errors import BadRequest, NameTaken, RecordNotFound
from gateway.records.audit import record_change
from gateway.records.caches.changes import PRICES, count_change
from gateway.records.events.events import record_event
from gateway.records.sql.database import Database
from gateway.records.sql.tables import adapters, plans, prices, tenants
from gateway.records.tenants.limits import (
    DEFAULT_LIMITS,
    AdapterLimits,
    Limits,
    SoftBudgets,
    change_limits,
    read_adapter_limits,
    read_limits,
    read_soft_budgets,
    write_adapter_limits,
)
from gateway.records.tenants.terms import (
    BUDGET_WARN_AT,
    FIELDS,
    NO_TERMS,
    OnTokenLimit,
    Terms,
    own_terms,
    read_terms,
    resolve,
    write_terms,
)
from gateway.records.unchanged import check_unchanged

TENANT_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")


# In `model_limits`: the limits shared by all adapters without limits of their own.
ANY_ADAPTER = "*"
# Columns of texts for people and other systems; an empty text is stored as NULL.
TEXTS = ("display_name", "external_id", "contact", "note")
# Changeable fields other than terms.
OTHERS = ("plan", "suspended", "tags", *TEXTS)


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant. Its terms are the effective values: its own, else its plan's, else the defaults.

    weight: its share of a full engine, relative to others. priority: 0 (served first) to 9 (refused first under
    overload). ttft_target: time to first token that the tenant wants, in seconds; None: no target. on_token_limit:
    whether a request for more tokens than are left is refused or shortened. model_limits: further limits, by the
    tenant's own name of a model; "*" covers all adapters without limits of their own. own: the terms that the tenant
    sets itself. external_id: the tenant's id in another system. budget_warn_at: shares of its budgets at which there is
    an event. soft_budgets: amounts at which there is an event too; they refuse nothing.
    """

    id: str
    name: str
    limits: Limits = DEFAULT_LIMITS
    soft_budgets: SoftBudgets = SoftBudgets()
    weight: float = 1.0
    priority: int = 5
    ttft_target: float | None = None
    on_token_limit: OnTokenLimit = "refuse"
    suspended: bool = False
    budget_warn_at: tuple[float, ...] = BUDGET_WARN_AT
    model_limits: dict[str, Limits] = {}
    adapter_limits: AdapterLimits = AdapterLimits()
    created_at: datetime
    plan: str | None = None
    own: Terms = NO_TERMS
    display_name: str | None = None
    external_id: str | None = None
    contact: str | None = None
    note: str | None = None
    tags: tuple[str, ...] = ()

    def terms(self) -> dict[str, Any]:
        """Return the effective terms by field."""
        groups = (self.limits, self.soft_budgets, self.adapter_limits)
        limits = {name: value for group in groups for name, value in msgspec.structs.asdict(group).items()}
        return {name: limits[name] if name in limits else getattr(self, name) for name in FIELDS}


class Tenants:
    """The table of tenants. Raises RecordNotFound and NameTaken."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, name: str, fields: Mapping[str, Any], actor: str) -> Tenant:
        """Add a tenant. fields: as in `update`; other fields have defaults."""
        _check_name(name)
        try:
            async with self._database.write() as connection:
                own = msgspec.structs.replace(NO_TERMS, **_terms_of(fields))
                plan = await plan_terms(connection, fields.get("plan"), lock=True)
                values = {
                    "id": uuid.uuid4().hex,
                    "name": name,
                    "suspended": False,
                    "created_at": datetime.now(UTC),
                    **term_columns(resolve(plan, own)),
                    "own_terms": write_terms(own),
                    **_columns(fields),
                }
                row = (await connection.execute(insert(tenants).values(**values).returning(tenants))).one()
                await record_change(connection, actor, "tenant.create", name, dict(fields), tenant=name)
                await count_change(connection, row.id)
        except IntegrityError as error:
            raise _taken(error, name) from error
        return read_tenant(row)

    async def check_free(self, name: str) -> None:
        """Raise BadRequest for a name that no new tenant may have, NameTaken for the name of a tenant."""
        _check_name(name)
        async with self._database.read() as connection:
            query = select(tenants.c.id).where(tenants.c.name == name)
            if (await connection.execute(query)).first() is not None:
                raise _name_taken(name)

    async def get(self, name: str) -> Tenant:
        check_possible(name)
        async with self._database.read() as connection:
            row = (await connection.execute(select(tenants).where(tenants.c.name == name))).one_or_none()
        if row is None:
            raise unknown_tenant(name)
        return read_tenant(row)

    async def list(self) -> list[Tenant]:
        async with self._database.read() as connection:
            rows = (await connection.execute(select(tenants).order_by(tenants.c.name))).all()
        return [read_tenant(row) for row in rows]

    async def names(self, ids: Collection[str]) -> dict[str, str]:
        """Return the names of at most 1,000 tenants by id. Deleted ones are left out."""
        async with self._database.read() as connection:
            query = select(tenants.c.id, tenants.c.name).where(tenants.c.id.in_(ids))
            return {row.id: row.name for row in (await connection.execute(query)).all()}

    async def update(self, name: str, changes: Mapping[str, Any], actor: str, *, seen: Tenant | None = None) -> Tenant:
        """Change a tenant; see `change_tenant`."""
        check_possible(name)
        try:
            async with self._database.write() as connection:
                return await change_tenant(connection, name, changes, actor, seen)
        except IntegrityError as error:
            raise _taken(error, name) from error

    async def delete(self, name: str, actor: str, base_models: Collection[str]) -> None:
        """Delete a tenant with its keys, adapter names and their prices. Usage and audit rows stay.

        base_models: their prices stay, even if a name begins with the tenant's name and a slash.
        """
        check_possible(name)
        async with self._database.write() as connection:
            # Changes of adapters lock the names before the tenant. The same order here avoids a deadlock.
            owned = adapters.join(tenants, tenants.c.id == adapters.c.tenant_id)
            of_names = select(adapters.c.id).select_from(owned).where(tenants.c.name == name)
            await connection.execute(of_names.order_by(adapters.c.name).with_for_update(of=adapters))
            deleted = await connection.execute(delete(tenants).where(tenants.c.name == name).returning(tenants.c.id))
            tenant_id = deleted.scalar_one_or_none()
            if tenant_id is None:
                raise unknown_tenant(name)
            # The prices must not apply to another tenant that gets the name later.
            of_tenant = func.substr(prices.c.model, 1, len(name) + 1) == f"{name}/"
            await connection.execute(delete(prices).where(of_tenant, prices.c.model.not_in(base_models)))
            await record_change(connection, actor, "tenant.delete", name, tenant=name)
            await count_change(connection, tenant_id, PRICES)


async def change_tenant(
    connection: AsyncConnection, name: str, changes: Mapping[str, Any], actor: str, seen: Tenant | None = None
) -> Tenant:
    """Change a tenant in an open transaction.

    changes: the fields of Terms and Tenant to set, maybe none; `inherit`, names of terms that the tenant no longer sets
    itself. seen: the tenant on which the changes are based. Raises RecordNotFound, BadRequest for an unknown plan,
    IntegrityError for a used external id, Changed if the tenant is no longer as `seen`.
    """
    # A change of the plan locks the plan before its tenants. The same order here avoids a deadlock.
    new_plan = await plan_terms(connection, changes.get("plan"), lock=True)
    query = select(tenants).where(tenants.c.name == name)
    row = (await connection.execute(query.with_for_update())).one_or_none()
    if row is None:
        raise unknown_tenant(name)
    before = read_tenant(row)
    check_unchanged(before, seen)
    old_plan = await plan_terms(connection, row.plan)
    if "plan" not in changes:
        new_plan = old_plan
    inherited = dict.fromkeys(changes.get("inherit", ()), UNSET)
    own = own_terms(before.own, old_plan, before.terms())
    own = msgspec.structs.replace(own, **inherited | _terms_of(changes))
    values = term_columns(resolve(new_plan, own), row) | {"own_terms": write_terms(own)} | _columns(changes)
    await connection.execute(update(tenants).where(tenants.c.id == row.id).values(**values))
    tenant = read_tenant((await connection.execute(query)).one())
    await _record(connection, actor, before, tenant, changes)
    await count_change(connection, row.id)
    return tenant


async def _record(
    connection: AsyncConnection, actor: str, before: Tenant, after: Tenant, changes: Mapping[str, Any]
) -> None:
    """Record a change with the earlier values; a suspension and its end are actions of their own."""
    changed = dict(changes)
    if changed.get("suspended") is not None and before.suspended != after.suspended:
        action = "tenant.suspend" if changed.pop("suspended") else "tenant.resume"
        await record_change(connection, actor, action, after.name, tenant=after.name)
        if after.suspended:
            await record_event(connection, "tenant.suspended", {}, tenant_id=after.id, tenant=after.name)
        if not changed:
            return
    old = before.terms() | {name: getattr(before, name) for name in OTHERS}
    earlier = {name: old[name] for name in changed if name in old}
    await record_change(connection, actor, "tenant.update", after.name, changed, before=earlier, tenant=after.name)


async def plan_terms(
    connection: AsyncConnection, name: str | None, *, lock: bool = False, required: bool = False
) -> Terms:
    """Return the terms of a plan; None has none. lock: keep the plan as it is until the transaction ends.

    Raises BadRequest (param "plan") if there is no such plan and it is locked or required.
    """
    if name is None:
        return NO_TERMS
    query = select(plans.c.terms).where(plans.c.name == name)
    stored = None
    # Databases refuse a NUL in a text.
    if TENANT_NAME.fullmatch(name):
        stored = (await connection.execute(query.with_for_update(read=True) if lock else query)).scalar_one_or_none()
    if stored is None and (lock or required):
        raise BadRequest(f"plan: there is no plan '{name}'.", param="plan", code="unknown_plan")
    return read_terms(stored)


def term_columns(effective: Mapping[str, Any], row: Row[Any] | None = None) -> dict[str, Any]:
    """Return the column values of effective terms. row: the tenant's, whose limits of a newer release stay."""
    of_requests = {name: effective[name] for name in (*Limits.__struct_fields__, *SoftBudgets.__struct_fields__)}
    of_adapters = AdapterLimits(**{name: effective[name] for name in AdapterLimits.__struct_fields__})
    return {
        **change_limits(row, of_requests),
        "adapter_limits": write_adapter_limits(of_adapters),
        "model_limits": msgspec.json.encode(effective["model_limits"]).decode(),
        "budget_warn_at": _write_shares(effective["budget_warn_at"]),
        **{name: effective[name] for name in ("weight", "priority", "ttft_target", "on_token_limit")},
    }


def read_tenant(row: Row[Any]) -> Tenant:
    """Build a tenant from a row of the table, or of a join with its columns."""
    return Tenant(
        id=row.id,
        name=row.name,
        limits=read_limits(row),
        soft_budgets=read_soft_budgets(row),
        weight=row.weight,
        priority=row.priority,
        ttft_target=row.ttft_target,
        on_token_limit=row.on_token_limit,
        suspended=row.suspended,
        budget_warn_at=read_shares(row.budget_warn_at),
        model_limits=msgspec.json.decode(row.model_limits, type=dict[str, Limits]),
        adapter_limits=read_adapter_limits(row.adapter_limits),
        created_at=row.created_at,
        plan=row.plan,
        own=read_terms(row.own_terms),
        display_name=row.display_name,
        external_id=row.external_id,
        contact=row.contact,
        note=row.note,
        tags=tuple(tag for tag in (row.tags or "").split(",") if tag),
    )


def _check_name(name: str) -> None:
    """Raise BadRequest for a name that no new tenant may have."""
    if not TENANT_NAME.fullmatch(name):
        raise BadRequest(
            "Expected a tenant name of 1 to 64 characters a-z, 0-9, '.', '_' and '-', starting with a letter or digit.",
            param="name",
        )


def check_possible(name: str) -> None:
    """Raise RecordNotFound for an impossible name, before its characters reach a database that may refuse them."""
    if not TENANT_NAME.fullmatch(name):
        raise unknown_tenant(name)


def read_shares(stored: str | None) -> tuple[float, ...]:
    """Return the shares of a budget at which there is an event. stored: the column; NULL is the default."""
    return BUDGET_WARN_AT if stored is None else msgspec.json.decode(stored, type=tuple[float, ...])


def _write_shares(shares: tuple[float, ...]) -> str | None:
    return None if shares == BUDGET_WARN_AT else msgspec.json.encode(shares).decode()


def _terms_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name in FIELDS}


def _columns(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the column values of given fields that are no terms."""
    values = {name: fields[name] for name in ("plan", "suspended") if name in fields}
    values |= {name: fields[name] or None for name in TEXTS if name in fields}
    if "tags" in fields:
        tags = sorted(set(fields["tags"]))
        values["tags"] = f",{','.join(tags)}," if tags else None
    return values


def _taken(error: IntegrityError, name: str) -> NameTaken:
    if "external_id" in str(error.orig):
        return NameTaken("external_id: another tenant has this external id.", param="external_id")
    return _name_taken(name)


def _name_taken(name: str) -> NameTaken:
    return NameTaken(f"A tenant named '{name}' exists already.", param="name")


def unknown_tenant(name: str) -> RecordNotFound:
    return RecordNotFound(f"There is no tenant '{name[:64]}'.", param="tenant")
