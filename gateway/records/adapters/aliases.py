"""Aliases of an adapter's versions: moved by compare-and-swap, rolled back, and split by weight for a canary.

Each move replaces the alias's tag, which is its ETag. `latest` exists for every adapter, has one version, and is stored
in the row of the adapter's name; each accepted upload moves it.
"""

import secrets
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from sqlalchemy import Row, and_, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.errors import AdapterInUse, BadRequest, NoEarlierState, RecordNotFound
from gateway.records.adapters.rows import Version, check_possible, is_over, lock_known_name, unknown_name, versions_of
from gateway.records.adapters.saved_mixtures import uses_of
from gateway.records.audit import record_change
from gateway.records.caches.changes import count_change
from gateway.records.matching import check_match
from gateway.records.sql.database import Database
from gateway.records.sql.tables import adapter_alias_targets, adapter_aliases, adapters
from gateway.records.tenants.tenants import Tenant
from gateway.sharing.concurrency import ConcurrencyLimiter
from wire.model_names import ALIAS_NAME, LATEST, MAX_ALIAS_CHARS, version_name

# Limits: versions of an alias, weight of each, earlier states on record, aliases of an adapter besides `latest`.
MAX_TARGETS, MAX_WEIGHT, MAX_STATES, MAX_ALIASES = 8, 10_000, 20, 50


class AliasTarget(msgspec.Struct, frozen=True, omit_defaults=True):
    """A version that an alias refers to. expires_at: the alias does not refer to it from then on; None means never."""

    version: int
    weight: int = 1
    expires_at: datetime | None = None


# Targets of an alias by version.
Targets = tuple[AliasTarget, ...]


class Alias(msgspec.Struct, frozen=True, kw_only=True):
    """An alias of an adapter. tag: changes with each move. history: earlier targets, the newest last."""

    name: str
    alias: str
    targets: Targets
    tag: str
    history: tuple[Targets, ...] = ()

    @property
    def etag(self) -> str:
        return f'"{self.tag}"'

    @property
    def state(self) -> tuple[str, str]:
        """Return the text and the ETag, as `check_match` takes them."""
        return self.text, self.etag

    @property
    def text(self) -> str:
        total = sum(target.weight for target in self.targets)
        shares = (f"{target.version} ({100 * target.weight / total:.4g} %)" for target in self.targets)
        return f"{self.name}:{self.alias} is version {', '.join(shares)}"


class Aliases:
    """Changes and listings of aliases. reads: limiter of the tenants' listings. changed: called after each change, with
    whether there was an alias before.

    if_match: the ETag of the state that a call replaces, "*" for any. Without it `move` only creates an alias.

    Raises RecordNotFound, BadRequest, PreconditionFailed, PreconditionRequired, NoEarlierState, AdapterInUse.
    """

    def __init__(
        self, database: Database, reads: ConcurrencyLimiter, changed: Callable[[bool], Awaitable[None]]
    ) -> None:
        self._database = database
        self._reads = reads
        self._changed = changed

    async def list(self, tenant: Tenant, name: str) -> list[Alias]:
        """Return the aliases of an adapter, `latest` first."""
        check_possible(name)
        owned = and_(adapters.c.tenant_id == tenant.id, adapters.c.name == name)
        table, targets = adapter_aliases, adapter_alias_targets
        async with self._reads.place(tenant.id), self._database.read() as connection:
            own = (await connection.execute(select(adapters).where(owned))).one_or_none()
            if own is None:
                raise unknown_name(name)
            rows = (
                await connection.execute(select(table).where(table.c.adapter_id == own.id).order_by(table.c.alias))
            ).all()
            parts = (await connection.execute(select(targets).where(targets.c.adapter_id == own.id))).all()
        found = [_read(own, row, [part for part in parts if part.alias == row.alias]) for row in rows]
        return [_latest(own), *found] if own.current_version else found

    async def get(self, tenant: Tenant, name: str, alias: str) -> Alias:
        found = [each for each in await self.list(tenant, name) if each.alias == alias]
        if not found:
            raise _unknown_alias()
        return found[0]

    async def move(
        self,
        tenant: Tenant,
        name: str,
        alias: str,
        targets: Sequence[AliasTarget],
        actor: str,
        if_match: str | None = None,
    ) -> tuple[Alias, bool]:
        """Point an alias to versions by weight. Returns it, and whether it is new."""
        targets = tuple(sorted(targets, key=lambda target: target.version))
        _check(alias, targets)
        async with self._database.write() as connection:
            own = await lock_known_name(connection, tenant.id, name)
            before = await _find(connection, own, alias)
            check_match("alias", None if before is None else before.state, if_match)
            present = await versions_of(connection, tenant.id, name)
            for target in targets:
                if not _is_served(target, present):
                    raise _not_served(name, target, present)
            if before is None:
                await _check_room(connection, own)
            after = await _store(connection, own, alias, targets, before)
            await _record(connection, tenant, after, before, "adapter.alias", actor)
        await self._changed(before is not None)
        return after, before is None

    async def rollback(self, tenant: Tenant, name: str, alias: str, actor: str, if_match: str | None = None) -> Alias:
        """Roll an alias back to its newest earlier state whose versions are all ready. Each call goes further back."""
        async with self._database.write() as connection:
            own = await lock_known_name(connection, tenant.id, name)
            before = await _find_known(connection, own, alias, if_match)
            present = await versions_of(connection, tenant.id, name)
            history = list(before.history)
            while history:
                targets = history.pop()
                if targets != before.targets and all(_is_served(target, present) for target in targets):
                    break
            else:
                raise NoEarlierState(f"{name}:{alias} has no earlier state whose versions are all ready.")
            after = await _store(connection, own, alias, targets, before, history)
            await _record(connection, tenant, after, before, "adapter.rollback", actor)
        await self._changed(True)
        return after

    async def delete(self, tenant: Tenant, name: str, alias: str, actor: str, if_match: str | None = None) -> None:
        if alias == LATEST:
            raise BadRequest(f"alias: '{LATEST}' exists for every adapter and cannot be deleted.", param="alias")
        async with self._database.write() as connection:
            own = await lock_known_name(connection, tenant.id, name)
            before = await _find_known(connection, own, alias, if_match)
            uses = await uses_of(connection, tenant.id, name)
            if named := [mixture for mixture, part in uses if part.version is None and part.alias == alias]:
                raise AdapterInUse(
                    f"{name}:{alias} is in use by the saved mixture '{named[0]}'; change or delete the mixture first."
                )
            for table in (adapter_alias_targets, adapter_aliases):
                await connection.execute(delete(table).where(table.c.adapter_id == own.id, table.c.alias == alias))
            target, detail = f"{tenant.name}/{name}:{alias}", {"before": before.targets}
            await record_change(connection, actor, "adapter.alias_delete", target, detail, tenant=tenant.name)
            await count_change(connection, tenant.id)
        await self._changed(True)


async def move_latest(connection: AsyncConnection, name_row: Row[Any], version: int) -> None:
    """Move `latest` to an accepted version. name_row: the row of the name, locked."""
    await _store(
        connection, name_row, LATEST, (AliasTarget(version),), _latest(name_row) if name_row.current_version else None
    )


async def references(
    connection: AsyncConnection, name_row: Row[Any], *, besides_latest: bool = False
) -> dict[int, list[str]]:
    """Return the aliases and saved mixtures that refer to each version, as texts. name_row: the row of the name.

    A saved mixture refers to a version by its number only; its other references are those of aliases.
    """
    table = adapter_alias_targets
    query = select(table.c.alias, table.c.version, table.c.expires_at).where(table.c.adapter_id == name_row.id)
    rows = (await connection.execute(query.order_by(table.c.alias))).all()
    found = defaultdict(list)
    if not besides_latest:
        found[name_row.current_version].append(f"alias '{LATEST}'")
    for row in rows:
        if not is_over(row.expires_at):
            found[row.version].append(f"alias '{row.alias}'")
    for mixture, part in await uses_of(connection, name_row.tenant_id, name_row.name):
        if part.version is not None:
            found[part.version].append(f"saved mixture '{mixture}'")
    return found


async def _find(connection: AsyncConnection, name_row: Row[Any], alias: str) -> Alias | None:
    if alias == LATEST:
        return _latest(name_row) if name_row.current_version else None
    if not ALIAS_NAME.fullmatch(alias):
        return None
    table, targets = adapter_aliases, adapter_alias_targets
    this = select(table).where(table.c.adapter_id == name_row.id, table.c.alias == alias)
    row = (await connection.execute(this)).one_or_none()
    if row is None:
        return None
    query = select(targets).where(targets.c.adapter_id == name_row.id, targets.c.alias == alias)
    return _read(name_row, row, (await connection.execute(query)).all())


async def _find_known(connection: AsyncConnection, name_row: Row[Any], alias: str, if_match: str | None) -> Alias:
    """Return the alias. Raises RecordNotFound, and PreconditionFailed if `if_match` is given and not its ETag."""
    before = await _find(connection, name_row, alias)
    if before is None:
        raise _unknown_alias()
    if if_match is not None:
        check_match("alias", before.state, if_match)
    return before


async def _store(
    connection: AsyncConnection,
    name_row: Row[Any],
    alias: str,
    targets: Targets,
    before: Alias | None,
    history: Sequence[Targets] | None = None,
) -> Alias:
    """Write a new state. history: earlier states; by default those of `before`, then `before` itself."""
    if history is None:
        history = () if before is None else (*before.history, before.targets)[-MAX_STATES:]
    tag, stored = secrets.token_hex(8), msgspec.json.encode(history).decode()
    if alias == LATEST:
        version = targets[0].version
        values = {"current_version": version, "latest_tag": tag, "latest_history": stored}
        await connection.execute(update(adapters).where(adapters.c.id == name_row.id).values(**values))
        tag = f"{tag}.{version}"
    else:
        key = {"adapter_id": name_row.id, "alias": alias}
        for table in (adapter_alias_targets, adapter_aliases):
            await connection.execute(delete(table).where(table.c.adapter_id == name_row.id, table.c.alias == alias))
        state = {**key, "tag": tag, "history": stored, "updated_at": datetime.now(UTC)}
        await connection.execute(insert(adapter_aliases).values(**state))
        rows = [{**key, **msgspec.structs.asdict(target)} for target in targets]
        await connection.execute(insert(adapter_alias_targets), rows)
    return Alias(name=name_row.name, alias=alias, targets=targets, tag=tag, history=tuple(history))


async def _record(
    connection: AsyncConnection, tenant: Tenant, after: Alias, before: Alias | None, action: str, actor: str
) -> None:
    detail = {"targets": after.targets, "before": None if before is None else before.targets}
    target = f"{tenant.name}/{after.name}:{after.alias}"
    await record_change(connection, actor, action, target, detail, tenant=tenant.name)
    await count_change(connection, tenant.id)


async def _check_room(connection: AsyncConnection, name_row: Row[Any]) -> None:
    count = select(func.count()).select_from(adapter_aliases).where(adapter_aliases.c.adapter_id == name_row.id)
    if (await connection.execute(count)).scalar_one() >= MAX_ALIASES:
        raise BadRequest(f"alias: an adapter has at most {MAX_ALIASES} aliases; delete one first.", param="alias")


def _check(alias: str, targets: Targets) -> None:
    if not ALIAS_NAME.fullmatch(alias):
        raise BadRequest(
            f"alias: expected 1 to {MAX_ALIAS_CHARS} characters a-z, 0-9, '.', '_' and '-', starting with a letter.",
            param="alias",
        )
    numbers, weights = {target.version for target in targets}, [target.weight for target in targets]
    is_possible = 1 <= len(targets) <= MAX_TARGETS and len(numbers) == len(targets)
    if not is_possible or not all(1 <= weight <= MAX_WEIGHT for weight in weights):
        raise BadRequest(
            f"targets: expected 1 to {MAX_TARGETS} different versions with weights from 1 to {MAX_WEIGHT}.",
            param="targets",
        )
    if alias == LATEST and (len(targets) > 1 or targets[0].expires_at is not None):
        raise BadRequest(
            f"targets: '{LATEST}' has one version without expires_at; use another alias for more.", param="targets"
        )


def _is_served(target: AliasTarget, present: dict[int, Version]) -> bool:
    version = present.get(target.version)
    return version is not None and version.is_served and not is_over(target.expires_at)


def _not_served(name: str, target: AliasTarget, present: dict[int, Version]) -> BadRequest:
    version, shown = present.get(target.version), version_name(name, target.version)
    if version is not None and version.is_served:
        why = f"expires_at of {shown} is over; expected a time in the future"
    else:
        why = f"{shown} is {'unknown' if version is None else version.state}; expected a ready version"
    return BadRequest(f"targets: {why}.", param="targets", code="version_not_ready")


def _latest(name_row: Row[Any]) -> Alias:
    # A gateway of the previous release moves `latest` without a new tag, so the version is part of the tag.
    return Alias(
        name=name_row.name,
        alias=LATEST,
        targets=(AliasTarget(name_row.current_version),),
        tag=f"{name_row.latest_tag or ''}.{name_row.current_version}",
        history=_read_history(name_row.latest_history),
    )


def _read(name_row: Row[Any], row: Row[Any], parts: Sequence[Row[Any]]) -> Alias:
    targets = sorted((part.version, part.weight, part.expires_at) for part in parts)
    return Alias(
        name=name_row.name,
        alias=row.alias,
        targets=tuple(AliasTarget(*target) for target in targets),
        tag=row.tag,
        history=_read_history(row.history),
    )


def _read_history(stored: str | None) -> tuple[Targets, ...]:
    return () if stored is None else msgspec.json.decode(stored, type=tuple[Targets, ...])


def _unknown_alias() -> RecordNotFound:
    return RecordNotFound("The adapter has no alias of this name.", param="alias")
