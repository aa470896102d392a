"""Routes of an adapter's versions and aliases, for a tenant itself and for operators under `/admin/api/tenants`."""

from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType

from gateway.api.adapters.caller import find_caller, read_small, version_of
from gateway.api.requests.fields import check_year, json_response, read_flag
from gateway.billing.lease_note import noted_versions
from gateway.errors import BadRequest, Forbidden, RecordNotFound
from gateway.quota.quota import Quota
from gateway.records.adapters.aliases import MAX_TARGETS, MAX_WEIGHT, Alias, AliasTarget, Targets
from gateway.records.adapters.catalog import Catalog
from gateway.records.adapters.list import ListedAdapter
from gateway.records.adapters.rows import Reason, Version
from gateway.records.adapters.uploads import PartialUpload, Uploads
from gateway.records.tenants.tenants import Tenant, Tenants
from gateway.records.version_state import State
from wire.digests import digest_name
from wire.model_names import MAX_VERSION

Moment = Annotated[datetime, Meta(tz=True)]


class NewTarget(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A version of an alias and its weight. expires_at: the alias does not refer to the version from then on."""

    version: Annotated[int, Meta(ge=1, le=MAX_VERSION)]
    weight: Annotated[int, Meta(ge=1, le=MAX_WEIGHT)] = 1
    expires_at: Moment | None = None


class NewTargets(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    targets: Annotated[tuple[NewTarget, ...], Meta(min_length=1, max_length=MAX_TARGETS)]


class VersionChanges(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Changes of a version. expires_at: null for never. pinned: only operators may set it."""

    state: Literal["ready", "retired"] | UnsetType = UNSET
    expires_at: Moment | UnsetType | None = UNSET
    pinned: bool | UnsetType = UNSET

    def given(self) -> dict[str, Any]:
        """Return the fields that the body contains."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not UNSET}


class ShownVersion(Struct, frozen=True, kw_only=True):
    """A version. digest, rank: null for a refused upload. expires_at: end of its service; null: never. reasons: why it
    was refused. upload, received: id and received bytes of an unfinished upload, which has no other optional field.
    """

    object: Literal["adapter.version"] = "adapter.version"
    name: str
    version: int | None
    state: State
    digest: str | UnsetType | None = UNSET
    rank: int | UnsetType | None = UNSET
    upload: str | UnsetType = UNSET
    received: int | UnsetType = UNSET
    size_bytes: int
    created_at: datetime | UnsetType | None = UNSET
    pinned: bool | UnsetType = UNSET
    expires_at: datetime | None
    reasons: tuple[Reason, ...] | UnsetType = UNSET


class VersionList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ShownVersion]


class DeletedAdapter(Struct, frozen=True, kw_only=True):
    """A deleted name, or one deleted version of it."""

    object: Literal["adapter", "adapter.version"]
    name: str
    version: int | UnsetType = UNSET
    deleted: bool = True


class ShownTarget(Struct, frozen=True, kw_only=True):
    """A version of an alias and its weight. expires_at: the alias does not refer to it from then on; null: never."""

    version: int
    weight: int
    expires_at: datetime | None


class ShownAlias(Struct, frozen=True, kw_only=True):
    """An alias. history: earlier targets, the newest last. etag: for `If-Match`."""

    object: Literal["adapter.alias"] = "adapter.alias"
    name: str
    alias: str
    targets: list[ShownTarget]
    history: list[list[ShownTarget]]
    etag: str


class AliasList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ShownAlias]


class DeletedAlias(Struct, frozen=True, kw_only=True):
    object: Literal["adapter.alias"] = "adapter.alias"
    name: str
    alias: str
    deleted: bool = True


class AdapterVersions:
    """Routes of versions and aliases. An absent adapter and another tenant's get the same answer."""

    def __init__(self, *, tenants: Tenants, catalog: Catalog, uploads: Uploads, quota: Quota) -> None:
        self._tenants = tenants
        self._catalog = catalog
        self._uploads = uploads
        self._quota = quota

    async def list(self, request: web.Request) -> web.Response:
        """List the versions of an adapter and its unfinished uploads."""
        caller, name = await find_caller(request, self._tenants), request.match_info["name"]
        uploads = await self._uploads.of_name(caller.tenant, name)
        try:
            found = await self._catalog.versions.list(caller.tenant, name)
        except RecordNotFound:
            if not uploads:
                raise
            found = []
        data = [*map(describe_version, found), *map(_describe_upload, uploads)]
        return json_response(VersionList(data=data))

    async def get(self, request: web.Request) -> web.Response:
        caller = await find_caller(request, self._tenants)
        found = await self._catalog.versions.get(caller.tenant, request.match_info["name"], version_of(request))
        return json_response(describe_version(found))

    async def change(self, request: web.Request) -> web.Response:
        """Retire a version or make it ready again, set its end, or pin it."""
        caller = await find_caller(request, self._tenants)
        given = (await read_small(request, caller, VersionChanges)).given()
        if not given:
            raise BadRequest("Expected state, expires_at or pinned.", param="state")
        force = read_flag(request, "force")
        check_year(given.get("expires_at"), "expires_at")
        if "pinned" in given and caller.principal is not None:
            raise Forbidden("pinned: only an operator may pin versions.", param="pinned")
        await caller.count_change(request, self._quota)
        name, number = request.match_info["name"], version_of(request)
        changed = await self._catalog.versions.change(caller.tenant, name, number, given, caller.actor, force=force)
        return json_response(describe_version(changed))

    async def delete(self, request: web.Request) -> web.Response:
        """Delete the name, or the version of the path. Refuse one that is in use, unless forced."""
        caller = await find_caller(request, self._tenants)
        name, force = request.match_info["name"], read_flag(request, "force")
        number = version_of(request) if "version" in request.match_info else None
        await caller.count_change(request, self._quota)
        running = set() if force else await self.running(caller.tenant, name)
        await self._catalog.delete(caller.tenant, name, caller.actor, number, running=running, force=force)
        if number is None:
            return json_response(DeletedAdapter(object="adapter", name=name))
        return json_response(DeletedAdapter(object="adapter.version", name=name, version=number))

    async def list_aliases(self, request: web.Request) -> web.Response:
        caller = await find_caller(request, self._tenants)
        found = await self._catalog.aliases.list(caller.tenant, request.match_info["name"])
        return json_response(AliasList(data=[describe_alias(alias) for alias in found]))

    async def get_alias(self, request: web.Request) -> web.Response:
        caller = await find_caller(request, self._tenants)
        name, alias, _ = _alias_of(request)
        return _alias_response(await self._catalog.aliases.get(caller.tenant, name, alias))

    async def move(self, request: web.Request) -> web.Response:
        """Point an alias to versions by weight. An existing alias needs its ETag in If-Match."""
        caller = await find_caller(request, self._tenants)
        given = await read_small(request, caller, NewTargets)
        for i, each in enumerate(given.targets):
            check_year(each.expires_at, f"targets[{i}].expires_at")
        await caller.count_change(request, self._quota)
        targets = [AliasTarget(each.version, each.weight, each.expires_at) for each in given.targets]
        name, alias, if_match = _alias_of(request)
        moved, is_new = await self._catalog.aliases.move(caller.tenant, name, alias, targets, caller.actor, if_match)
        return _alias_response(moved, 201 if is_new else 200)

    async def rollback(self, request: web.Request) -> web.Response:
        """Roll an alias back to its previous targets."""
        caller = await find_caller(request, self._tenants)
        await caller.count_change(request, self._quota)
        name, alias, if_match = _alias_of(request)
        return _alias_response(await self._catalog.aliases.rollback(caller.tenant, name, alias, caller.actor, if_match))

    async def delete_alias(self, request: web.Request) -> web.Response:
        caller = await find_caller(request, self._tenants)
        await caller.count_change(request, self._quota)
        name, alias, if_match = _alias_of(request)
        await self._catalog.aliases.delete(caller.tenant, name, alias, caller.actor, if_match)
        return json_response(DeletedAlias(name=name, alias=alias))

    async def running(self, tenant: Tenant, name: str) -> set[int]:
        """Return the versions of the name that running requests of all gateways use. Raises Unavailable."""
        found = set()
        for note in await self._quota.notes(tenant.id):
            found |= {version for each, version in noted_versions(note) if each == name}
        return found


def _alias_of(request: web.Request) -> tuple[str, str, str | None]:
    """Return the adapter's name and the alias of the path, and the ETag in If-Match."""
    return request.match_info["name"], request.match_info["alias"], request.headers.get("If-Match")


def describe_version(version: Version) -> ShownVersion:
    """Return a version as the API shows it."""
    return ShownVersion(**describe_content(version), expires_at=version.expires_at, reasons=version.reasons)


def describe_content(version: Version | ListedAdapter) -> dict[str, Any]:
    """Return the fields that versions and listed adapters have in common."""
    return {
        "name": version.name,
        "version": version.version,
        "state": version.state,
        "digest": digest_name(version.digest) if version.digest else None,
        "rank": version.rank or None,
        "size_bytes": version.num_bytes,
        "created_at": version.created_at,
        "pinned": version.pinned,
    }


def _describe_upload(upload: PartialUpload) -> ShownVersion:
    """Return an unfinished upload as a version without a number."""
    return ShownVersion(
        name=upload.name,
        version=None,
        state="uploading",
        upload=upload.id,
        received=upload.received,
        size_bytes=upload.num_bytes,
        expires_at=upload.expires_at,
    )


def describe_alias(alias: Alias) -> ShownAlias:
    """Return an alias as the API shows it."""
    return ShownAlias(
        name=alias.name,
        alias=alias.alias,
        targets=_describe_targets(alias.targets),
        history=[_describe_targets(targets) for targets in alias.history],
        etag=alias.etag,
    )


def _describe_targets(targets: Targets) -> list[ShownTarget]:
    return [ShownTarget(**msgspec.structs.asdict(target)) for target in targets]


def _alias_response(alias: Alias, status: int = 200) -> web.Response:
    response = json_response(describe_alias(alias), status)
    response.headers["ETag"] = alias.etag
    return response
