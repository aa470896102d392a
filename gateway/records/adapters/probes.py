"""Results of the probes of adapters' versions, kept with the version."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import and_, delete, func, insert, select

from gateway.errors import RecordNotFound
from gateway.records.adapters.rows import check_possible, unknown_version
from gateway.records.bases.base import FIRST, Binding
from gateway.records.caches.changes import count_change
from gateway.records.sql.database import Database
from gateway.records.sql.tables import adapter_probes, adapter_versions, adapters, tenants
from gateway.records.tenants.tenants import Tenant
from gateway.records.version_state import READY
from wire.probes import AdapterProbe

# Limit of one tenant's unprobed versions in a listing.
PER_TENANT = 2


class Recorded(NamedTuple):
    """The newest probe of a version, its time, and the base model that the version is bound to."""

    probed_at: datetime
    probe: AdapterProbe
    base_digest: str | None


class Unprobed(msgspec.Struct, frozen=True):
    """A version without a probe. base: id of its base model."""

    tenant_name: str
    name: str
    version: int
    digest: str
    base: str


class Bound(msgspec.Struct, frozen=True):
    """A version, its base model (an id), and the weights that it is bound to. tenant: its name."""

    base: str
    base_digest: str | None
    tenant: str
    name: str
    version: int
    state: str


class Probes:
    """Table of probes; a version's row is removed with the version."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def record(self, tenant: Tenant, name: str, version: int, probe: AdapterProbe) -> bool:
        """Keep a version's newest probe, and bind the version to its base model. A deleted version is skipped.

        A probe that found faults on another base model does not change the binding. Return whether the binding of an
        earlier probe has changed.
        """
        owned = and_(adapters.c.tenant_id == tenant.id, adapters.c.name == name, adapter_versions.c.version == version)
        joined = adapters.join(adapter_versions, adapter_versions.c.adapter_id == adapters.c.id)
        query = select(adapters.c.id).select_from(joined).where(owned).with_for_update()
        table = adapter_probes
        async with self._database.write() as connection:
            adapter_id = (await connection.execute(query)).scalar_one_or_none()
            if adapter_id is None:
                return False
            this = and_(table.c.adapter_id == adapter_id, table.c.version == version)
            before = (await connection.execute(select(table.c.base_digest).where(this))).one_or_none()
            await connection.execute(delete(table).where(this))
            base = probe.base_digest if before is None or not probe.reasons else before.base_digest
            row = {"adapter_id": adapter_id, "version": version, "base_digest": base}
            is_bound = base is not None if before is None else before.base_digest != base
            if is_bound:
                await count_change(connection, tenant.id)
            result = msgspec.json.encode(probe).decode()
            await connection.execute(insert(table).values(**row, result=result, probed_at=datetime.now(UTC)))
        return is_bound and before is not None

    async def get(self, tenant: Tenant, name: str, version: int) -> Recorded:
        """Return a version's newest probe. Raises RecordNotFound."""
        check_possible(name)
        table = adapter_probes
        joined = adapter_versions.join(adapters, adapter_versions.c.adapter_id == adapters.c.id).outerjoin(
            table, and_(table.c.adapter_id == adapters.c.id, table.c.version == adapter_versions.c.version)
        )
        query = (
            select(table.c.probed_at, table.c.result, table.c.base_digest)
            .select_from(joined)
            .where(adapters.c.tenant_id == tenant.id, adapters.c.name == name, adapter_versions.c.version == version)
        )
        async with self._database.read() as connection:
            row = (await connection.execute(query)).one_or_none()
        if row is None:
            raise unknown_version()
        if row.result is None:
            raise RecordNotFound("The version has not been probed.", param="version")
        return Recorded(row.probed_at, msgspec.json.decode(row.result, type=AdapterProbe), row.base_digest)

    async def binding(self, tenant: Tenant, name: str, version: int) -> Binding:
        """Return the engines on which a version's requests may run. Raises RecordNotFound."""
        check_possible(name)
        own, table = adapter_versions, adapter_probes
        query = (
            select(own.c.base_id, table.c.base_digest)
            .join_from(adapters, own, own.c.adapter_id == adapters.c.id)
            .outerjoin(table, and_(table.c.adapter_id == adapters.c.id, table.c.version == own.c.version))
            .where(adapters.c.tenant_id == tenant.id, adapters.c.name == name, own.c.version == version)
        )
        async with self._database.read() as connection:
            row = (await connection.execute(query)).one_or_none()
        if row is None:
            raise unknown_version()
        return Binding.of(row.base_id, row.base_digest)

    async def missing(self) -> Sequence[Unprobed]:
        """Return the versions that are validating: each tenant's PER_TENANT oldest."""
        own = adapter_versions
        place = func.row_number().over(partition_by=adapters.c.tenant_id, order_by=(own.c.created_at, own.c.version))
        ranked: Any = (
            select(tenants.c.name.label("tenant_name"), adapters.c.name, own.c.version, own.c.digest, own.c.base_id)
            .add_columns(place.label("n"))
            .join_from(own, adapters, own.c.adapter_id == adapters.c.id)
            .join(tenants, tenants.c.id == adapters.c.tenant_id)
            .where(own.c.state == "validating")
            .subquery()
        )
        async with self._database.read() as connection:
            rows = (await connection.execute(select(ranked).where(ranked.c.n <= PER_TENANT))).all()
        return [Unprobed(row.tenant_name, row.name, row.version, row.digest, row.base_id or FIRST) for row in rows]

    async def adapters_by_base(self) -> dict[str, int]:
        """Return the number of adapters with a version that is served or validated, by their base's id."""
        own = adapter_versions.c
        base_id = func.coalesce(own.base_id, FIRST)
        query = select(base_id, func.count(own.adapter_id.distinct())).group_by(base_id)
        async with self._database.read() as connection:
            rows = await connection.execute(query.where(own.state.in_((READY, "validating"))))
            return {row[0]: row[1] for row in rows}

    async def bound(self) -> Sequence[Bound]:
        """Return the versions that are not rejected, by tenant, name and number."""
        own, table = adapter_versions, adapter_probes
        query = (
            select(func.coalesce(own.c.base_id, FIRST), table.c.base_digest)
            .add_columns(tenants.c.name, adapters.c.name, own.c.version, own.c.state)
            .join_from(own, adapters, adapters.c.id == own.c.adapter_id)
            .join(tenants, tenants.c.id == adapters.c.tenant_id)
            .outerjoin(table, and_(own.c.adapter_id == table.c.adapter_id, own.c.version == table.c.version))
            .where(own.c.state != "rejected")
            .order_by(tenants.c.name, adapters.c.name, own.c.version)
        )
        async with self._database.read() as connection:
            return [Bound(*row) for row in (await connection.execute(query)).all()]
