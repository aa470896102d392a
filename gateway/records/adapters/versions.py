"""Versions of an adapter: immutable content under a number, which its name uses only once.

    validating ─▶ ready ◀─▶ retired ─▶ deleted
         └──────▶ rejected ─▶ deleted

Only ready versions are served. A deleted version leaves the table; removed_versions.py remembers it.
Every change locks the row of the adapter's name first.
"""

import uuid
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import msgspec
from sqlalchemy import Row, and_, delete, func, insert, select, tuple_, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.errors import AdapterInUse, BadRequest
from gateway.records.adapters.aliases import move_latest, references
from gateway.records.adapters.limits import KEPT_VERSIONS
from gateway.records.adapters.pushes import Push, admit
from gateway.records.adapters.removed_versions import remove_versions
from gateway.records.adapters.rows import (
    Reason,
    Version,
    is_over,
    lock_known_name,
    lock_name,
    lock_tenant,
    read_version,
    select_versions,
    unknown_name,
    unknown_version,
    versions_of,
)
from gateway.records.adapters.saved_mixtures import check_not_saved, uses_of
from gateway.records.audit import record_change
from gateway.records.bases.checks import check_not_base
from gateway.records.caches.changes import count_change
from gateway.records.events.events import record_event
from gateway.records.sql.database import Database
from gateway.records.sql.tables import adapter_versions, adapters, removed_versions
from gateway.records.tenants.tenants import Tenant
from gateway.records.version_state import READY, State
from gateway.sharing.concurrency import ConcurrencyLimiter
from wire.model_names import Reference, version_name

# Limits: a tenant's refused uploads on record, and deleted versions in a listing.
KEPT_REFUSED, SHOWN_DELETED = 100, 100
# Limits: reasons of a rejection, and characters of each.
MAX_REASONS, MAX_REASON_CHARS = 20, 500
# Changes of a version's state.
_MAY_FOLLOW: dict[State, tuple[State, ...]] = {
    "validating": ("ready", "rejected"),
    "ready": ("retired",),
    "retired": ("ready",),
}

Changed = Callable[[bool], Awaitable[None]]


class Versions:
    """Changes and listings of versions.

    reads: limiter of the tenants' listings. changed: called after each change of a name's meaning, with whether the
    name had one before.

    Raises RecordNotFound, AdapterInUse, BadRequest, AdapterLimitExceeded.
    """

    def __init__(self, database: Database, reads: ConcurrencyLimiter, changed: Changed) -> None:
        self._database = database
        self._reads = reads
        self._changed = changed

    async def add(self, tenant: Tenant, name: str, push: Push, actor: str) -> Version:
        """Add a version. `latest` moves to it if it is ready. Repeating the digest of `latest` changes nothing.

        The content is published between two transactions, so that a slow store holds no lock. A version that another
        change forbids in between is refused by the second one, and the collection of unused content removes its files.
        """
        async with self._database.write() as connection:
            await admit(connection, tenant, name, push)
        await push.publish()
        try:
            version, change = await self._add(tenant, name, push, actor)
        except IntegrityError:
            # Another upload created the name in between (PostgreSQL); this upload is its next version.
            version, change = await self._add(tenant, name, push, actor)
        if change is not None:
            await self._changed(change)
        return version

    async def _add(self, tenant: Tenant, name: str, push: Push, actor: str) -> tuple[Version, bool | None]:
        """Return the version, and whether the name had a meaning before; None if nothing has changed."""
        content: dict[str, Any] = {"digest": push.digest, "rank": push.rank, "num_bytes": push.num_bytes}
        now = datetime.now(UTC)
        async with self._database.write() as connection:
            own, present, repeated = await admit(connection, tenant, name, push)
            if repeated is not None:
                return repeated, None
            own = own or await _create(connection, tenant.id, name, now)
            number = await _next_number(connection, own, present)
            row = {"adapter_id": own.id, "version": number, "created_at": now, "state": push.state, **content}
            row["base_id"] = push.base or None
            await connection.execute(insert(adapter_versions).values(**row))
            if push.state == READY:
                await move_latest(connection, own, number)
            await _remove_old(connection, own, present, now, latest_moved=push.state == READY)
            target, detail = f"{tenant.name}/{name}", {"version": number, "digest": push.digest}
            await record_change(connection, actor, "adapter.push", target, detail, tenant=tenant.name)
            await count_change(connection, tenant.id)
        version = Version(name=name, version=number, state=push.state, created_at=now, base=push.base, **content)
        return version, own.current_version > 0

    async def refuse(self, tenant: Tenant, name: str, reasons: Sequence[Reason]) -> None:
        """Record a refused upload as a rejected version without content, unless the tenant was deleted."""
        for _ in range(2):
            # Another upload may have created the name in between (PostgreSQL).
            with suppress(IntegrityError):
                await self._refuse(tenant, name, reasons)
                break

    async def _refuse(self, tenant: Tenant, name: str, reasons: Sequence[Reason]) -> None:
        now = datetime.now(UTC)
        async with self._database.write() as connection:
            own = await lock_name(connection, tenant.id, name)
            if own is None:
                await lock_tenant(connection, tenant.id)
                await check_not_saved(connection, tenant.id, name)
                await check_not_base(connection, name, "adapter")
                own = await _create(connection, tenant.id, name, now)
            query = select(func.max(adapter_versions.c.version)).where(adapter_versions.c.adapter_id == own.id)
            number = await _next_number(connection, own, [(await connection.execute(query)).scalar() or 0])
            row = {"adapter_id": own.id, "version": number, "created_at": now, "reasons": _store_reasons(reasons)}
            empty = {"digest": "", "rank": 0, "num_bytes": 0, "state": "rejected"}
            await connection.execute(insert(adapter_versions).values(**row, **empty))
            await _sweep_refused(connection, tenant.id)
            await _report_rejection(connection, tenant, version_name(name, number))

    async def set_state(
        self, tenant: Tenant, name: str, version: int, state: State, actor: str, reasons: Sequence[Reason] = ()
    ) -> Version:
        """Change a version's state, from validating to ready or rejected, or between ready and retired.

        `latest` moves to a version that has been validated, unless it refers to a newer one. reasons: reasons of a
        rejection, else empty.
        """
        values = {"state": state, "reasons": _store_reasons(reasons) if reasons else None}
        return await self._change(tenant, name, version, values, actor, force=True)

    async def change(
        self, tenant: Tenant, name: str, version: int, values: dict[str, Any], actor: str, *, force: bool = False
    ) -> Version:
        """Change `state` (ready or retired), `expires_at` or `pinned` of a version that has been validated.

        Raises AdapterInUse, unless forced, if an alias refers to a version that is to be retired.
        """
        if "state" in values:
            found = await self.get(tenant, name, version)
            if found.state == "validating":
                raise BadRequest("state: the version is still being validated.", param="state")
        return await self._change(tenant, name, version, values, actor, force=force)

    async def _change(
        self, tenant: Tenant, name: str, version: int, values: dict[str, Any], actor: str, *, force: bool
    ) -> Version:
        async with self._database.write() as connection:
            own = await lock_known_name(connection, tenant.id, name)
            before = (await versions_of(connection, tenant.id, name)).get(version)
            if before is None:
                raise unknown_version()
            _check_change(before, values)
            if values.get("state") == "retired" and not force:
                _refuse_in_use(before, (await references(connection, own)).get(version, ()))
            this = and_(adapter_versions.c.adapter_id == own.id, adapter_versions.c.version == version)
            await connection.execute(update(adapter_versions).where(this).values(**values))
            becomes_ready = before.state == "validating" and values.get("state") == READY
            if becomes_ready and version > own.current_version and not is_over(before.expires_at):
                await move_latest(connection, own, version)
            target = f"{tenant.name}/{version_name(name, version)}"
            await record_change(connection, actor, "adapter.version", target, _shown(values), tenant=tenant.name)
            if values.get("state") == "rejected":
                await _report_rejection(connection, tenant, version_name(name, version))
            await count_change(connection, tenant.id)
            after = (await versions_of(connection, tenant.id, name))[version]
        await self._changed(True)
        return after

    async def list(self, tenant: Tenant, name: str) -> list[Version]:
        """Return the versions of a name, by number, with its last deleted ones."""
        async with self._reads.place(tenant.id), self._database.read() as connection:
            rows = (await connection.execute(select_versions(tenant.id, name))).all()
            if not rows:
                raise unknown_name(name)
            found = [read_version(row) for row in rows]
            table = removed_versions
            gone = (
                select(table.c.version, table.c.digest, table.c.num_bytes)
                .where(table.c.tenant_id == tenant.id, table.c.name == name, table.c.version.is_not(None))
                .where(table.c.version.not_in([each.version for each in found]))
                .order_by(table.c.version.desc())
                .limit(SHOWN_DELETED)
            )
            deleted = (await connection.execute(gone)).all()
        found += [Version(name=name, version=row.version, state="deleted", digest=row.digest) for row in deleted]
        return sorted(found, key=lambda each: each.version)

    async def get(self, tenant: Tenant, name: str, version: int) -> Version:
        found = [each for each in await self.list(tenant, name) if each.version == version]
        if not found:
            raise unknown_version()
        return found[0]

    async def delete(
        self,
        tenant: Tenant,
        name: str,
        version: int | None,
        actor: str,
        *,
        running: Collection[int] = (),
        force: bool = False,
    ) -> None:
        """Delete a version, or with None the name with all its versions.

        The content stays in the store until it is collected. running: the name's versions that running requests use.
        Raises AdapterInUse, unless forced, if one of these, an alias or a saved mixture is in the way; `latest` does
        not protect the whole name.
        """
        async with self._database.write() as connection:
            own = await lock_known_name(connection, tenant.id, name)
            present = await versions_of(connection, tenant.id, name)
            if version is not None and version not in present:
                raise unknown_version()
            doomed = [version] if version is not None else list(present)
            uses = {} if force else await references(connection, own, besides_latest=version is None)
            if version is None and not force:
                _refuse_named(name, await uses_of(connection, tenant.id, name))
            for number in () if force else doomed:
                is_running = ["running requests"] if number in running else []
                _refuse_in_use(present[number], [*uses.get(number, ()), *is_running])
            which = and_(adapters.c.id == own.id, adapter_versions.c.version.in_(doomed))
            await remove_versions(connection, tenant.id, which, datetime.now(UTC))
            if version is None:
                await connection.execute(delete(adapters).where(adapters.c.id == own.id))
            else:
                await _remove_empty(connection, own.id)
            target = f"{tenant.name}/{name}" if version is None else f"{tenant.name}/{version_name(name, version)}"
            detail = {"forced": True} if force else None
            await record_change(connection, actor, "adapter.delete", target, detail, tenant=tenant.name)
            await count_change(connection, tenant.id)
        await self._changed(True)


async def _report_rejection(connection: AsyncConnection, tenant: Tenant, adapter: str) -> None:
    data = {"adapter": adapter}
    await record_event(connection, "adapter.rejected", data, tenant_id=tenant.id, tenant=tenant.name)


async def _create(connection: AsyncConnection, tenant_id: str, name: str, now: datetime) -> Row[Any]:
    new = {"id": uuid.uuid4().hex, "tenant_id": tenant_id, "name": name, "current_version": 0, "created_at": now}
    return (await connection.execute(insert(adapters).values(**new).returning(adapters))).one()


async def _next_number(connection: AsyncConnection, name_row: Row[Any], present: Collection[int]) -> int:
    """Return the next version number, above all numbers of the name on record."""
    table = removed_versions
    query = select(func.max(table.c.version)).where(
        table.c.tenant_id == name_row.tenant_id, table.c.name == name_row.name
    )
    removed = (await connection.execute(query)).scalar() or 0
    return 1 + max(name_row.current_version, removed, *present, 0)


async def _sweep_refused(connection: AsyncConnection, tenant_id: str) -> None:
    """Remove a tenant's oldest refused uploads beyond KEPT_REFUSED."""
    table = adapter_versions
    query = (
        select(table.c.adapter_id, table.c.version)
        .join(adapters, adapters.c.id == table.c.adapter_id)
        .where(adapters.c.tenant_id == tenant_id, table.c.digest == "")
        .order_by(table.c.created_at.desc(), table.c.version.desc())
        .offset(KEPT_REFUSED)
        .limit(KEPT_REFUSED)
    )
    old = [tuple(row) for row in (await connection.execute(query)).all()]
    if not old:
        return
    # A name that another transaction has locked is left to the next sweep, so that none waits for the other.
    some = select(adapters.c.id).where(adapters.c.id.in_({adapter_id for adapter_id, _ in old}))
    locked = set((await connection.execute(some.with_for_update(skip_locked=True))).scalars())
    doomed = [key for key in old if key[0] in locked]
    if doomed:
        await connection.execute(delete(table).where(tuple_(table.c.adapter_id, table.c.version).in_(doomed)))
    for adapter_id in locked:
        await _remove_empty(connection, adapter_id)


async def _remove_empty(connection: AsyncConnection, adapter_id: str) -> None:
    """Remove an adapter without versions. The caller holds its lock."""
    some = select(adapter_versions.c.version).where(adapter_versions.c.adapter_id == adapter_id).exists()
    await connection.execute(delete(adapters).where(adapters.c.id == adapter_id, ~some))


async def _remove_old(
    connection: AsyncConnection, name_row: Row[Any], before: dict[int, Version], now: datetime, *, latest_moved: bool
) -> None:
    """Remove the versions beyond the name's newest KEPT_VERSIONS. before: the versions on record before the newest one.

    A pinned version, and one that an alias refers to, stays. latest_moved: whether `latest` refers to the newest one;
    while that is validated, `latest` still refers to the version in `name_row`.
    """
    numbers = sorted((each.version for each in before.values() if each.digest), reverse=True)
    old = [number for number in numbers[KEPT_VERSIONS - 1 :] if not before[number].pinned]
    uses = await references(connection, name_row, besides_latest=latest_moved) if old else {}
    if doomed := [number for number in old if number not in uses]:
        which = and_(adapters.c.id == name_row.id, adapter_versions.c.version.in_(doomed))
        await remove_versions(connection, name_row.tenant_id, which, now)


def _check_change(before: Version, values: dict[str, Any]) -> None:
    shown, state = version_name(before.name, before.version), values.get("state", before.state)
    if state != before.state and state not in _MAY_FOLLOW.get(before.state, ()):
        raise BadRequest(f"state: {shown} is {before.state} and cannot become {state}.", param="state")
    # A version may reach its end while it is validated.
    ends_meanwhile = before.state == "validating" and "expires_at" not in values
    expires_at = values.get("expires_at", before.expires_at)
    if (state == READY or values.get("expires_at") is not None) and is_over(expires_at) and not ends_meanwhile:
        raise BadRequest("expires_at: expected a time in the future, or null.", param="expires_at")


_REMEDIES = {
    "alias": "move or delete the alias",
    "saved mixture": "change or delete the mixture",
    "running": "wait until the requests end",
}


def _refuse_in_use(version: Version, uses: Sequence[str]) -> None:
    if uses:
        remedies = [advice for kind, advice in _REMEDIES.items() if any(use.startswith(kind) for use in uses)]
        raise AdapterInUse(
            f"{version_name(version.name, version.version)} is in use by {', '.join(uses)}. First "
            f"{' and '.join(remedies)}, or use --force or ?force=true: then running requests finish, and new ones get "
            "a 404.",
        )


def _refuse_named(name: str, uses: Sequence[tuple[str, Reference]]) -> None:
    if uses:
        named = ", ".join(dict.fromkeys(f"saved mixture '{mixture}'" for mixture, _ in uses))
        raise AdapterInUse(
            f"{name} is in use by {named}. Change or delete the mixtures, or use --force or ?force=true: then requests "
            "for these mixtures get a 404.",
        )


def _store_reasons(reasons: Sequence[Reason]) -> str:
    some = [msgspec.structs.replace(each, message=each.message[:MAX_REASON_CHARS]) for each in reasons[:MAX_REASONS]]
    return msgspec.json.encode(some).decode()


def _shown(values: dict[str, Any]) -> dict[str, Any]:
    """Return the changed values for the audit log."""
    return {
        key: value.isoformat() if isinstance(value, datetime) else value
        for key, value in values.items()
        if key != "reasons"
    }
