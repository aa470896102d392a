"""A port of its own for operators and engines, so that the public port serves clients only."""

from aiohttp import web
from aiohttp.typedefs import Middleware

from gateway.errors import Handler

# The admin API and the dashboard, announcements of engines, metrics without a port of their own.
PREFIXES = ("/admin", "/internal", "/metrics")


def keep_off_public_port(admin_port: int) -> Middleware:
    """Return the middleware by which these routes are 404 on every other port, as unknown URLs are.

    It goes inside the error boundary and outside of everything that reads a key.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if _is_admins(request) and _local_port(request) != admin_port:
            raise web.HTTPNotFound
        return await handler(request)

    return middleware


def _is_admins(request: web.Request) -> bool:
    resource = request.match_info.route.resource
    # A path may be written in more ways than one; without a route it is the method that is wrong.
    return (resource.canonical if resource is not None else request.path).startswith(PREFIXES)


def _local_port(request: web.Request) -> int | None:
    address = request.transport.get_extra_info("sockname") if request.transport is not None else None
    return address[1] if isinstance(address, tuple) else None
