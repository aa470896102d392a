"""List of adapters of all tenants, or of one, with their use: filtered, sorted and paged by the database."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, get_args

import msgspec
from sqlalchemy import ColumnElement, Select, Subquery, and_, case, func, literal, or_, select
from sqlalchemy.engine import Row
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.records.activity.tables import MODEL, activity_series
from gateway.records.adapters.list_uses import (
    KNOWN,
    Use,
    last_use,
    most_used,
    recent_requests,
    unused,
    used_in,
    uses_of,
    uses_of_series,
)
from gateway.records.sql.database import Database
from gateway.records.sql.tables import (
    adapter_aliases,
    adapter_probes,
    adapter_versions,
    adapters,
    saved_mixtures,
    tenants,
)
from gateway.records.usage.tenant_sums import TenantSums
from gateway.records.version_state import READY, State
from wire.digests import bare_digest
from wire.model_names import version_name

Sort = Literal["name", "tenant", "version", "state", "size", "rank", "created", "requests", "last_used"]
SORTS: tuple[Sort, ...] = get_args(Sort)
BY_USE: tuple[Sort, ...] = ("requests", "last_used")
# Sorts that do not read versions.
LIGHT: tuple[Sort, ...] = ("name", "tenant", *BY_USE)
# States that a listed adapter may have.
STATES: tuple[State, ...] = ("ready", "validating", "rejected", "retired")
MAX_PAGE = 1000
MAX_NAMES, MAX_TENANTS = 500, 2000
# Columns of the sorts whose names differ, and the columns of a row.
COLUMNS: dict[str, str] = {"size": "num_bytes", "created": "created_at"}
OF_ROW = (
    *("tenant_id", "tenant", "name", "version", "state", "digest", "rank", "num_bytes", "created_at"),
    *("newest", "newest_state", "base", "base_id", "name_created_at"),
)


class ListFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Filter of adapters; None: any.

    tenant: its name. search: part of the adapter's or the tenant's name, or the beginning of a digest. state: the state
    of `latest` or of the newest version. base: digest of the base model, without prefix. idle_days: days for which the
    adapter has existed without a request; the UTC day in which they begin has none either. names: only these adapters.
    """

    tenant: str | None = None
    tenant_id: str | None = None
    search: str | None = None
    state: State | None = None
    rank: int | None = None
    base: str | None = None
    idle_days: int | None = None
    names: Sequence[str] | None = None

    @property
    def is_light(self) -> bool:
        """Return whether the filter needs no version, except those whose digest it finds."""
        return self.state is None and self.rank is None and self.base is None


class ListedAdapter(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter of a tenant.

    version, state, digest, rank, num_bytes, created_at, pinned: values of the version of `latest`, or of the newest
    version if `latest` has none. newest: number of the newest version, and newest_state its state. versions: number of
    versions on record. base: digest of the weights that the version is bound to. base_id: its base model; None for the
    first. name_created_at: creation of the adapter's name. requests: within RECENT. last_used: start of the hour or day
    of the last request within KNOWN.
    """

    tenant_id: str
    tenant: str
    name: str
    version: int
    state: State
    digest: str
    rank: int
    num_bytes: int
    created_at: datetime
    pinned: bool
    newest: int
    newest_state: State
    versions: int
    base: str | None
    name_created_at: datetime
    base_id: str | None = None
    requests: int = 0
    last_used: datetime | None = None

    def is_never_used(self, now: datetime) -> bool:
        """Return whether no request has used the adapter since its name exists. Uses older than KNOWN are unknown."""
        return self.last_used is None and now - self.name_created_at <= KNOWN


class TenantModel(msgspec.Struct, frozen=True, kw_only=True):
    """A value of `model` for a tenant's requests. means: the text of a saved mixture."""

    id: str
    kind: Literal["adapter", "alias", "version", "mixture"]
    means: str | None = None


class AdapterPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page of adapters and the number of all adapters that match."""

    adapters: list[ListedAdapter]
    total: int


class AdapterList:
    """Queries of the list. Raises Unavailable while the database is away."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._sums = TenantSums(database)

    async def page(
        self, criteria: ListFilter, *, sort: Sort = "name", descending: bool = False, page: int = 1, limit: int = 50
    ) -> AdapterPage:
        """Return a page, by number from 1."""
        now, is_complete = datetime.now(UTC), await self._sums.complete()
        if criteria.is_light and sort in LIGHT and is_complete:
            return await self._light(criteria, sort, descending, (page - 1) * limit, limit)
        listed = _listed(now)
        query = select(listed).where(*_conditions(listed, criteria))
        order: ColumnElement[Any] = listed.c[COLUMNS.get(sort, sort)] if sort not in BY_USE else literal(0)
        counted = select(func.count()).select_from(query.subquery())
        if criteria.idle_days is not None:
            used = used_in(now, criteria.idle_days, criteria.tenant_id)
            same = and_(used.c.tenant_id == listed.c.tenant_id, used.c.model == listed.c.name)
            old = select(adapters.c.id).where(adapters.c.created_at <= now - timedelta(days=criteria.idle_days))
            query = query.outerjoin(used, same).where(used.c.model.is_(None), listed.c.id.in_(old))
            counted = select(func.count()).select_from(query.subquery())
        if sort in BY_USE:
            uses = uses_of(now, criteria.tenant_id, only_recent=sort == "requests")
            same = and_(uses.c.tenant_id == listed.c.tenant_id, uses.c.model == listed.c.name)
            query = query.outerjoin(uses, same)
            order = uses.c[sort]
        by = order.desc().nullslast() if descending else order.asc().nullsfirst()
        query = query.order_by(by, listed.c.name, listed.c.tenant).limit(limit).offset((page - 1) * limit)
        async with self._database.read() as connection:
            rows = (await connection.execute(query)).all()
            is_all = page == 1 and len(rows) < limit
            total = len(rows) if is_all else (await connection.execute(counted)).scalar_one()
            return AdapterPage(adapters=await _complete(connection, rows, now, is_complete), total=total)

    async def _light(self, criteria: ListFilter, sort: Sort, descending: bool, offset: int, limit: int) -> AdapterPage:
        """Return a page for a light filter and sort: versions are read only for the adapters on the page."""
        now = datetime.now(UTC)
        series = activity_series.c
        same = and_(series.tenant_id == adapters.c.tenant_id, series.kind == MODEL, series.name == adapters.c.name)
        owned = source = adapters.join(tenants, tenants.c.id == adapters.c.tenant_id)
        if sort in BY_USE or criteria.idle_days is not None:
            source = source.outerjoin(activity_series, same)
        conditions = [] if criteria.tenant is None else [tenants.c.name == criteria.tenant]
        if criteria.tenant_id is not None:
            conditions.append(adapters.c.tenant_id == criteria.tenant_id)
        if criteria.names is not None:
            conditions.append(adapters.c.name.in_(criteria.names))
        if criteria.search is not None:
            conditions.append(_found_by(criteria.search.lower(), criteria.tenant_id, now))
        if criteria.idle_days is not None:
            conditions += unused(now, criteria.idle_days)
        orders: dict[str, ColumnElement[Any]] = {"name": adapters.c.name, "tenant": tenants.c.name}
        orders |= {"last_used": last_use(now), "requests": recent_requests(now)}
        by = orders[sort].desc().nullslast() if descending else orders[sort].asc().nullsfirst()
        counted = select(func.count()).select_from(owned if conditions else adapters).where(*conditions)
        # The condition for unused adapters takes longest, so a single pass finds and counts them.
        number: ColumnElement[int] = (
            func.count().over() if criteria.idle_days is not None else counted.scalar_subquery()
        )
        found = select(adapters.c.id, number).select_from(source).where(*conditions)
        chosen = found.order_by(by, adapters.c.name, tenants.c.name).limit(limit).offset(offset)
        async with self._database.read() as connection:
            numbered: Sequence[Row[Any]] = []
            if criteria == ListFilter() and descending and sort in BY_USE:
                numbered = await most_used(connection, number, sort, (offset, limit), now)
            if not numbered:
                numbered = (await connection.execute(chosen)).all()
            ids = [row[0] for row in numbered]
            listed = _listed(now, ids)
            rows = {row.id: row for row in (await connection.execute(select(listed))).all()}
            total = int(numbered[0][-1]) if numbered else 0
            if offset and not numbered:
                total = (await connection.execute(select(func.count()).select_from(found.subquery()))).scalar_one()
            ordered = [rows[each] for each in ids if each in rows]
            return AdapterPage(adapters=await _complete(connection, ordered, now, True), total=total)

    async def bases(self) -> Sequence[str]:
        """Return the digests of the base models that versions are bound to."""
        query = select(adapter_probes.c.base_digest).where(adapter_probes.c.base_digest.is_not(None)).distinct()
        async with self._database.read() as connection:
            return [str(digest) for digest in (await connection.execute(query.limit(MAX_PAGE))).scalars()]

    async def models(self, tenant_id: str) -> list[TenantModel]:
        """Return the names that a tenant's requests can use beside the base model, at most MAX_NAMES of each kind."""
        names, own, aliases = adapters.c, adapter_versions.c, adapter_aliases.c
        owned = names.tenant_id == tenant_id
        is_served = and_(own.state == READY, or_(own.expires_at.is_(None), own.expires_at > datetime.now(UTC)))
        versions = select(names.name, own.version).join(adapters, names.id == own.adapter_id).where(owned, is_served)
        by_alias = select(names.name, aliases.alias).join(adapters, names.id == aliases.adapter_id).where(owned)
        mixtures = select(saved_mixtures.c.name, saved_mixtures.c.model).where(saved_mixtures.c.tenant_id == tenant_id)
        async with self._database.read() as connection:
            numbers = await connection.execute(versions.order_by(names.name, own.version.desc()).limit(MAX_NAMES))
            found = [(row.name, row.version) for row in numbers]
            named = await connection.execute(by_alias.order_by(names.name, aliases.alias).limit(MAX_NAMES))
            pointed = [(row.name, row.alias) for row in named]
            saved = await connection.execute(mixtures.order_by(saved_mixtures.c.name).limit(MAX_NAMES))
            mixed = [(row.name, row.model) for row in saved]
        plain = dict.fromkeys(name for name, _ in found)
        return [
            *(TenantModel(id=name, kind="adapter") for name in plain),
            *(TenantModel(id=alias_name(*each), kind="alias") for each in pointed),
            *(TenantModel(id=version_name(*each), kind="version") for each in found),
            *(TenantModel(id=name, kind="mixture", means=model) for name, model in mixed),
        ]

    async def tenants(self) -> list[str]:
        """Return the first MAX_TENANTS names of tenants."""
        query = select(tenants.c.name).order_by(tenants.c.name).limit(MAX_TENANTS)
        async with self._database.read() as connection:
            return list((await connection.execute(query)).scalars())


def alias_name(name: str, alias: str) -> str:
    return f"{name}:{alias}"


def _listed(now: datetime, ids: Sequence[str] | Select[str] | None = None) -> Subquery:
    """Select every name, or those of some ids, with its present version, and the newest version's number and state."""
    latest, newest, probe = adapter_versions.alias(), adapter_versions.alias(), adapter_probes.alias()
    number = select(func.max(adapter_versions.c.version)).where(adapter_versions.c.adapter_id == adapters.c.id)

    def present(column: str) -> ColumnElement[Any]:
        return case((latest.c.version.is_not(None), latest.c[column]), else_=newest.c[column])

    version = present("version")
    return (
        select(adapters.c.id, adapters.c.tenant_id, tenants.c.name.label("tenant"), adapters.c.name)
        .add_columns(version.label("version"), _state(present("state"), present("expires_at"), now).label("state"))
        .add_columns(
            *(present(name).label(name) for name in ("digest", "rank", "num_bytes", "created_at", "pinned", "base_id"))
        )
        .add_columns(newest.c.version.label("newest"), adapters.c.created_at.label("name_created_at"))
        .add_columns(_state(newest.c.state, newest.c.expires_at, now).label("newest_state"))
        .add_columns(probe.c.base_digest.label("base"))
        .select_from(adapters)
        .join(tenants, tenants.c.id == adapters.c.tenant_id)
        .join(newest, and_(newest.c.adapter_id == adapters.c.id, newest.c.version == number.scalar_subquery()))
        .outerjoin(latest, and_(latest.c.adapter_id == adapters.c.id, latest.c.version == adapters.c.current_version))
        .outerjoin(probe, and_(probe.c.adapter_id == adapters.c.id, probe.c.version == version))
        .where(*([] if ids is None else [adapters.c.id.in_(ids)]))
        .subquery()
    )


def _state(state: ColumnElement[Any], expires_at: ColumnElement[Any], now: datetime) -> ColumnElement[Any]:
    """Return a version's state. A ready version counts as retired once it has expired."""
    return case((and_(state == READY, expires_at <= now), "retired"), else_=state)


def _conditions(listed: Subquery, criteria: ListFilter) -> list[ColumnElement[bool]]:
    own = listed.c
    equal = {"tenant": criteria.tenant, "tenant_id": criteria.tenant_id, "rank": criteria.rank, "base": criteria.base}
    found = [own[name] == value for name, value in equal.items() if value is not None]
    if criteria.names is not None:
        found.append(own.name.in_(criteria.names))
    if criteria.state is not None:
        found.append(or_(own.state == criteria.state, own.newest_state == criteria.state))
    if criteria.search is not None:
        text = criteria.search.lower()
        digest = own.digest.startswith(bare_digest(text), autoescape=True)
        found.append(or_(_is_named(text, own.name, own.tenant), digest))
    return found


def _is_named(text: str, *names: ColumnElement[str]) -> ColumnElement[bool]:
    return or_(*(name.contains(text, autoescape=True) for name in names))


def _found_by(text: str, tenant_id: str | None, now: datetime) -> ColumnElement[bool]:
    """Return the condition of a search, for adapters joined with their tenants. Few versions have such a digest.

    tenant_id: look only at this tenant's versions.
    """
    named, digest = _is_named(text, adapters.c.name, tenants.c.name), bare_digest(text)
    if not re.fullmatch("[0-9a-f]*", digest):
        return named
    having = select(adapter_versions.c.adapter_id).where(adapter_versions.c.digest.startswith(digest))
    if tenant_id is not None:
        own = adapters.alias()
        having = having.where(adapter_versions.c.adapter_id.in_(select(own.c.id).where(own.c.tenant_id == tenant_id)))
    listed = _listed(now, having)
    return or_(named, adapters.c.id.in_(select(listed.c.id).where(listed.c.digest.startswith(digest))))


async def _complete(
    connection: AsyncConnection, rows: Sequence[Row[Any]], now: datetime, is_complete: bool
) -> list[ListedAdapter]:
    """Return the adapters of a page's rows with their use and the number of their versions.

    is_complete: whether the sums for charts have all requests.
    """
    if not rows:
        return []
    own = adapter_versions
    counted = select(own.c.adapter_id, func.count()).where(own.c.adapter_id.in_([row.id for row in rows]))
    numbers = {row[0]: row[1] for row in await connection.execute(counted.group_by(own.c.adapter_id))}
    if is_complete:
        uses = await uses_of_series(connection, now, rows)
    else:
        found = await connection.execute(select(uses_of(now, None, rows)))
        uses = {(use.tenant_id, use.model): Use(use.requests, use.last_used) for use in found}
    return [_read(row, numbers.get(row.id, 0), uses.get((row.tenant_id, row.name), Use())) for row in rows]


def _read(row: Row[Any], versions: int, use: Use) -> ListedAdapter:
    return ListedAdapter(
        **{name: getattr(row, name) for name in OF_ROW},
        pinned=bool(row.pinned),
        versions=versions,
        requests=use.requests,
        last_used=use.last_used,
    )
