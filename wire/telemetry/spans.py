"""OpenTelemetry traces. Active only if the environment names a collector; otherwise the SDK is not imported.

A span is passed from caller to callee; there is no current span. Spans contain no prompt, answer or key, and of an
error only its kind. Torch-free, because the gateway traces too.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

Value = str | bool | int | float | Sequence[str]
Kind = Literal["internal", "client"]

COLLECTOR = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOL = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class TracingError(ValueError):
    """Tracing settings in the environment that cannot be honoured. field: the variable."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class Span:
    """A timed part of a request. This base class is the span of a request that is not traced; it ignores all calls."""

    __slots__ = ()
    is_recording = False
    # Hexadecimal, as in W3C Trace Context.
    trace_id: str | None = None

    def child(
        self, name: str, kind: Kind = "internal", attributes: Mapping[str, Value] | None = None
    ) -> "AbstractContextManager[Span]":
        """Return a context manager for a child span, which is marked as failed if the block raises."""
        return _NO_CHILD

    def set(self, attributes: Mapping[str, Value]) -> None: ...

    def event(self, name: str, at: float | None = None) -> None:
        """Record an event. at: time on the clock of time.time(); None for now."""

    def fail(self, kind: str) -> None:
        """Mark the span as failed. kind: kind of error, never its message, which may quote the request."""

    def headers(self) -> dict[str, str]:
        """Return the W3C headers to send to the server that performs this part."""
        return {}


NO_SPAN = Span()
_NO_CHILD: AbstractContextManager[Span] = nullcontext(NO_SPAN)

SPAN = web.RequestKey("span", Span)
# OpenTelemetry's operation names for the generating routes.
OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}


class Tracing(Protocol):
    """A process's traces: recorded as requests run, sent by a separate thread."""

    def serve(self, name: str, headers: Mapping[str, str]) -> AbstractContextManager[Span]:
        """Open a server span. It joins the trace named in the headers, if there is one."""

    def close(self) -> None:
        """Send the remaining spans, for a few seconds at most. Blocks."""


def start_tracing(service: str, environ: Mapping[str, str] = os.environ) -> Tracing | None:
    """Start tracing, or return None if the environment names no collector.

    service: name if OTEL_SERVICE_NAME is not set. The SDK reads the other standard variables itself:
    OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS, OTEL_BSP_... . Raises TracingError.
    """
    named = next((name for name in COLLECTOR if environ.get(name)), None)
    is_off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get("OTEL_TRACES_EXPORTER") == "none"
    if named is None or is_off:
        return None
    for name in PROTOCOL:
        if environ.get(name, "http/protobuf") != "http/protobuf":
            raise TracingError(name, f"expected http/protobuf, got {environ[name]!r}")
    try:
        from wire.telemetry.otlp import OtlpTracing
    except ModuleNotFoundError as error:
        raise TracingError(named, f"{error.name} is not installed; pip install 'loraplex[otel]'") from error
    return OtlpTracing(service)


def trace_requests(tracing: Tracing, wanted: Callable[[str], bool]) -> Middleware:
    """Return a middleware that opens a span for each request of a wanted route.

    It must be outside of the middlewares that answer errors.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "unmatched"
        if not wanted(route):
            return await handler(request)
        with tracing.serve(f"{request.method} {route}", request.headers) as span:
            request[SPAN] = span
            response = await handler(request)
            span.set(
                {
                    "http.request.method": request.method,
                    "http.route": route,
                    "http.response.status_code": response.status,
                }
            )
            if response.status >= 500:
                span.fail(str(response.status))
            return response

    return middleware
