"""Error boundary: the only place that turns an exception into an HTTP response."""

from aiohttp import web

from gateway.errors import ERROR_CODE, FAILURE, REQUEST_ID, GatewayError, Handler, RecordNotFound, error_body, translate
from gateway.unknown_urls import unknown_route, unsupported_api
from wire.error_codes import UNKNOWN_URL
from wire.http_requests import check_head


@web.middleware
async def error_boundary(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Convert every exception of a handler into a response: a redirect, or OpenAI's error object."""
    try:
        check_head(request)
        return await handler(request)
    except web.HTTPRedirection as redirect:
        # Raised further, it would be counted as a failure of the gateway, and against no rate.
        return web.Response(status=redirect.status, headers=redirect.headers)
    except Exception as error:  # noqa: BLE001  (the boundary: every exception ends here, logged once)
        is_unknown = isinstance(error, web.HTTPNotFound)
        failure = _unknown_url(request) if is_unknown else translate(error, request[REQUEST_ID])
        request[ERROR_CODE], request[FAILURE] = failure.code or failure.kind, failure
        for known in (error, failure):
            # The request refers to both, and the frames of their tracebacks refer to the request.
            known.__traceback__ = known.__cause__ = known.__context__ = None
        return _to_response(failure)


def _unknown_url(request: web.Request) -> RecordNotFound:
    if (message := unsupported_api(request)) is not None:
        return RecordNotFound(message, code="unsupported_endpoint")
    return RecordNotFound(unknown_route(request), code=UNKNOWN_URL)


def _to_response(error: GatewayError) -> web.Response:
    """Return the HTTP response for an error."""
    body = error_body(error.message, error.kind, error.param, error.code)
    return web.Response(body=body, status=error.status, content_type="application/json", headers=error.headers)
