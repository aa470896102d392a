"""Access rules of the routes, and the log line of each request. Secrets are compared in constant time, never logged."""

import hmac
import ipaddress
import logging
import time
import uuid
from collections.abc import Sequence

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from engine.answering.errors import IS_INTERNAL, ApiError
from engine.answering.usage_log import MAX_ID_BYTES
from wire.headers import INTERNAL_TOKEN_HEADER

logger = logging.getLogger(__name__)

OPEN_ROUTES = ("/health", "/livez", "/metrics", "/ping", "/readyz")
KEYED_ROUTES = ("/tokenize", "/detokenize")
LOAD_ROUTE = "/v1/load_lora_adapter"
REQUEST_ID = web.RequestKey("request_id", str)
# nginx's status for a client that left before its answer.
CLIENT_LEFT = 499
# Maximum length of an unknown path in the log.
MAX_PATH = 200


class Access:
    """Access rules. internal_token: secret of the gateways. api_keys: secrets of clients; any of them opens the API.
    Without secrets, all routes are open.
    """

    def __init__(self, internal_token: str | None, api_keys: Sequence[str]) -> None:
        self._internal_token = internal_token
        self._api_keys = tuple(api_keys)

    @property
    def is_open(self) -> bool:
        return self._internal_token is None and not self._api_keys

    @web.middleware
    async def authenticate(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the request's secret. Raises ApiError 401 or 403."""
        request[IS_INTERNAL] = internal = self.is_internal(request)
        if request.path in OPEN_ROUTES or internal:
            return await handler(request)
        if self.is_open and request.path == LOAD_ROUTE and not is_loopback(request.remote):
            raise ApiError(
                403,
                "Adapters can be loaded by path only from this machine, unless the engine has a token or --api-key.",
                kind="permission_error",
                code="insufficient_permissions",
            )
        is_api = request.path.startswith("/v1/") or request.path in KEYED_ROUTES
        if self._api_keys and is_api:
            if not self._shows_key(request):
                raise ApiError(
                    401,
                    "Authorization: expected Bearer and one of the engine's API keys.",
                    kind="authentication_error",
                    code="invalid_api_key",
                )
        elif self._internal_token is not None:
            raise ApiError(
                401,
                f"{INTERNAL_TOKEN_HEADER}: is missing or wrong.",
                kind="authentication_error",
                code="invalid_internal_token",
            )
        return await handler(request)

    def is_internal(self, request: web.Request) -> bool:
        """Return whether the request has the internal token, so that it comes from a gateway."""
        if self._internal_token is None:
            return False
        return _equal(request.headers.get(INTERNAL_TOKEN_HEADER, ""), self._internal_token)

    def _shows_key(self, request: web.Request) -> bool:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # Compares with every key, so that the time does not reveal a partial match.
        return scheme.lower() == "bearer" and sum([_equal(given.strip(), key) for key in self._api_keys]) > 0


def _equal(credential: str, secret: str) -> bool:
    # aiohttp decodes bytes that are not UTF-8 as surrogates.
    return hmac.compare_digest(credential.encode("utf-8", "surrogateescape"), secret.encode())


def is_loopback(host: str | None) -> bool:
    """Return whether an address or host name is this machine's loopback; False for an unknown host."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host or "")
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def request_lines(*, access_log: bool) -> Middleware:
    """Return a middleware that gives each request an id, the client's own if it is valid, and, with access_log, logs a
    line at its end.
    """

    @web.middleware
    async def logged(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("x-request-id", "")
        fits = given.isascii() and given.isprintable() and 0 < len(given) <= MAX_ID_BYTES
        request[REQUEST_ID] = given if fits else uuid.uuid4().hex
        started, status = time.perf_counter(), CLIENT_LEFT
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            if access_log:
                milliseconds = (time.perf_counter() - started) * 1000
                line = (request[REQUEST_ID], request.method, _route(request), status, milliseconds)
                logger.info("%s %s %s %d %.1f ms", *line)

    return logged


async def say_request_id(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Add the request's id to its response. A handler for `on_response_prepare`, which also covers streams."""
    if isinstance(request, web.Request) and REQUEST_ID in request:
        response.headers["X-Request-Id"] = request[REQUEST_ID]


def _route(request: web.Request) -> str:
    """Return the route as it was declared; for an unknown one the path as sent, escaped and shortened."""
    resource = request.match_info.route.resource
    if resource is not None:
        return resource.canonical
    return request.rel_url.raw_path[:MAX_PATH].encode("unicode_escape").decode("ascii")
