"""Saved mixtures: names for mixtures such as `a*0.7+b:prod*0.3`, in the namespace of a tenant's adapters.

A request for the name is a request for the mixture's text (mixtures.py). The parts are adapters, never
saved mixtures. A name is either an adapter's or a saved mixture's: both are created under the lock of the tenant's row.
"""

import secrets
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

import msgspec
from sqlalchemy import ColumnElement, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.errors import BadRequest, ModelNotFound, RecordNotFound
from gateway.records.adapters.rows import lock_name, lock_tenant, versions_of
from gateway.records.audit import record_change
from gateway.records.bases.checks import check_not_base
from gateway.records.bases.registry import Bases
from gateway.records.caches.changes import Changes, count_change
from gateway.records.caches.lookups import Lookups
from gateway.records.caches.tenant_cache import TenantCache
from gateway.records.matching import check_match
from gateway.records.sql.database import Database
from gateway.records.sql.tables import adapter_aliases, adapter_versions, adapters, saved_mixtures
from gateway.records.tenants.tenants import Tenant
from gateway.sharing.concurrency import ConcurrencyLimiter
from wire.mixtures import is_mixture, parse_terms
from wire.model_names import ADAPTER_NAME, LATEST, Reference, parse_reference

# Limits: a tenant's saved mixtures, and characters of a mixture, as in requests and in the usage ledger.
MAX_SAVED, MAX_CHARS = 200, 256
CACHE_ENTRIES, TENANTS_ENTRIES = 10_000, MAX_SAVED


class SavedMixture(msgspec.Struct, frozen=True, kw_only=True):
    """A name and its mixture. model: the mixture's text. tag: changes with each replacement."""

    name: str
    model: str
    tag: str
    created_at: datetime

    @property
    def etag(self) -> str:
        return f'"{self.tag}"'

    @property
    def state(self) -> tuple[str, str]:
        """Return a text and the ETag, as `check_match` takes them."""
        return f"{self.name} is {self.model}", self.etag

    @property
    def references(self) -> list[Reference]:
        """Return the adapters of the parts."""
        return _references(self.model)


class _Known(msgspec.Struct, frozen=True):
    mark: int
    mixture: SavedMixture


class SavedMixtures:
    """Changes, listings and look-ups of saved mixtures.

    reads: limiter of the tenants' listings. changed: called after each change, with whether the
    name had a meaning before. if_match: see `check_match`.

    Raises RecordNotFound, BadRequest, PreconditionFailed, PreconditionRequired.
    """

    def __init__(
        self,
        database: Database,
        bases: Bases,
        changes: Changes,
        reads: ConcurrencyLimiter,
        changed: Callable[[bool], Awaitable[None]],
    ) -> None:
        self._database = database
        self._bases = bases
        self._changes = changes
        self._reads = reads
        self._changed = changed
        self._known: TenantCache[str, _Known] = TenantCache(CACHE_ENTRIES, TENANTS_ENTRIES)
        self._lookups = Lookups(self._look_up)

    async def cached(self, tenant: Tenant, name: str) -> SavedMixture | None:
        """Return the mixture if its name is cached and still valid. Raises Unavailable."""
        known = self._known.get(tenant.id, name)
        if known is None or not await self._changes.confirm(known.mark, tenant.id):
            return None
        return known.mixture

    async def find(self, tenant: Tenant, name: str) -> SavedMixture | None:
        """Return the mixture of a name from the database; None if there is none."""
        return await self._lookups.get((tenant.id, name)) if ADAPTER_NAME.fullmatch(name) else None

    async def _look_up(self, asked: tuple[str, str]) -> SavedMixture | None:
        mark = self._changes.mark
        async with self._database.read() as connection:
            found = await _find(connection, *asked)
        if found is not None:
            self._known.put(*asked, _Known(mark, found))
        return found

    def parse(self, model: str) -> list[Reference]:
        """Return the adapters of the parts of a text. Raises BadRequest for a text that cannot be saved."""
        if len(model) > MAX_CHARS or not is_mixture(model):
            raise BadRequest(
                f"model: expected a mixture such as a*0.7+b*0.3 of at most {MAX_CHARS} characters.", param="model"
            )
        # A base model's name may have the form of a reference.
        base = next((term.name for term in parse_terms(model) if self._bases.named(term.name) is not None), None)
        if base is not None:
            raise BadRequest(f"model: expected an adapter in each term, got the base model '{base}'.", param="model")
        return _references(model)

    async def list(self, tenant: Tenant) -> list[SavedMixture]:
        """Return the tenant's saved mixtures by name."""
        async with self._reads.place(tenant.id), self._database.read() as connection:
            return await _all(connection, tenant.id)

    async def get(self, tenant: Tenant, name: str) -> SavedMixture:
        async with self._reads.place(tenant.id):
            found = await self.find(tenant, name)
        if found is None:
            raise _unknown_mixture(name)
        return found

    async def save(
        self, tenant: Tenant, name: str, model: str, actor: str, if_match: str | None = None
    ) -> tuple[SavedMixture, bool]:
        """Save a mixture under a name that no adapter has. Returns it, and whether the name is new."""
        references = self.parse(model)
        async with self._database.write() as connection:
            for part in sorted({reference.name for reference in references}):
                await _check_part(connection, tenant.id, part, [each for each in references if each.name == part])
            await _lock_tenant(connection, tenant.id)
            before = await _find(connection, tenant.id, name)
            check_match("saved mixture", None if before is None else before.state, if_match)
            tag = secrets.token_hex(8)
            if before is None:
                await _check_free(connection, tenant.id, name)
                await check_not_base(connection, name, "mixture")
                after = SavedMixture(name=name, model=model, tag=tag, created_at=datetime.now(UTC))
                row = {"tenant_id": tenant.id, **msgspec.structs.asdict(after)}
                await connection.execute(insert(saved_mixtures).values(**row))
            else:
                after = msgspec.structs.replace(before, model=model, tag=tag)
                values = {"model": model, "tag": tag}
                await connection.execute(update(saved_mixtures).where(*_this(tenant.id, name)).values(**values))
            detail = {"model": model, "before": None if before is None else before.model}
            await record_change(connection, actor, "mixture.save", f"{tenant.name}/{name}", detail, tenant=tenant.name)
            await count_change(connection, tenant.id)
        await self._changed(before is not None)
        return after, before is None

    async def delete(self, tenant: Tenant, name: str, actor: str, if_match: str | None = None) -> None:
        async with self._database.write() as connection:
            await _lock_tenant(connection, tenant.id)
            before = await _find(connection, tenant.id, name)
            if before is None:
                raise _unknown_mixture(name)
            if if_match is not None:
                check_match("saved mixture", before.state, if_match)
            await connection.execute(delete(saved_mixtures).where(*_this(tenant.id, name)))
            target, detail = f"{tenant.name}/{name}", {"before": before.model}
            await record_change(connection, actor, "mixture.delete", target, detail, tenant=tenant.name)
            await count_change(connection, tenant.id)
        await self._changed(True)


def _references(model: str) -> list[Reference]:
    """Return the adapters of a mixture's terms. Raises BadRequest for a term that is no reference."""
    found = []
    for term in parse_terms(model):
        reference = parse_reference(term.name)
        if reference is None:
            raise BadRequest(
                f"model: expected an adapter as name, name@3 or name:alias in each term, got '{term.name}'.",
                param="model",
            )
        found.append(reference)
    return found


async def uses_of(connection: AsyncConnection, tenant_id: str, name: str) -> list[tuple[str, Reference]]:
    """Return the saved mixtures that name an adapter, each with its reference to the adapter."""
    found = await _all(connection, tenant_id)
    return [(each.name, part) for each in found for part in each.references if part.name == name]


async def check_not_saved(connection: AsyncConnection, tenant_id: str, name: str) -> None:
    """Raise BadRequest if a saved mixture has the name of a new adapter."""
    if await _find(connection, tenant_id, name) is not None:
        raise BadRequest(f"name: '{name}' is a saved mixture; choose another name for the adapter.", param="name")


async def _find(connection: AsyncConnection, tenant_id: str, name: str) -> SavedMixture | None:
    if not ADAPTER_NAME.fullmatch(name):
        return None
    row = (await connection.execute(_SAVED.where(*_this(tenant_id, name)))).one_or_none()
    return None if row is None else SavedMixture(**row._mapping)


async def _all(connection: AsyncConnection, tenant_id: str) -> list[SavedMixture]:
    query = _SAVED.where(saved_mixtures.c.tenant_id == tenant_id).order_by(saved_mixtures.c.name)
    return [SavedMixture(**row._mapping) for row in (await connection.execute(query)).all()]


_SAVED = select(*(saved_mixtures.c[field] for field in SavedMixture.__struct_fields__))


def _this(tenant_id: str, name: str) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return saved_mixtures.c.tenant_id == tenant_id, saved_mixtures.c.name == name


async def _lock_tenant(connection: AsyncConnection, tenant_id: str) -> None:
    if await lock_tenant(connection, tenant_id) is None:
        raise RecordNotFound("The tenant of this name no longer exists.", param="tenant")


async def _check_part(connection: AsyncConnection, tenant_id: str, name: str, parts: list[Reference]) -> None:
    """Lock the adapter of parts, and check that each part exists. Raises BadRequest, ModelNotFound."""
    own = await lock_name(connection, tenant_id, name)
    if own is None:
        if await _find(connection, tenant_id, name) is not None:
            raise BadRequest(f"model: '{name}' is a saved mixture; expected an adapter in each term.", param="model")
        raise ModelNotFound(name)
    present = await versions_of(connection, tenant_id, name)
    query = select(adapter_aliases.c.alias).where(adapter_aliases.c.adapter_id == own.id)
    known = set((await connection.execute(query)).scalars())
    for part in parts:
        number = part.version if part.version is not None else own.current_version
        if part.version is None and part.alias != LATEST:
            exists = part.alias in known
        else:
            exists = number in present and present[number].is_served
        if not exists:
            raise ModelNotFound(str(part))


async def _check_free(connection: AsyncConnection, tenant_id: str, name: str) -> None:
    """Check that no adapter has the name, and that the tenant may save another mixture. Raises BadRequest.

    A name with nothing but refused uploads is free.
    """
    versions = adapter_versions
    taken = (
        select(versions.c.version)
        .join_from(adapters, versions, versions.c.adapter_id == adapters.c.id)
        .where(adapters.c.tenant_id == tenant_id, adapters.c.name == name, versions.c.digest != "")
    )
    if (await connection.execute(taken.limit(1))).first() is not None:
        raise BadRequest(f"name: '{name}' is an adapter; choose another name for the mixture.", param="name")
    count = select(func.count()).select_from(saved_mixtures).where(saved_mixtures.c.tenant_id == tenant_id)
    if (await connection.execute(count)).scalar_one() >= MAX_SAVED:
        raise BadRequest(f"name: a tenant has at most {MAX_SAVED} saved mixtures; delete one first.", param="name")


def _unknown_mixture(name: str) -> RecordNotFound:
    return RecordNotFound(f"There is no saved mixture '{name[:64]}'.", param="name")
