"""Separate port for operators and engines, so that the public port serves clients only."""

from aiohttp import web
from aiohttp.typedefs import Middleware

from gateway.errors import Handler

# Routes of the admin API, the dashboard and engines' announcements, and metrics without their own port.
PREFIXES = ("/admin", "/internal", "/metrics")


def keep_off_public_port(admin_port: int) -> Middleware:
    """Return the middleware that answers these routes with 404 on every other port, as for unknown URLs.

    It goes inside the error boundary and outside every middleware that reads a key.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if _is_admins(request) and not is_admin_port(request, admin_port):
            raise web.HTTPNotFound
        return await handler(request)

    return middleware


def is_admin_port(request: web.Request, admin_port: int | None) -> bool:
    """Return whether the request arrived at the admin port. admin_port: None if the gateway has none."""
    return admin_port is not None and _local_port(request) == admin_port


def _is_admins(request: web.Request) -> bool:
    resource = request.match_info.route.resource
    # Compare the route's pattern, because a path can be encoded in several ways. A wrong method has no resource.
    return (resource.canonical if resource is not None else request.path).startswith(PREFIXES)


def _local_port(request: web.Request) -> int | None:
    address = request.transport.get_extra_info("sockname") if request.transport is not None else None
    return address[1] if isinstance(address, tuple) else None
