"""Cross-origin requests of browsers to `/v1`, from exactly the origins that the operator allows.

No answer allows credentials. A page sends its key itself, and a foreign page cannot use a browser's cookies.
"""

import re
from collections.abc import Awaitable, Callable, Collection

from aiohttp import web
from aiohttp.typedefs import Middleware

from gateway.errors import Handler
from wire.headers import BUDGET_HEADER, MAX_TOKENS_HEADER, RECEIPT_HEADER

API = "/v1/"
METHODS = "GET, HEAD, POST, PUT, PATCH, DELETE"
# Headers of answers that a page may read.
EXPOSED = (
    "x-request-id, retry-after, retry-after-ms, etag, upload-offset, idempotent-replayed, "
    f"{MAX_TOKENS_HEADER}, {BUDGET_HEADER}, {RECEIPT_HEADER}, x-ratelimit-limit-requests, "
    "x-ratelimit-remaining-requests, x-ratelimit-reset-requests, x-ratelimit-limit-tokens, "
    "x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"
)
# Header names that a preflight asks for. OpenAI's client sends a dozen of its own.
ASKED = re.compile(r"[A-Za-z0-9-]{1,64}( ?, ?[A-Za-z0-9-]{1,64}){0,63}")
PREFLIGHT_SECONDS = 600

OnPrepare = Callable[[web.Request, web.StreamResponse], Awaitable[None]]


def answer_preflights(origins: Collection[str]) -> Middleware:
    """Return the middleware that answers preflights of allowed origins. Others get the 405 of any OPTIONS."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        asked = request.headers.get("Access-Control-Request-Headers", "")
        if (
            request.method != "OPTIONS"
            or "Access-Control-Request-Method" not in request.headers
            or not _is_allowed(request, origins)
            or (asked and not ASKED.fullmatch(asked))
        ):
            return await handler(request)
        headers = {"Access-Control-Allow-Methods": METHODS, "Access-Control-Max-Age": str(PREFLIGHT_SECONDS)}
        return web.Response(status=204, headers={**headers, "Access-Control-Allow-Headers": asked or "Authorization"})

    return middleware


def allow_origins(origins: Collection[str]) -> OnPrepare:
    """Return the hook for `app.on_response_prepare` that lets pages of these origins read answers of `/v1`."""

    async def on_prepare(request: web.Request, response: web.StreamResponse) -> None:
        if _is_api(request):
            response.headers.add("Vary", "Origin")
            if _is_allowed(request, origins):
                response.headers["Access-Control-Allow-Origin"] = request.headers["Origin"]
                response.headers["Access-Control-Expose-Headers"] = EXPOSED

    return on_prepare


def _is_allowed(request: web.Request, origins: Collection[str]) -> bool:
    return _is_api(request) and request.headers.get("Origin") in origins


def _is_api(request: web.Request) -> bool:
    """Return whether the request is for `/v1`, by its route's pattern, because a path has several forms."""
    resource = request.match_info.route.resource
    return (request.path if resource is None else resource.canonical).startswith(API)
