"""Catalog of adapters: names in each tenant's own namespace, and the content that each name means.

Names are cached while the tenant's change counter stays the same (`caches/changes.py`). The response to a change
of a name's meaning waits until no gateway that reaches the database still trusts the old meaning.
"""

import asyncio
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec
from sqlalchemy import Row, Select, and_, or_, select

from gateway.errors import BadRequest, ModelNotFound
from gateway.records.adapters.aliases import Aliases
from gateway.records.adapters.canary import InTurn, choose_for
from gateway.records.adapters.limits import check_bytes
from gateway.records.adapters.pushes import Push
from gateway.records.adapters.reference_targets import meanings
from gateway.records.adapters.removed_versions import removed_since, settle_removed
from gateway.records.adapters.rows import Version, check_possible, is_over, read_version, unknown_name
from gateway.records.adapters.saved_mixtures import SavedMixtures
from gateway.records.adapters.uploads import unfinished_bytes
from gateway.records.adapters.versions import Versions
from gateway.records.bases.base import FIRST, BaseRetired, Binding, suspect_name
from gateway.records.bases.checks import taken_by_base
from gateway.records.bases.registry import Bases
from gateway.records.caches.changes import Changes
from gateway.records.caches.lookups import Lookups
from gateway.records.caches.tenant_cache import TenantCache
from gateway.records.sql.database import Database
from gateway.records.sql.tables import adapter_versions, adapters, audit, removed_versions
from gateway.records.tenants.tenants import Tenant
from gateway.records.version_state import READY, State
from gateway.sharing.concurrency import ConcurrencyLimiter
from wire.digests import digest_name
from wire.mixtures import Mixture
from wire.model_names import ADAPTER_NAME, Reference, parse_reference

DIGESTS = (adapter_versions.c.digest, removed_versions.c.digest)
CACHE_ENTRIES = 50_000
# A tenant may have 70,000 references: 1,000 names with 20 versions and 50 aliases each.
TENANTS_ENTRIES = 5_000
# Concurrent listings, at most one for each tenant, so that database connections stay free for other work.
READS = 4
CURRENT_VERSION = and_(
    adapter_versions.c.adapter_id == adapters.c.id, adapter_versions.c.version == adapters.c.current_version
)


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """A name and the version of `latest`. digest: 64 hex digits, no prefix. rank: the largest of its modules. base: id
    of the base model.
    """

    name: str
    version: int
    digest: str
    rank: int
    num_bytes: int
    created_at: datetime
    state: State = READY
    base: str = FIRST


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """The model that a request names. name: the tenant's own. digest: None for the base model.

    names: the adapter's name, and all other names of the tenant that have a price or limits and refer, or once
    referred, to the same content. Their prices and limits apply whichever of these names a request uses.
    version: the adapter's version; None for the base model and for a mixture. requested: the text of the request if it
    is not the name, such as `name:prod`. base: id of the base model. base_digest: the weights that the version is bound
    to; None if they are unknown. parts, mixture: set for a mixture only (gateway/records/adapters/mixtures.py); its
    `names` are those of its parts.
    """

    name: str
    digest: str | None
    names: tuple[str, ...] = ()
    version: int | None = None
    requested: str | None = None
    base: str = FIRST
    base_digest: str | None = None
    parts: tuple["Model", ...] = ()
    mixture: Mixture | None = None

    @property
    def adapters(self) -> tuple[str, ...]:
        """Return the digests of the adapters that the model consists of; none for the base model."""
        if self.mixture is not None:
            return tuple(digest for digest, _ in self.mixture.parts)
        return () if self.digest is None else (self.digest,)

    @property
    def suspects(self) -> tuple[str, ...]:
        """Return the adapters' names in the quarantine."""
        return tuple(suspect_name(digest, self.base) for digest in self.adapters)

    @property
    def binding(self) -> Binding:
        """Return the engines on which the model's requests may run."""
        own = () if self.base_digest is None else (self.base_digest,)
        return Binding(self.base, frozenset(own).union(*(part.binding.digests for part in self.parts)))

    @property
    def shown(self) -> str:
        """Return the model as the request named it."""
        return self.requested or self.name

    @property
    def versions(self) -> tuple[tuple[str, int], ...]:
        """Return the adapters' versions that a request uses, each with its name."""
        own = () if self.version is None else ((self.name, self.version),)
        return own + tuple(version for part in self.parts for version in part.versions)

    @property
    def engine_name(self) -> str:
        """Return the model's name in requests to engines."""
        if self.digest is None:
            return self.name
        return digest_name(self.digest) if self.mixture is None else self.mixture.name


class _Target(msgspec.Struct, frozen=True):
    """A version that a reference may mean."""

    model: Model
    version: int
    weight: int
    expires_at: datetime | None


class _Known(msgspec.Struct, frozen=True):
    """A cached meaning. limited: the names with limits at the time of the query, on which `Model.names` depends."""

    mark: int
    limited: frozenset[str]
    targets: tuple[_Target, ...]
    in_turn: InTurn


class Catalog:
    """Names and versions of adapters. Raises ModelNotFound, RecordNotFound and BadRequest (param "name").

    believed_seconds: the time for which another gateway may still trust an old meaning.
    """

    def __init__(
        self,
        database: Database,
        bases: Bases,
        changes: Changes | None = None,
        believed_seconds: float = 0.0,
    ) -> None:
        self._database = database
        self.bases = bases
        self._changes = changes or Changes(database)
        self._believed_seconds = believed_seconds
        # By tenant's id and reference.
        self._known: TenantCache[Reference, _Known] = TenantCache(CACHE_ENTRIES, TENANTS_ENTRIES)
        self._lookups = Lookups(self._look_up)
        self._reads = ConcurrencyLimiter(READS)
        self.versions = Versions(database, self._reads, self._changed)
        self.aliases = Aliases(database, self._reads, self._changed)
        self.mixtures = SavedMixtures(database, bases, self._changes, self._reads, self._changed)

    def check_name(self, name: str) -> None:
        """Raise BadRequest unless a new adapter may have this name."""
        if not ADAPTER_NAME.fullmatch(name):
            raise BadRequest(
                "Expected an adapter name of 1 to 64 characters a-z, 0-9, '.', '_' and '-', "
                "starting with a letter or digit.",
                param="name",
            )
        if self.bases.is_reserved(name):
            raise taken_by_base(name, "adapter")

    async def resolve(self, tenant: Tenant, text: str, user: str | None = None) -> Model:
        """Return the model that a tenant means by `name`, `name@3` or `name:alias`.

        Raises ModelNotFound, also for a retired base model's name, and BaseRetired for one of its adapters.

        user: the user or session who always gets the same version of a canary; None takes the versions in turn. An
        unknown name is always queried, so that a new name works at once.
        """
        if (base := self.bases.named(text)) is not None:
            if base.state == "retired":
                raise ModelNotFound(text)
            return Model(name=text, digest=None, base=base.id)
        reference = parse_reference(text)
        if reference is None:
            raise ModelNotFound(text)
        known = self._known.get(tenant.id, reference)
        if (
            known is None
            or known.limited != tenant.model_limits.keys()
            or not (self._changes.holds(known.mark, tenant.id) or await self._changes.confirm(known.mark, tenant.id))
        ):
            known = await self._lookups.get((tenant.id, tenant.name, reference, frozenset(tenant.model_limits)))
        targets = () if known is None else [target for target in known.targets if not is_over(target.expires_at)]
        if known is None or not targets:
            raise ModelNotFound(text)
        if len(targets) == 1:
            return self._served(targets[0].model)
        if user is None:
            return self._served(known.in_turn.choose(targets).model)
        key = f"{tenant.id}\0{reference}\0{user}"
        return self._served(choose_for(targets, key.encode("utf-8", "surrogatepass")).model)

    def _served(self, model: Model) -> Model:
        base = self.bases.get(model.base)
        if base is not None and base.state == "retired":
            raise BaseRetired(model.shown, base.name)
        return model

    async def _look_up(self, asked: tuple[str, str, Reference, frozenset[str]]) -> _Known | None:
        tenant_id, tenant_name, reference, limited = asked
        # Taken before the query, so that a change during the query invalidates its answer.
        mark = self._changes.mark
        async with self._database.read() as connection:
            rows = (await connection.execute(*meanings(tenant_id, tenant_name, reference, limited))).all()
        if not rows:
            return None
        by_version = defaultdict(list)
        for row in rows:
            by_version[row.version].append(row)
        targets = [_target(reference, same) for _, same in sorted(by_version.items())]
        before = self._known.get(tenant_id, reference)
        known = _Known(mark, limited, tuple(targets), InTurn() if before is None else before.in_turn)
        self._known.put(tenant_id, reference, known)
        return known

    async def knows(self, tenant: Tenant, name: str) -> bool:
        """Return whether it is a base model's name, or the tenant has an adapter of this plain name."""
        if self.bases.named(name) is not None:
            return True
        if not ADAPTER_NAME.fullmatch(name):
            return False
        own = and_(adapters.c.tenant_id == tenant.id, adapters.c.name == name, adapters.c.current_version > 0)
        async with self._database.read() as connection:
            return (await connection.execute(select(adapters.c.id).where(own))).first() is not None

    async def check_declared(self, tenant: Tenant, num_bytes: int, upload_id: str | None = None) -> None:
        """Check, before an upload is read, that the tenant has room for its declared bytes. Raises Forbidden.

        The tenant's unfinished uploads in parts count, except `upload_id`, which is being completed.
        """
        limit = tenant.adapter_limits.max_adapter_bytes
        if limit is not None:
            async with self._database.read() as connection:
                unfinished = await unfinished_bytes(connection, tenant.id, upload_id)
                await check_bytes(connection, tenant.id, num_bytes, limit, unfinished=unfinished)

    async def add_version(self, tenant: Tenant, name: str, *, actor: str, **push: Any) -> Adapter:
        """Add a version under `name`, to which `latest` moves. Repeating the content of `latest` changes nothing.

        push: the fields of `Push`. Raises Forbidden, naming the limit.
        """
        self.check_name(name)
        return _adapter(await self.versions.add(tenant, name, Push(**push), actor))

    async def referenced(self, digests: Sequence[str], since: datetime) -> set[str]:
        """Return those of the digests that a version of any tenant has, or had after `since`.

        digests: a few hundred at most.
        """
        query = select(adapter_versions.c.digest).where(adapter_versions.c.digest.in_(digests)).distinct()
        async with self._database.read() as connection:
            on_record = set((await connection.execute(query)).scalars())
            return on_record | await removed_since(connection, digests, since)

    async def known(self, digests: Sequence[str]) -> set[str]:
        """Return those of the digests that a version of a present tenant has or ever had.

        digests: a few hundred at most.
        """
        async with self._database.read() as connection:
            found = [await connection.execute(select(each).where(each.in_(digests)).distinct()) for each in DIGESTS]
            return {digest for rows in found for digest in rows.scalars()}

    async def were_pushed(self, digests: Sequence[str]) -> int:
        """Return how many of the digests the audit log contains, including those of deleted tenants.

        digests: a few, because it reads all entries of pushes.
        """
        found = [audit.c.detail.contains(digest) for digest in digests]
        query = select(audit.c.detail).where(audit.c.action == "adapter.push", or_(*found)).distinct()
        async with self._database.read() as connection:
            details = "".join((await connection.execute(query)).scalars())
        return sum(digest in details for digest in digests)

    async def collected(self, since: datetime) -> None:
        """Stop counting versions removed until `since` against their tenants, because the collection is over."""
        await settle_removed(self._database, since)

    async def by_tenant(self) -> Mapping[str, Sequence[Adapter]]:
        """Return every tenant's adapters, by the tenant's id. Tenants without adapters are absent."""
        found = defaultdict(list)
        query = _CURRENT.add_columns(adapters.c.tenant_id).order_by(adapters.c.name)
        async with self._database.read() as connection:
            for row in await connection.execute(query):
                found[row.tenant_id].append(_adapter(read_version(row)))
        return found

    async def list(self, tenant: Tenant) -> list[Adapter]:
        async with self._reads.place(tenant.id), self._database.read() as connection:
            rows = (await connection.execute(_current(tenant.id).order_by(adapters.c.name))).all()
        return [_adapter(read_version(row)) for row in rows]

    async def get(self, tenant: Tenant, name: str) -> Adapter:
        check_possible(name)
        async with self._reads.place(tenant.id), self._database.read() as connection:
            row = (await connection.execute(_current(tenant.id).where(adapters.c.name == name))).one_or_none()
        if row is None:
            raise unknown_name(name)
        return _adapter(read_version(row))

    async def delete(
        self,
        tenant: Tenant,
        name: str,
        actor: str,
        version: int | None = None,
        *,
        running: Collection[int] = (),
        force: bool = False,
    ) -> None:
        """Delete the name, or one of its versions; see `Versions.delete`."""
        await self.versions.delete(tenant, name, version, actor, running=running, force=force)

    async def rebound(self) -> None:
        """Wait until every process knows the present base models of versions."""
        await self._changed(True)

    async def _changed(self, replaced: bool) -> None:
        """Drop the old meaning here, and wait until no other process trusts it.

        replaced: whether there was an old meaning.
        """
        await self._changes.catch_up()
        if replaced:
            await asyncio.sleep(self._believed_seconds)


_CURRENT: Select[Any] = select(adapters.c.name, adapter_versions).join_from(adapters, adapter_versions, CURRENT_VERSION)


def _current(tenant_id: str) -> Select[Any]:
    """Select the tenant's names, each with its current version."""
    return _CURRENT.where(adapters.c.tenant_id == tenant_id)


def _target(reference: Reference, rows: Sequence[Row[Any]]) -> _Target:
    """Return a target of the reference. rows: rows of one version, each with a name whose prices and limits apply."""
    row, name, text = rows[0], reference.name, str(reference)
    others = sorted({row.named for row in rows} - {name})
    ends = [moment for moment in (row.expires_at, row.target_expires_at) if moment is not None]
    model = Model(
        name=name,
        digest=row.digest,
        names=(name, *others),
        version=row.version,
        requested=None if text == name else text,
        base=row.base_id or FIRST,
        base_digest=row.base_digest,
    )
    return _Target(model, row.version, row.weight, min(ends, default=None))


def _adapter(version: Version) -> Adapter:
    assert version.created_at is not None
    return Adapter(
        name=version.name,
        version=version.version,
        digest=version.digest,
        rank=version.rank,
        num_bytes=version.num_bytes,
        created_at=version.created_at,
        state=version.state,
        base=version.base,
    )
