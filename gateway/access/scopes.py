"""Enforcement of a route's scope before its handler: the caller's key is verified and kept with the request."""

from collections.abc import Awaitable, Callable
from typing import Literal

from aiohttp import web

from gateway.access.auth import Authenticator, TenantPrincipal
from gateway.sharing.rounds import Rounds

# Scope that a key needs for a route; `admin` is an admin key's.
Scope = Literal["inference", "adapters", "usage", "admin"]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# Id of the admin key, on routes with the scope `admin`.
ACTOR = web.RequestKey("actor", str)
# Tenant and key, on routes with one of the other scopes.
PRINCIPAL = web.RequestKey("principal", TenantPrincipal)


def guarded(handler: Handler, scope: Scope, auth: Authenticator, rounds: Rounds) -> Handler:
    """Return a handler that calls `handler` for keys with the scope. Raises InvalidKey, Forbidden or Unavailable.

    rounds: one look-up of a key serves all requests that wait for it, so these continue in turn.
    """

    async def for_admin(request: web.Request) -> web.StreamResponse:
        request[ACTOR] = await auth.admin(request.headers.get("Authorization"))
        return await handler(request)

    async def for_tenant(request: web.Request) -> web.StreamResponse:
        principal = request[PRINCIPAL] = await auth.tenant(request.headers.get("Authorization"), scope)
        await rounds.begin(principal.tenant.id)
        return await handler(request)

    return for_admin if scope == "admin" else for_tenant
