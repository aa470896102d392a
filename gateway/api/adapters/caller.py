"""Caller of an adapter's route: a tenant itself, or an operator on its behalf under `/admin/api/tenants/{tenant}`."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from aiohttp import web
from msgspec import Struct

from gateway.access.auth import Authenticator, TenantPrincipal
from gateway.api.requests.fields import read_body, read_raw
from gateway.api.requests.memory import OPERATOR
from gateway.api.scopes import ACTOR, PRINCIPAL
from gateway.errors import REQUEST_ID, TooLarge
from gateway.quota.limits import upload_limits
from gateway.quota.quota import Quota
from gateway.quota.uploading import ReceivedBytes, UploadSize
from gateway.records.adapters.rows import unknown_version
from gateway.records.tenants.tenants import Tenant, Tenants
from wire.model_names import parse_reference

T = TypeVar("T", bound=Struct)
MAX_BODY_BYTES = 16_384
# Whether the request was counted as a change of its tenant.
COUNTED = web.RequestKey("counted_change", bool)


class AdapterCaller(Struct, frozen=True):
    """The tenant that owns an adapter, and the client that acts for it.

    actor: id of the client's key. owner: the tenant's id, or OPERATOR; work of different owners takes turns. principal:
    the tenant's principal, None for an operator.
    """

    tenant: Tenant
    actor: str
    owner: str
    principal: TenantPrincipal | None

    def check_name(self, name: str) -> None:
        """Raise Forbidden if the caller's key does not permit the adapter. Operators may change every adapter."""
        if self.principal is not None:
            self.principal.check_model(name)

    async def count_change(self, request: web.Request, quota: Quota) -> None:
        """Count a tenant's change against its limit, at most once a request. Raises RateLimited, Unavailable."""
        if self.principal is not None and COUNTED not in request:
            limits = upload_limits(self.tenant.adapter_limits, is_upload=False)
            await quota.change(self.tenant.id, request[REQUEST_ID], limits)
            request[COUNTED] = True

    @asynccontextmanager
    async def uploading(
        self,
        request: web.Request,
        auth: Authenticator,
        quota: Quota,
        *,
        size: int | None,
        most: int,
        is_change: bool = True,
    ) -> AsyncIterator[ReceivedBytes]:
        """Hold one of the tenant's upload slots and room for the upload's bytes, while the tenant's key is valid.

        size: bytes of the upload; None if unknown, at most `most`. is_change: whether the upload counts as a change of
        adapters. An operator's upload needs no slot and no room. Raises RateLimited, Unavailable.
        """
        if self.principal is None:
            yield ReceivedBytes()
            return
        slot = quota.upload(
            self.tenant.id,
            request[REQUEST_ID],
            upload_limits(self.tenant.adapter_limits, is_change=is_change),
            UploadSize(most if size is None else min(size, most), size is not None),
        )
        async with auth.while_valid(self.principal.watched), slot as received:
            yield received


async def find_caller(request: web.Request, tenants: Tenants) -> AdapterCaller:
    """Return the caller of a route. Raises Forbidden if its key does not permit the adapter in the path."""
    if (tenant := request.match_info.get("tenant")) is not None:
        return AdapterCaller(await tenants.get(tenant), request[ACTOR], OPERATOR, None)
    caller = tenants_caller(request)
    if (name := request.match_info.get("name")) is not None:
        caller.check_name(name)
    return caller


def tenants_caller(request: web.Request) -> AdapterCaller:
    """Return the caller of a tenant's own route."""
    principal = request[PRINCIPAL]
    return AdapterCaller(principal.tenant, principal.key_id, principal.tenant.id, principal)


async def read_small(request: web.Request, caller: AdapterCaller, kind: type[T]) -> T:
    """Return the body as `kind`. Raises TooLarge, and what `read_body` raises."""
    # A tenant's large body would occupy the event loop while it is decoded.
    if len(await read_raw(request, caller.owner)) > MAX_BODY_BYTES:
        raise TooLarge(f"Expected a body of at most {MAX_BODY_BYTES} bytes.")
    return await read_body(request, kind, caller.owner)


def version_of(request: web.Request) -> int:
    """Return the version number in the path. Raises RecordNotFound for a text that is no number."""
    found = parse_reference(f"a@{request.match_info['version']}")
    if found is None or found.version is None:
        raise unknown_version()
    return found.version
