"""Catalog of adapters: names in each tenant's own namespace, and the content that each name means.

Names are cached while the tenant's change counter stays the same (gateway/records/changes.py). The response to a change
of a name's meaning waits until no gateway that reaches the database still trusts the old meaning.
"""

import asyncio
import re
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Row, Select, and_, delete, insert, literal, or_, select, update
from sqlalchemy.exc import IntegrityError

from gateway.errors import BadRequest, ModelNotFound, RecordNotFound
from gateway.records.adapter_limits import KEPT_VERSIONS, check_bytes, check_room
from gateway.records.audit import record_change
from gateway.records.changes import Changes, count_change
from gateway.records.database import Database
from gateway.records.lookups import Lookups
from gateway.records.removed_versions import all_versions, remove_versions, removed_since, settle_removed
from gateway.records.tables import adapter_versions, adapters, prices
from gateway.records.tenants import Tenant
from gateway.sharing.turns import Turns
from wire.digests import digest_name
from wire.mixtures import Mixture

ADAPTER_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
CACHE_ENTRIES = 50_000
# Concurrent listings, at most one for each tenant, so that database connections stay free for other work.
READS = 4
CURRENT_VERSION = and_(
    adapter_versions.c.adapter_id == adapters.c.id, adapter_versions.c.version == adapters.c.current_version
)


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """A name and its current version. digest: 64 hex digits, no prefix. rank: the largest of its modules."""

    name: str
    version: int
    digest: str
    rank: int
    num_bytes: int
    created_at: datetime


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """The model that a request names. name: the tenant's own. digest: None is the base model.

    names: an adapter's name, and all names of the tenant that have a price or limits and mean, or ever meant, the same
    content. These prices and limits apply to the content, whichever name a request uses.
    parts, mixture: set for a mixture only (gateway/records/mixtures.py); its `names` are those of its parts.
    """

    name: str
    digest: str | None
    names: tuple[str, ...] = ()
    parts: tuple["Model", ...] = ()
    mixture: Mixture | None = None

    @property
    def adapters(self) -> tuple[str, ...]:
        """Return the digests of the adapters that the model consists of; none for the base model."""
        if self.mixture is not None:
            return tuple(digest for digest, _ in self.mixture.parts)
        return () if self.digest is None else (self.digest,)

    @property
    def engine_name(self) -> str:
        """Return the model's name in requests to engines."""
        if self.digest is None:
            return self.name
        return digest_name(self.digest) if self.mixture is None else self.mixture.name


class _Known(msgspec.Struct, frozen=True):
    """A cached meaning. limited: the names with limits at the time of the query, on which `Model.names` depends."""

    mark: int
    limited: frozenset[str]
    model: Model


async def _already_stored() -> None:
    """Do nothing, because the content is already in the store."""


class Catalog:
    """Names and versions of adapters. Raises ModelNotFound, RecordNotFound and BadRequest (param "name").

    believed_seconds: the time for which another gateway may still trust an old meaning.
    """

    def __init__(
        self,
        database: Database,
        base_model: str,
        changes: Changes | None = None,
        believed_seconds: float = 0.0,
    ) -> None:
        self._database = database
        self.base_model = base_model
        self._changes = changes or Changes(database)
        self._believed_seconds = believed_seconds
        # By tenant's id and name.
        self._known: OrderedDict[tuple[str, str], _Known] = OrderedDict()
        self._lookups = Lookups(self._look_up)
        self._reads = Turns(READS)

    def check_name(self, name: str) -> None:
        """Raise BadRequest unless a new adapter may have this name."""
        if not ADAPTER_NAME.fullmatch(name):
            raise BadRequest(
                "Expected an adapter name of 1 to 64 characters a-z, 0-9, '.', '_' and '-', "
                "starting with a letter or digit.",
                param="name",
            )
        if name == self.base_model.lower():
            raise BadRequest(f"'{name}' is the base model's name; choose another for the adapter.", param="name")

    async def resolve(self, tenant: Tenant, name: str) -> Model:
        """Return the model that a tenant means by `name`. Raises ModelNotFound.

        An unknown name is always queried, so that a new name works at once.
        """
        if name == self.base_model:
            return Model(name=name, digest=None)
        known = self._known.get((tenant.id, name))
        if (
            known is not None
            and known.limited == tenant.model_limits.keys()
            and (self._changes.holds(known.mark, tenant.id) or await self._changes.confirm(known.mark, tenant.id))
        ):
            return known.model
        if not ADAPTER_NAME.fullmatch(name):
            raise ModelNotFound(name)
        model = await self._lookups.get((tenant.id, tenant.name, name, frozenset(tenant.model_limits)))
        if model is None:
            raise ModelNotFound(name)
        return model

    async def _look_up(self, asked: tuple[str, str, str, frozenset[str]]) -> Model | None:
        tenant_id, tenant_name, name, limited = asked
        # Taken before the query, so that a change during the query invalidates its answer.
        mark = self._changes.mark
        async with self._database.read() as connection:
            rows = (await connection.execute(_meanings(tenant_id, tenant_name, name, limited))).all()
        others = sorted(row.name for row in rows if row.name != name)
        digest = next((row.digest for row in rows if row.name == name), None)
        if digest is None:
            return None
        model = Model(name=name, digest=digest, names=(name, *others))
        key = (tenant_id, name)
        self._known[key] = _Known(mark, limited, model)
        self._known.move_to_end(key)
        if len(self._known) > CACHE_ENTRIES:
            self._known.popitem(last=False)
        return model

    async def check_declared(self, tenant: Tenant, num_bytes: int) -> None:
        """Check, before an upload is read, that the tenant has room for its declared bytes. Raises Forbidden."""
        limit = tenant.adapter_limits.max_adapter_bytes
        if limit is not None:
            async with self._database.read() as connection:
                await check_bytes(connection, tenant.id, num_bytes, limit)

    async def add_version(
        self,
        tenant: Tenant,
        name: str,
        *,
        digest: str,
        rank: int,
        num_bytes: int,
        actor: str,
        publish: Callable[[], Awaitable[None]] = _already_stored,
    ) -> Adapter:
        """Add a version under `name`, which becomes the current one. Repeating the current digest changes nothing.

        publish: puts the content into the store. It is called after the version is allowed and before it is committed,
        so that a refused version stores nothing and every version has content. Raises Forbidden, naming the limit.
        """
        self.check_name(name)
        content = {"digest": digest, "rank": rank, "num_bytes": num_bytes}
        try:
            adapter = await self._add_version(tenant, name, content, actor, publish)
        except IntegrityError:
            # Another upload created the name in between (PostgreSQL); this upload is its next version.
            adapter = await self._add_version(tenant, name, content, actor, publish)
        await self._changed(replaced=adapter.version > 1)
        return adapter

    async def _add_version(
        self, tenant: Tenant, name: str, content: dict[str, Any], actor: str, publish: Callable[[], Awaitable[None]]
    ) -> Adapter:
        now, digest, num_bytes = datetime.now(UTC), content["digest"], content["num_bytes"]
        async with self._database.write() as connection:
            owned = and_(adapters.c.tenant_id == tenant.id, adapters.c.name == name)
            # FOR UPDATE orders two uploads of one name on PostgreSQL; SQLite's write lock already does.
            found = (await connection.execute(select(adapters).where(owned).with_for_update())).one_or_none()
            if found is None:
                await check_room(connection, tenant.id, digest, num_bytes, new_name=True)
                adapter_id, version = uuid.uuid4().hex, 1
                await connection.execute(
                    insert(adapters).values(
                        id=adapter_id, tenant_id=tenant.id, name=name, current_version=1, created_at=now
                    )
                )
            else:
                current = (await connection.execute(_current(tenant.id).where(adapters.c.name == name))).one()
                if current.digest == digest:
                    await publish()
                    return _adapter(current)
                await check_room(connection, tenant.id, digest, num_bytes, new_name=False)
                adapter_id, version = found.id, found.current_version + 1
                await connection.execute(update(adapters).where(owned).values(current_version=version))
            await connection.execute(
                insert(adapter_versions).values(adapter_id=adapter_id, version=version, created_at=now, **content)
            )
            beyond = and_(
                adapter_versions.c.adapter_id == adapter_id, adapter_versions.c.version <= version - KEPT_VERSIONS
            )
            await remove_versions(connection, tenant.id, beyond, now)
            target = f"{tenant.name}/{name}"
            detail = {"version": version, "digest": digest}
            await record_change(connection, actor, "adapter.push", target, detail, tenant=tenant.name)
            await publish()
            await count_change(connection, tenant.id)
        return Adapter(name=name, version=version, created_at=now, **content)

    async def referenced(self, digests: Sequence[str], since: datetime) -> set[str]:
        """Return those of the digests that a version of any tenant has, or had after `since`.

        digests: a few hundred at most.
        """
        query = select(adapter_versions.c.digest).where(adapter_versions.c.digest.in_(digests)).distinct()
        async with self._database.read() as connection:
            on_record = set((await connection.execute(query)).scalars())
            return on_record | await removed_since(connection, digests, since)

    async def collected(self, since: datetime) -> None:
        """Stop counting versions removed until `since` against their tenants, because the collection is over."""
        await settle_removed(self._database, since)

    async def by_tenant(self) -> Mapping[str, Sequence[Adapter]]:
        """Return every tenant's adapters, by the tenant's id. Tenants without adapters are absent."""
        found = defaultdict(list)
        query = _CURRENT.add_columns(adapters.c.tenant_id).order_by(adapters.c.name)
        async with self._database.read() as connection:
            for row in await connection.execute(query):
                found[row.tenant_id].append(_adapter(row))
        return found

    async def list(self, tenant: Tenant) -> list[Adapter]:
        async with self._reads.turn(tenant.id), self._database.read() as connection:
            rows = (await connection.execute(_current(tenant.id).order_by(adapters.c.name))).all()
        return [_adapter(row) for row in rows]

    async def get(self, tenant: Tenant, name: str) -> Adapter:
        _check_possible(name)
        async with self._reads.turn(tenant.id), self._database.read() as connection:
            row = (await connection.execute(_current(tenant.id).where(adapters.c.name == name))).one_or_none()
        if row is None:
            raise RecordNotFound("There is no adapter of this name.", param="name")
        return _adapter(row)

    async def delete(self, tenant: Tenant, name: str, actor: str) -> None:
        """Delete the name. Its versions count as removed; the content stays in the store until it is collected."""
        _check_possible(name)
        owned = and_(adapters.c.tenant_id == tenant.id, adapters.c.name == name)
        async with self._database.write() as connection:
            found = (await connection.execute(select(adapters.c.id).where(owned).with_for_update())).one_or_none()
            if found is None:
                raise RecordNotFound("There is no adapter of this name.", param="name")
            await remove_versions(connection, tenant.id, owned, datetime.now(UTC))
            await connection.execute(delete(adapters).where(owned))
            target = f"{tenant.name}/{name}"
            await record_change(connection, actor, "adapter.delete", target, tenant=tenant.name)
            await count_change(connection, tenant.id)
        await self._changed(replaced=True)

    async def _changed(self, *, replaced: bool) -> None:
        """Drop the old meaning here, and wait until no other process trusts it.

        replaced: whether there was an old meaning.
        """
        await self._changes.catch_up()
        if replaced:
            await asyncio.sleep(self._believed_seconds)


def _check_possible(name: str) -> None:
    """Raise RecordNotFound for an impossible name, before its characters reach a database that may refuse them."""
    if not ADAPTER_NAME.fullmatch(name):
        raise RecordNotFound("There is no adapter of this name.", param="name")


_CURRENT: Select[Any] = select(adapters.c.name, adapter_versions).join_from(adapters, adapter_versions, CURRENT_VERSION)


def _current(tenant_id: str) -> Select[Any]:
    """Select the tenant's names, each with its current version."""
    return _CURRENT.where(adapters.c.tenant_id == tenant_id)


def _meanings(tenant_id: str, tenant_name: str, name: str, limited: frozenset[str]) -> Select[Any]:
    """Select (name, digest) of the name, and of every name with a price or in `limited` that ever meant its content.

    A name with a price or limits applies to the content even if it means other content now or is deleted. Only the
    operator adds prices and limits, so a tenant's many names for the same content do not add rows.
    """
    own, version = adapters.alias(), adapter_versions.alias()
    digest = (
        select(version.c.digest)
        .join_from(own, version, and_(version.c.adapter_id == own.c.id, version.c.version == own.c.current_version))
        .where(own.c.tenant_id == tenant_id, own.c.name == name)
        .scalar_subquery()
    )

    def is_ruled(named: ColumnElement[str], content: ColumnElement[str]) -> ColumnElement[bool]:
        priced = select(prices.c.model).where(prices.c.model == literal(f"{tenant_name}/").concat(named)).exists()
        return and_(content == digest, or_(named == name, named.in_(sorted(limited)), priced))

    ever = all_versions(tenant_id, is_ruled)
    return select(ever.c.name, ever.c.digest)


def _adapter(row: Row[Any]) -> Adapter:
    return Adapter(
        name=row.name,
        version=row.version,
        digest=row.digest,
        rank=row.rank,
        num_bytes=row.num_bytes,
        created_at=row.created_at,
    )
