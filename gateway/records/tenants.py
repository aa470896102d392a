"""Tenants and their limits."""

import re
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from sqlalchemy import Row, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from gateway.errors import BadRequest, NameTaken, RecordNotFound
from gateway.records import adapter_limits
from gateway.records.adapter_limits import AdapterLimits
from gateway.records.audit import record_change
from gateway.records.changes import PRICES, count_change
from gateway.records.database import Database
from gateway.records.limits import DEFAULT_LIMITS, Limits, change_limits, read_limits, write_limits
from gateway.records.tables import adapters, prices, tenants

TENANT_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
NO_TENANT = "There is no tenant of this name."


# In `model_limits`: the limits shared by all adapters without limits of their own.
ANY_ADAPTER = "*"

OnTokenLimit = Literal["refuse", "shorten"]


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant.

    weight: its share of a full engine, relative to others. priority: 0 (served first) to 9 (refused first under
    overload). ttft_target: time to first token that the tenant wants, in seconds; None: no target. on_token_limit:
    whether a request for more tokens than are left is refused or shortened. model_limits: further limits, by the
    tenant's own name of a model; "*" covers all adapters without limits of their own.
    """

    id: str
    name: str
    limits: Limits = DEFAULT_LIMITS
    weight: float = 1.0
    priority: int = 5
    ttft_target: float | None = None
    on_token_limit: OnTokenLimit = "refuse"
    suspended: bool = False
    model_limits: dict[str, Limits] = {}
    adapter_limits: AdapterLimits = AdapterLimits()
    created_at: datetime


class Tenants:
    """The table of tenants. Raises RecordNotFound and NameTaken."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, name: str, fields: Mapping[str, Any], actor: str) -> Tenant:
        """Add a tenant. fields: as in `update`; other fields have defaults."""
        if not TENANT_NAME.fullmatch(name):
            raise BadRequest(
                "Expected a tenant name of 1 to 64 characters a-z, 0-9, '.', '_' and '-', "
                "starting with a letter or digit.",
                param="name",
            )
        limits, of_adapters, others = _split(fields)
        tenant = Tenant(
            id=uuid.uuid4().hex,
            name=name,
            limits=msgspec.structs.replace(DEFAULT_LIMITS, **limits),
            adapter_limits=AdapterLimits(**of_adapters),
            created_at=datetime.now(UTC),
            **others,
        )
        try:
            async with self._database.write() as connection:
                await connection.execute(insert(tenants).values(**_values(tenant)))
                await record_change(connection, actor, "tenant.create", name, dict(fields), tenant=name)
                await count_change(connection, tenant.id)
        except IntegrityError as error:
            raise NameTaken(f"A tenant named '{name}' exists already.", param="name") from error
        return tenant

    async def get(self, name: str) -> Tenant:
        _check_possible(name)
        async with self._database.read() as connection:
            row = (await connection.execute(select(tenants).where(tenants.c.name == name))).one_or_none()
        if row is None:
            raise RecordNotFound(NO_TENANT, param="tenant")
        return read_tenant(row)

    async def list(self) -> list[Tenant]:
        async with self._database.read() as connection:
            rows = (await connection.execute(select(tenants).order_by(tenants.c.name))).all()
        return [read_tenant(row) for row in rows]

    async def update(self, name: str, changes: Mapping[str, Any], actor: str) -> Tenant:
        """Change a tenant. changes: the fields of Limits, AdapterLimits and Tenant to set, maybe none."""
        _check_possible(name)
        of_requests, of_adapters, values = _split(changes)
        if "model_limits" in values:
            values["model_limits"] = _encode(values["model_limits"])
        async with self._database.write() as connection:
            before = None
            if of_requests or of_adapters:
                query = select(tenants).where(tenants.c.name == name).with_for_update()
                before = (await connection.execute(query)).one_or_none()
            if before is not None and of_requests:
                values |= change_limits(before, of_requests)
            if before is not None and of_adapters:
                limits = msgspec.structs.replace(adapter_limits.read_limits(before.adapter_limits), **of_adapters)
                values["adapter_limits"] = adapter_limits.write_limits(limits)
            if values:
                await connection.execute(update(tenants).where(tenants.c.name == name).values(**values))
            row = (await connection.execute(select(tenants).where(tenants.c.name == name))).one_or_none()
            if row is None:
                raise RecordNotFound(NO_TENANT, param="tenant")
            await record_change(connection, actor, "tenant.update", name, dict(changes), tenant=name)
            await count_change(connection, row.id)
        return read_tenant(row)

    async def delete(self, name: str, actor: str, base_model: str) -> None:
        """Delete a tenant with its keys, adapter names and their prices. Usage and audit rows stay.

        base_model: its price stays, even if its name begins like those of the tenant's adapters.
        """
        _check_possible(name)
        async with self._database.write() as connection:
            # The names are locked before the tenant, as by changes of adapters; otherwise the two wait for each other.
            owned = adapters.join(tenants, tenants.c.id == adapters.c.tenant_id)
            of_names = select(adapters.c.id).select_from(owned).where(tenants.c.name == name)
            await connection.execute(of_names.order_by(adapters.c.name).with_for_update(of=adapters))
            deleted = await connection.execute(delete(tenants).where(tenants.c.name == name).returning(tenants.c.id))
            tenant_id = deleted.scalar_one_or_none()
            if tenant_id is None:
                raise RecordNotFound(NO_TENANT, param="tenant")
            # Another tenant may get the name later.
            of_tenant = func.substr(prices.c.model, 1, len(name) + 1) == f"{name}/"
            await connection.execute(delete(prices).where(of_tenant, prices.c.model != base_model))
            await record_change(connection, actor, "tenant.delete", name, tenant=name)
            await count_change(connection, tenant_id, PRICES)


def read_tenant(row: Row[Any]) -> Tenant:
    """Build a tenant from a row of the table, or of a join with its columns."""
    return Tenant(
        id=row.id,
        name=row.name,
        limits=read_limits(row),
        weight=row.weight,
        priority=row.priority,
        ttft_target=row.ttft_target,
        on_token_limit=row.on_token_limit,
        suspended=row.suspended,
        model_limits=msgspec.json.decode(row.model_limits, type=dict[str, Limits]),
        adapter_limits=adapter_limits.read_limits(row.adapter_limits),
        created_at=row.created_at,
    )


def _values(tenant: Tenant) -> dict[str, Any]:
    """Return the column values of a tenant."""
    encoded = {
        **write_limits(tenant.limits),
        "model_limits": _encode(tenant.model_limits),
        "adapter_limits": adapter_limits.write_limits(tenant.adapter_limits),
    }
    return msgspec.structs.asdict(tenant) | encoded


def _split(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return (limits on requests, limits on adapters, other fields)."""
    of_requests = {key: value for key, value in fields.items() if key in Limits.__struct_fields__}
    of_adapters = {key: value for key, value in fields.items() if key in adapter_limits.FIELDS}
    others = {key: value for key, value in fields.items() if key not in of_requests and key not in of_adapters}
    return of_requests, of_adapters, others


def _encode(model_limits: Mapping[str, Limits]) -> str:
    return msgspec.json.encode(model_limits).decode()


def _check_possible(name: str) -> None:
    """Raise RecordNotFound for an impossible name, before its characters reach a database that may refuse them."""
    if not TENANT_NAME.fullmatch(name):
        raise RecordNotFound(NO_TENANT, param="tenant")
