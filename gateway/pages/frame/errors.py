"""Errors of pages as pages: a browser gets a sentence in the frame instead of JSON."""

from aiohttp import web
from aiohttp.typedefs import Middleware

from gateway.access.roles import ADMIN_PATH, CONSOLE_PATH
from gateway.errors import ERROR_CODE, REQUEST_ID, Handler, RecordNotFound, translate
from gateway.pages.frame.frame import Frame
from wire.error_codes import UNKNOWN_URL

TITLES = {
    400: "This cannot be shown",
    401: "Log in",
    403: "Not allowed",
    404: "There is nothing here",
    409: "This has changed",
    410: "No longer kept",
    413: "Too large",
    429: "Too many requests",
    503: "Not available now",
}
# Statuses that no change of a form mends: rate limits, and faults of the gateway and its parts.
TEMPORARY = (429, *range(500, 600))
HINTS = {
    503: "The gateway tries again by itself. The status strip at the top shows the fault and when it began.",
    404: "It may have been deleted or renamed.",
}


def error_pages(frame: Frame) -> Middleware:
    """Return the middleware. Install it inside the error boundary and outside of everything that raises."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not _is_page(request):
            return await handler(request)
        try:
            return await handler(request)
        except web.HTTPRedirection:
            raise
        except Exception as error:  # noqa: BLE001  (the boundary of pages: translated and logged once)
            failure = _no_page() if isinstance(error, web.HTTPNotFound) else translate(error, request[REQUEST_ID])
            request[ERROR_CODE] = failure.code or failure.kind
            response = frame.render(
                request,
                "error.html",
                title=TITLES.get(failure.status, "This did not work"),
                status=failure.status,
                message=failure.message,
                hint=HINTS.get(failure.status),
                code=failure.status,
                request_id=request[REQUEST_ID],
            )
            response.headers.update({name: value for name, value in failure.headers.items() if name == "Retry-After"})
            return response

    return middleware


def _no_page() -> RecordNotFound:
    return RecordNotFound("No page has this address.", code=UNKNOWN_URL)


def _is_page(request: web.Request) -> bool:
    """Return whether the request is for a page: it is outside the JSON API and accepts HTML."""
    path, home = request.path, f"{ADMIN_PATH}/"
    is_below = path.startswith((home, f"{CONSOLE_PATH}/")) and not path.startswith(f"{ADMIN_PATH}/api/")
    return is_below and "text/html" in request.headers.get("Accept", "")
