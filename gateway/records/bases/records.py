"""Base models in SQL. Every gateway keeps a copy of all of them in memory (registry.py)."""

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Row, func, insert, or_, select, text, update
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.errors import Conflict, NameTaken, RecordNotFound, Unavailable
from gateway.records.audit import record_change
from gateway.records.bases.base import FIRST, Base, BaseState, Shape
from gateway.records.bases.table import bases
from gateway.records.caches.changes import BASES, count_change
from gateway.records.sql.database import Database
from gateway.records.sql.lock_waits import waiting_at_most
from gateway.records.sql.tables import adapter_versions, adapters, saved_mixtures, tenants
from gateway.records.unchanged import check_unchanged
from gateway.records.version_state import READY
from wire.model_names import parse_reference, version_name

# Maximum number of versions that an error names.
SHOWN_VERSIONS = 5
# Maximum wait of a change for the table's lock. Uploads that want to add a version queue behind this wait.
LOCK_SECONDS = 3.0
# Seconds until the next attempt after BasesLocked.
RETRY_SECONDS = 5

# Fields of the base of LORAPLEX_BASE_MODEL that a gateway stores.
_STORED = ("name", "context_length", "tokenizer", "shape")


def _is_stored(base: Base, row: Base) -> bool:
    return all(getattr(base, name) == getattr(row, name) for name in _STORED)


class BasesLocked(Unavailable):
    """Another transaction has kept the table for LOCK_SECONDS, such as that of a gateway that stands still."""

    code = "base_models_locked"

    def __init__(self) -> None:
        super().__init__(
            "The base models cannot be changed at present: another change, or the record of an adapter's upload, keeps "
            "their table locked. Try again shortly.",
            retry_after=RETRY_SECONDS,
        )


class BaseRecords:
    """Queries and changes of the table. Raises RecordNotFound, NameTaken, Conflict, Unavailable."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @asynccontextmanager
    async def _changing(self) -> AsyncIterator[AsyncConnection]:
        """Open a transaction that excludes other changes of the table, because each change checks all rows.

        Raises BasesLocked.
        """
        async with waiting_at_most(self._database, LOCK_SECONDS, BasesLocked) as connection:
            if self._database.dialect == "postgresql":
                await connection.execute(text("LOCK TABLE bases IN SHARE ROW EXCLUSIVE MODE"))
            yield connection

    async def list(self) -> Sequence[Base]:
        """Return all bases, the oldest first."""
        async with self._database.read() as connection:
            return await _all(connection)

    async def ensure(self, own: Base) -> None:
        """Store the base of LORAPLEX_BASE_MODEL: add it to an empty table, else update the base of its name. A
        single base with another name is renamed, because a deployment of one base may change the setting.

        Raises Conflict if there are several bases and none has the name.
        """
        if any(_is_stored(own, each) for each in await self.list()):
            # Without the lock: it waits for running uploads.
            return
        async with self._changing() as connection:
            known = await _all(connection)
            before = next((each for each in known if each.name == own.name), known[0] if len(known) == 1 else None)
            if before is None and known:
                names = ", ".join(each.name for each in known)
                raise Conflict(f"Expected the name of a base on record ({names}); `loraplex base add` adds another.")
            now = datetime.now(UTC)
            values = {name: getattr(own, name) for name in _STORED} | {"shape": _json(own.shape)}
            if before is None:
                row = {"id": FIRST, "digest": None, "former": "[]", "state": "active", "created_at": now}
                await connection.execute(insert(bases).values(**row, **values, updated_at=now))
            elif not _is_stored(own, before):
                this = bases.c.id == before.id
                await connection.execute(update(bases).where(this).values(**values, updated_at=now))
            else:
                return
            await count_change(connection, BASES)

    async def add(self, base: Base, actor: str) -> Base:
        """Add a base and return it with its new id. Raises NameTaken, or Conflict if an adapter has the name."""
        async with self._changing() as connection:
            known = await _all(connection)
            if any(each.name == base.name for each in known):
                raise NameTaken(f"name: there is a base model '{base.name}' already.", param="name")
            if base.digest is not None:
                _check_digest(known, base.digest, None)
            await _check_no_adapter(connection, base.name)
            now = datetime.now(UTC)
            chosen = secrets.token_hex(8) if known else FIRST
            base = msgspec.structs.replace(base, id=chosen, created_at=now, updated_at=now)
            row = msgspec.structs.asdict(base) | {"former": _json(base.former), "shape": _json(base.shape)}
            await connection.execute(insert(bases).values(**row))
            await record_change(connection, actor, "base.add", base.name, {"digest": base.digest})
            await count_change(connection, BASES)
        return base

    async def change(
        self, name: str, changes: dict[str, Any], actor: str, *, force: bool = False, seen: Base | None = None
    ) -> Base:
        """Change a base's `state`, `tokenizer`, `context_length`, `shape` or `digest`. A replaced digest is added to
        `former`. Raises RecordNotFound, NameTaken for another base's digest, and Conflict if a base is retired, without
        `force`, that was not drained or has versions. seen: the base on which the changes are based; raises Changed if
        it is no longer so.
        """
        async with self._changing() as connection:
            row = (await connection.execute(select(bases).where(bases.c.name == name))).one_or_none()
            if row is None:
                raise RecordNotFound(f"There is no base model '{name[:256]}'.", param="name")
            before = _read(row)
            check_unchanged(before.updated_at, seen and seen.updated_at)
            state: BaseState = changes.get("state", before.state)
            if state == "retired" and before.state != "retired" and not force:
                await _check_unused(connection, before)
            digest = changes.get("digest", before.digest)
            former = before.former
            if digest != before.digest:
                _check_digest(await _all(connection), digest, before)
                replaced = () if before.digest is None else (before.digest,)
                former = tuple(each for each in (*replaced, *former) if each != digest)
            after = msgspec.structs.replace(before, **changes, former=former, updated_at=datetime.now(UTC))
            values = {each: getattr(after, each) for each in ("state", "digest", "tokenizer", "context_length")}
            values |= {"former": _json(former), "shape": _json(after.shape), "updated_at": after.updated_at}
            await connection.execute(update(bases).where(bases.c.id == before.id).values(**values))
            shown = {key: value for key, value in changes.items() if key != "shape"}
            earlier, forced = {key: getattr(before, key) for key in shown}, {"forced": True} if force else {}
            await record_change(connection, actor, "base.change", name, shown | forced, before=earlier)
            await count_change(connection, BASES)
        return after


def of_base(base_id: str) -> ColumnElement[bool]:
    """Return the condition that a row of `adapter_versions` belongs to a base."""
    own = adapter_versions.c.base_id
    return own.is_(None) if base_id == FIRST else own == base_id


async def _all(connection: AsyncConnection) -> list[Base]:
    rows = (await connection.execute(select(bases).order_by(bases.c.created_at, bases.c.id))).all()
    return [_read(row) for row in rows]


async def _check_unused(connection: AsyncConnection, base: Base) -> None:
    """Raise Conflict if the base was not drained, or if versions that may be served belong to it."""
    if base.state == "active":
        raise Conflict(f"state: '{base.name}' is active; drain it first.", param="state")
    own = adapter_versions
    used = (own.c.state.in_((READY, "validating")), of_base(base.id))
    query = (
        select(tenants.c.name.label("tenant"), adapters.c.name, own.c.version, func.count().over().label("number"))
        .join_from(own, adapters, adapters.c.id == own.c.adapter_id)
        .join(tenants, tenants.c.id == adapters.c.tenant_id)
        .where(*used, or_(own.c.expires_at.is_(None), own.c.expires_at > datetime.now(UTC)))
        .order_by(tenants.c.name, adapters.c.name, own.c.version)
        .limit(SHOWN_VERSIONS)
    )
    found = (await connection.execute(query)).all()
    if found:
        names = ", ".join(f"{row.tenant}/{version_name(row.name, row.version)}" for row in found)
        more = ", ..." if found[0].number > len(found) else ""
        message = f"state: {found[0].number} versions of adapters belong to '{base.name}': {names}{more}. Retire or "
        raise Conflict(f"{message}delete them first, or use --force or ?force=true.", param="state")


async def _check_no_adapter(connection: AsyncConnection, name: str) -> None:
    """Raise Conflict if an adapter or a saved mixture has the name of a new base, or the name in it: `a:prod` would
    hide an alias of the adapter `a`.
    """
    reference = parse_reference(name.lower())
    names = {name.lower()} if reference is None else {name.lower(), reference.name}
    for table, kind in ((adapters, "an adapter"), (saved_mixtures, "a saved mixture")):
        query = select(tenants.c.name).join_from(table, tenants, tenants.c.id == table.c.tenant_id)
        owner = (await connection.execute(query.where(table.c.name.in_(sorted(names))).limit(1))).scalar_one_or_none()
        if owner is not None:
            raise Conflict(f"name: '{name}' is {kind} of tenant '{owner}'; choose another name.", param="name")


def _check_digest(known: Sequence[Base], digest: str | None, base: Base | None) -> None:
    """Raise NameTaken if another base than `base` has or had the digest."""
    for other in known:
        if digest in other.digests and (base is None or other.id != base.id):
            kind = "the" if digest == other.digest else "a former"
            raise NameTaken(f"digest: it is {kind} digest of the base model '{other.name}'.", param="digest")


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _read(row: Row[Any]) -> Base:
    fields = {name: getattr(row, name) for name in Base.__struct_fields__}
    fields["former"] = msgspec.json.decode(row.former, type=tuple[str, ...])
    fields["shape"] = msgspec.json.decode(row.shape, type=Shape)
    return Base(**fields)
