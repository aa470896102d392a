"""Outermost middleware: gives each request its id, its line in the access log and its metrics."""

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence

from aiohttp import web
from aiohttp.typedefs import Middleware

from gateway.access.caller import CALLER, Caller, find_address
from gateway.errors import ENDING, ERROR_CODE, REQUEST_ID, Handler
from gateway.metrics import Metrics
from gateway.settings import Network
from gateway.spans import describe_caller
from wire.telemetry.spans import NO_SPAN, SPAN

log = logging.getLogger(__name__)

# nginx's status for a client that closed the connection before its answer.
CLIENT_CLOSED = 499
# Logged at debug level: probes come about once a second and would bury the clients' requests.
PROBES = ("/healthz", "/readyz")

# Maximum length of an error code in the log. The gateway's own codes are shorter.
MAX_CODE = 64


def observe(metrics: Metrics, trusted_proxies: Sequence[Network]) -> Middleware:
    """Return the middleware. It ignores a client's own x-request-id, which could repeat: ids are keys of the ledger."""
    trusted = tuple(trusted_proxies)

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        request_id = request[REQUEST_ID] = f"req_{uuid.uuid4().hex}"
        forwarded = request.headers.getall("X-Forwarded-For", ()) if trusted else ()
        caller = Caller(find_address(request.remote, forwarded, trusted), request_id)
        CALLER.set(caller)
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "unmatched"
        started = time.monotonic()
        metrics.arrived()
        status = 500
        try:
            response = await handler(request)
            status = response.status
            return response
        except asyncio.CancelledError:
            status = CLIENT_CLOSED
            raise
        finally:
            seconds = time.monotonic() - started
            metrics.answered(request.method, route, status, seconds)
            level = logging.DEBUG if route in PROBES else logging.INFO
            span = request.get(SPAN, NO_SPAN)
            if span.is_recording:
                describe_caller(span, caller)
            log.log(
                level,
                "%s %s %s %d %.1f ms client=%s tenant=%s key=%s%s%s",
                *(request_id, request.method, route, status, seconds * 1000),
                *(caller.address, caller.tenant_name or "-", caller.key_id or "-"),
                _failure(request),
                f" trace={span.trace_id}" if span.trace_id else "",
            )

    return middleware


def _failure(request: web.Request) -> str:
    """Return the fields `error=` and `ended=` for a request that was refused or whose answer was not completed."""
    code, ending = request.get(ERROR_CODE), request.get(ENDING)
    # An engine's error code is arbitrary text.
    shown = "" if code is None else f" error={code if code.isidentifier() and len(code) <= MAX_CODE else 'other'}"
    return shown if ending is None else f"{shown} ended={ending}"


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Set x-request-id on every response, streams and errors too. For `app.on_response_prepare`."""
    response.headers["x-request-id"] = request[REQUEST_ID]


async def hide_server(_: web.Request, response: web.StreamResponse) -> None:
    """Remove the Server header, because the versions of aiohttp and Python help only an attacker."""
    response.headers.popall("Server", None)
