"""Checks of query parameters: an unknown one is usually a typing error that would widen the result."""

from collections.abc import Mapping

from aiohttp import web
from aiohttp.typedefs import Middleware

from gateway.errors import BadRequest, Handler


def known_parameters(parameters: Mapping[tuple[str, str], tuple[str, ...]]) -> Middleware:
    """Return the middleware. parameters: the allowed ones by method and path. Other routes are not checked, except for
    unknown methods of the admin API, which take no parameters.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Raise BadRequest for a query parameter that the route does not take, or that occurs twice."""
        resource = request.match_info.route.resource
        if request.query and resource is not None:
            path = resource.canonical
            known = parameters.get((request.method, path), () if path.startswith("/admin/api/") else None)
            if known is not None:
                _check(request, known)
        return await handler(request)

    return middleware


def _check(request: web.Request, known: tuple[str, ...]) -> None:
    for name in request.query:
        if name not in known:
            expected = f"known are: {', '.join(known)}" if known else "this route takes none"
            raise BadRequest(f"{name[:64]}: there is no such query parameter; {expected}.", param=name[:64])
        if len(request.query.getall(name)) > 1:
            raise BadRequest(f"{name}: expected once.", param=name)
