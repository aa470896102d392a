"""Checks that a tenant's adapters fit its room in the store."""

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.errors import AdapterLimitExceeded, RecordNotFound
from gateway.records.adapters.removed_versions import uncollected
from gateway.records.adapters.rows import lock_tenant
from gateway.records.sql.sums import int_sum
from gateway.records.sql.tables import adapter_versions, adapters
from gateway.records.tenants.limits import read_adapter_limits

# Versions of a name that stay on record and count; older ones are removed.
KEPT_VERSIONS = 20
# Removed contents stay in the store for a while. Including them, a tenant may have this many times its limit, so that a
# tenant at its limit can still replace all its adapters.
UNCOLLECTED_FACTOR = 2


async def check_room(
    connection: AsyncConnection, tenant_id: str, digest: str, new_bytes: int, *, new_name: bool
) -> None:
    """Lock the tenant's row and check that another version fits. Raises AdapterLimitExceeded, RecordNotFound."""
    row = await lock_tenant(connection, tenant_id)
    if row is None:
        raise RecordNotFound("The tenant of this name no longer exists.", param="tenant")
    limits = read_adapter_limits(row.adapter_limits)
    names, _ = await _stored(connection, tenant_id)
    if new_name and limits.max_adapters is not None and names >= limits.max_adapters:
        raise AdapterLimitExceeded(
            f"max_adapters: this tenant has {names} of {limits.max_adapters} adapters; delete one first.",
            param="max_adapters",
        )
    if limits.max_adapter_bytes is not None:
        await check_bytes(connection, tenant_id, new_bytes, limits.max_adapter_bytes, digest)


async def check_bytes(
    connection: AsyncConnection,
    tenant_id: str,
    new_bytes: int,
    limit: int,
    digest: str | None = None,
    unfinished: int = 0,
) -> None:
    """Check that an upload fits. digest: digest of its content. None, before it is read, ignores removed versions.

    unfinished: declared bytes of the tenant's other uploads in parts.
    Raises AdapterLimitExceeded.
    """
    _, used = await _stored(connection, tenant_id)
    problem = None
    if used + unfinished + new_bytes > limit:
        others = f"{unfinished} belong to unfinished uploads, " if unfinished else ""
        problem = f"{used} bytes are stored, {others}this upload has {new_bytes}, and {limit} are allowed; delete an "
        problem += "adapter or abort an upload first." if unfinished else "adapter first."
    elif digest is not None:
        removed, most = await uncollected(connection, tenant_id, digest), limit * UNCOLLECTED_FACTOR
        if used + removed + new_bytes > most:
            problem = (
                f"{used} bytes are stored, the store still holds {removed} of removed versions, this upload has "
                f"{new_bytes}, and {most} are allowed together; removed versions leave the store within two hours. Try "
                "again later."
            )
    if problem is not None:
        raise AdapterLimitExceeded(f"max_adapter_bytes: {problem}", param="max_adapter_bytes")


async def _stored(connection: AsyncConnection, tenant_id: str) -> tuple[int, int]:
    """Return (names, bytes of all versions with content) of a tenant."""
    query = (
        select(func.count(adapters.c.id.distinct()), int_sum(adapter_versions.c.num_bytes))
        .select_from(adapters)
        .join(adapter_versions, adapter_versions.c.adapter_id == adapters.c.id)
        .where(adapters.c.tenant_id == tenant_id, adapter_versions.c.digest != "")
    )
    names, used = (await connection.execute(query)).one()
    return names, used
