"""Checks of query parameters: an unknown one is usually a typing error that would widen the result."""

from aiohttp import web

from gateway.errors import BadRequest, Handler

FORCE = ("force",)
USAGE = ("since", "until", "group_by", "limit", "after")
# Parameters by method and path. Every other route of the admin API takes none; other routes are not checked.
PARAMETERS = {
    ("GET", "/readyz"): ("strict",),
    ("GET", "/v1/usage"): USAGE,
    ("GET", "/admin/api/usage"): ("tenant", *USAGE),
    ("GET", "/admin/api/audit"): ("tenant", "actor", "action", "since", "until", "limit", "after"),
    ("POST", "/admin/api/tenants"): FORCE,
    ("PATCH", "/admin/api/tenants/{tenant}"): FORCE,
    ("POST", "/admin/api/tenants/{tenant}/keys"): FORCE,
    ("PUT", "/admin/api/prices/{model}"): FORCE,
}


@web.middleware
async def known_parameters(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Raise BadRequest for a query parameter that the route does not take, or that occurs twice."""
    resource = request.match_info.route.resource
    if request.query and resource is not None:
        path = resource.canonical
        known = PARAMETERS.get((request.method, path))
        if known is None and path.startswith("/admin/api/"):
            known = ()
        if known is not None:
            _check(request, known)
    return await handler(request)


def _check(request: web.Request, known: tuple[str, ...]) -> None:
    for name in request.query:
        if name not in known:
            expected = f"known are: {', '.join(known)}" if known else "this route takes none"
            raise BadRequest(f"{name[:64]}: there is no such query parameter; {expected}.", param=name[:64])
        if len(request.query.getall(name)) > 1:
            raise BadRequest(f"{name}: expected once.", param=name)
