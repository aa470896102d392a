"""Spans of OpenTelemetry traces, and the middleware that opens one for each request.

A span is passed from caller to callee; there is no current span. Spans contain no prompt, answer or key, and of an
error only its kind. Torch-free, because the gateway traces too.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

Value = str | bool | int | float | Sequence[str]
Kind = Literal["internal", "client"]


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

    def serve(self, name: str, headers: Mapping[str, str], *, joins: bool) -> AbstractContextManager[Span]:
        """Open a server span.

        joins: whether the span joins the trace of the headers and follows its sampling flag. If not, it begins a new
        trace, which this process samples, and records the client's trace id as an attribute.
        """

    def close(self) -> None:
        """Send the remaining spans, for a few seconds at most. Blocks."""


def trace_requests(
    tracing: Tracing, wanted: Callable[[str], bool], trusts: Callable[[web.Request], bool]
) -> Middleware:
    """Return a middleware that opens a span for each request of a wanted route.

    It must be outside of the middlewares that answer errors. trusts: returns whether the request's `traceparent` may
    decide if its spans are recorded.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "unmatched"
        if not wanted(route):
            return await handler(request)
        with tracing.serve(f"{request.method} {route}", request.headers, joins=trusts(request)) as span:
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
