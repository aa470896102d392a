"""Enforcement of a route's scope and role before its handler: the caller is verified and kept with the request."""

from collections.abc import Awaitable, Callable
from typing import Literal

from aiohttp import web

from gateway.access.auth import Authenticator, TenantPrincipal
from gateway.access.roles import Role, check_role
from gateway.access.sessions import VISITOR
from gateway.api.page_guard import PageGuard
from gateway.records.keys.keys import KEY_ID
from gateway.records.keys.watched import SESSION_ITSELF
from gateway.sharing.start_limiter import StartLimiter

# Scope that a route requires. admin: an admin key. any: any key of a tenant. page: a browser's session, no key.
Scope = Literal["inference", "adapters", "usage", "keys", "any", "admin", "page"]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# Id of the admin key on routes with the scope `admin`, and the subject of the session on pages.
ACTOR = web.RequestKey("actor", str)
# Role of the admin key, on routes with the scope `admin`.
ROLE: web.RequestKey[Role] = web.RequestKey("role")
# Tenant and key, on routes with one of the other scopes, and on pages of the console.
PRINCIPAL = web.RequestKey("principal", TenantPrincipal)
# Key of the application, for long answers.
AUTH = web.AppKey("auth", Authenticator)


def watched_by(request: web.Request) -> tuple[str, ...]:
    """Return what must stay valid while a request is answered, as in TenantPrincipal; of a route with a scope."""
    if PRINCIPAL in request:
        return request[PRINCIPAL].watched
    actor, visitor = request[ACTOR], request.get(VISITOR)
    key = (actor,) if KEY_ID.fullmatch(actor) else ()
    return key if visitor is None else (*key, f"{SESSION_ITSELF}{visitor.session_id}")


class Guards:
    """Guards of routes. After authentication, requests of tenants continue in turn (`StartLimiter`), because a single
    look-up of a key or session can release many requests at once.
    """

    def __init__(self, auth: Authenticator, pages: PageGuard) -> None:
        self._auth = auth
        self._pages = pages
        self._start_limiter = StartLimiter()

    def guarded(self, handler: Handler, scope: Scope, role: Role, beyond: str = "") -> Handler:
        """Return a handler that calls `handler` for callers with the scope and at least the role.

        role: counts on admin routes and pages. beyond: as in `check_role`. Raises InvalidKey, Forbidden or Unavailable.
        """
        auth, pages, limiter = self._auth, self._pages, self._start_limiter

        async def for_admin(request: web.Request) -> web.StreamResponse:
            admin = await auth.admin(request.headers.get("Authorization"))
            check_role(admin.role, role, beyond)
            request[ACTOR], request[ROLE] = admin.key_id, admin.role
            return await handler(request)

        async def for_tenant(request: web.Request) -> web.StreamResponse:
            principal = request[PRINCIPAL] = await auth.tenant(request.headers.get("Authorization"), scope)
            await limiter.begin(principal.tenant.id)
            return await handler(request)

        async def for_visitor(request: web.Request) -> web.StreamResponse:
            visitor = await pages.visitor(request, role)
            if isinstance(visitor, web.Response):
                return visitor
            request[ACTOR] = visitor.subject
            if visitor.principal is not None:
                request[PRINCIPAL] = visitor.principal
                await limiter.begin(visitor.principal.tenant.id)
            return await handler(request)

        return {"admin": for_admin, "page": for_visitor}.get(scope, for_tenant)
