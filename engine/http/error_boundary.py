"""The middleware that answers a handler's error. `engine/answering/errors.py` translates it."""

from aiohttp import web
from aiohttp.typedefs import Handler

from engine.answering.errors import as_api_error, error_body
from wire.http_requests import check_head


@web.middleware
async def error_boundary(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        check_head(request)
        return await handler(request)
    except ConnectionError:
        # The client left, so no answer can be sent.
        raise
    except Exception as exc:  # noqa: BLE001 - translated here, once
        error = as_api_error(exc, request)
        return web.Response(
            status=error.status, body=error_body(error), content_type="application/json", headers=error.headers
        )
