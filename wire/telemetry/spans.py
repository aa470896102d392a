"""OpenTelemetry traces, where the operator names a collector in the environment; else nothing is imported or done.

A span is handed from caller to callee; there is no current one. No prompt, no answer and no key goes into a span, and
of an error only its kind. Torch-free: the gateway traces with it as well.
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
    """The environment asks for what cannot be done. field: the variable."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.message = message


class Span:
    """A part of a request's time; this one is of a request that is not traced, and takes everything for nothing."""

    __slots__ = ()
    is_recording = False
    # In hexadecimal, as W3C's and every tool's.
    trace_id: str | None = None

    def child(
        self, name: str, kind: Kind = "internal", attributes: Mapping[str, Value] | None = None
    ) -> "AbstractContextManager[Span]":
        """A part of this part, ended with the block; marked as failed if the block raises."""
        return _NO_CHILD

    def set(self, attributes: Mapping[str, Value]) -> None: ...

    def event(self, name: str, at: float | None = None) -> None:
        """at: when, on the clock of time.time(); None: now."""

    def fail(self, kind: str) -> None:
        """kind: of error; never its message, which may quote the request."""

    def headers(self) -> dict[str, str]:
        """W3C's, for the server that does this part."""
        return {}


NO_SPAN = Span()
_NO_CHILD: AbstractContextManager[Span] = nullcontext(NO_SPAN)

SPAN = web.RequestKey("span", Span)
# OpenTelemetry's words for what the generating routes do.
OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}


class Tracing(Protocol):
    """A process' traces: made on the way, sent from a thread of their own."""

    def serve(self, name: str, headers: Mapping[str, str]) -> AbstractContextManager[Span]:
        """A server's span, part of the trace that the headers name, if they do."""

    def close(self) -> None:
        """Sends what is left, for some seconds at most. Blocks."""


def start_tracing(service: str, environ: Mapping[str, str] = os.environ) -> Tracing | None:
    """None where the environment names no collector. service: the name unless OTEL_SERVICE_NAME says another.

    The SDK reads the other standard variables itself: OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS, OTEL_BSP_... .
    Raises TracingError.
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
    """A middleware for outside of those that answer errors: a span for each request of a route that is wanted."""

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
