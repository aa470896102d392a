"""Outermost middleware: gives each request its id, its line in the access log and its metrics."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from aiohttp import web
from aiohttp.hdrs import METH_ALL as METHODS
from aiohttp.typedefs import Middleware

from gateway.api.inference.admission import REQUESTED_MODEL
from gateway.api.inference.log_fields import LOG_FIELDS
from gateway.caller import CALLER, OPERATOR_KEY, Caller, find_address, is_https
from gateway.error_codes import code_of, known_code
from gateway.errors import (
    ENDING,
    ERROR_CODE,
    FAILURE,
    HAS_USAGE,
    REQUEST_ID,
    GatewayError,
    Handler,
    RateLimited,
)
from gateway.log_format import FIELDS
from gateway.metrics import Metrics
from gateway.records.requests.refused import RefusalLog, RefusedRequest
from gateway.settings import Network
from gateway.spans import describe_caller
from gateway.usage_row import printable, shown_user
from wire.telemetry.spans import NO_SPAN, SPAN

log = logging.getLogger(__name__)

# nginx's status for a client that closed the connection before its answer.
CLIENT_CLOSED = 499
# Logged at debug level: probes come about once a second and would bury the clients' requests.
PROBES = ("/healthz", "/readyz")

# Length limits of texts in records of refused requests. A route is a pattern.
MAX_MODEL, MAX_PARAM, MAX_ROUTE = 256, 64, 128


def observe(
    metrics: Metrics, trusted_proxies: Sequence[Network], refusals: RefusalLog, new_id: Callable[[], str]
) -> Middleware:
    """Return the middleware, which records refused requests in `refusals`. new_id: makes a request's id.

    It ignores a client's x-request-id: ids are keys of the ledger, and a client could repeat one.
    """
    trusted = tuple(trusted_proxies)

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        request_id = request[REQUEST_ID] = new_id()
        forwarded = request.headers.getall("X-Forwarded-For", ()) if trusted else ()
        caller = Caller(find_address(request.remote, forwarded, trusted), request_id)
        proto = request.headers.get("X-Forwarded-Proto")
        caller.is_https = is_https(request.secure, request.remote, proto, trusted)
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
            if FAILURE in request and not request.get(HAS_USAGE):
                _note_refusal(refusals, request, caller, route, seconds)
            level = logging.DEBUG if route in PROBES else logging.INFO
            span = request.get(SPAN, NO_SPAN)
            if span.is_recording:
                describe_caller(span, caller)
            if log.isEnabledFor(level):
                fields = {
                    "client": caller.address,
                    "tenant": caller.tenant_name or "-",
                    "key": caller.key_id or "-",
                    **request.get(LOG_FIELDS, {}),
                    **_failure(request),
                    **({"trace": span.trace_id} if span.trace_id else {}),
                }
                _log(level, request_id, request.method, route, status, seconds, fields)

    return middleware


def _log(
    level: int, request_id: str, method: str, route: str, status: int, seconds: float, fields: Mapping[str, Any]
) -> None:
    """Write the line. A JSON log also has its parts as separate fields."""
    milliseconds = round(seconds * 1000, 1)
    parts = {"request_id": request_id, "method": method, "route": route, "status": status, "ms": milliseconds, **fields}
    text = " ".join(f"{name}={value}" for name, value in fields.items())
    line = "%s %s %s %d %.1f ms %s"
    log.log(level, line, request_id, method, route, status, milliseconds, text, extra={FIELDS: parts})


def _failure(request: web.Request) -> dict[str, str]:
    """Return `error` and `ended` for a request that was refused or whose answer was not completed."""
    code, ending = request.get(ERROR_CODE), request.get(ENDING)
    shown = {} if code is None else {"error": known_code(code)}
    return shown if ending is None else {**shown, "ended": ending}


def _note_refusal(refusals: RefusalLog, request: web.Request, caller: Caller, route: str, seconds: float) -> None:
    """Record a refused request, unless it is an operator's."""
    failure, asked = request[FAILURE], request.get(REQUESTED_MODEL)
    if not isinstance(failure, GatewayError) or caller.is_operator:
        return
    refusals.note(
        RefusedRequest(
            request_id=caller.request_id,
            at=datetime.now(UTC) - timedelta(seconds=seconds),
            tenant_id=caller.tenant_id or "",
            tenant=caller.tenant_name or "",
            key_id=caller.key_id or "",
            # An unknown method is arbitrary text.
            method=request.method if request.method in METHODS else "other",
            route=route[:MAX_ROUTE],
            status=failure.status,
            code=code_of(failure),
            latency_ms=round(seconds * 1000),
            model=None if asked is None else _shown_model(asked.model),
            end_user=None if asked is None else shown_user(asked.user),
            param=None if failure.param is None else printable(failure.param, MAX_PARAM),
            exceeded=failure.exceeded if isinstance(failure, RateLimited) else None,
            # The tenant can read the row, so it must not contain an operator's address.
            address=None if (caller.key_id or "").startswith(OPERATOR_KEY) else caller.address,
        )
    )


def _shown_model(model: str) -> str | None:
    """Return the requested model for records; None for a text with spaces, which may be a prompt in the wrong field."""
    # A text of 8 MiB has millions of words, so only the first space is looked for.
    return None if len(model.split(maxsplit=1)) > 1 else printable(model, MAX_MODEL)


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Set x-request-id on every response, streams and errors too. Register it in `app.on_response_prepare`."""
    response.headers["x-request-id"] = request[REQUEST_ID]


async def hide_server(_: web.Request, response: web.StreamResponse) -> None:
    """Remove the Server header, because the versions of aiohttp and Python help only an attacker."""
    response.headers.popall("Server", None)
