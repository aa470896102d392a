"""Traces by OpenTelemetry's SDK, sent over OTLP.

The only module that imports the SDK; `wire.telemetry.start` loads it on demand.
"""

import asyncio
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span as SdkSpan
from opentelemetry.trace import SpanKind, StatusCode, Tracer, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from wire.telemetry.spans import Kind, Span, Value

log = logging.getLogger(__name__)

# Time limit for sending the last spans at shutdown.
FLUSH_SECONDS = 3.0
W3C = TraceContextTextMapPropagator()
# Attribute for the trace id of a client whose trace the span does not join.
CLIENT_TRACE = "loraplex.client_trace_id"
KINDS = {"internal": SpanKind.INTERNAL, "client": SpanKind.CLIENT}


class OtlpTracing:
    """Tracing through the SDK.

    Spans wait in a bounded queue (OTEL_BSP_MAX_QUEUE_SIZE); spans that do not fit are dropped.
    """

    def __init__(self, service: str) -> None:
        # The library logs every failed batch and every unreadable header; _Exporter logs the outages instead.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._exporter = _Exporter(OTLPSpanExporter())
        self._provider = TracerProvider(resource=_resource(service), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("loraplex")

    @contextmanager
    def serve(self, name: str, headers: Mapping[str, str], *, joins: bool) -> Iterator[Span]:
        parent = W3C.extract(headers)
        with _running(self._tracer, name, SpanKind.SERVER, parent if joins else Context(), None) as span:
            client = get_current_span(parent).get_span_context()
            if not joins and client.is_valid:
                span.set({CLIENT_TRACE: f"{client.trace_id:032x}"})
            yield span

    def close(self) -> None:
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(FLUSH_SECONDS)
        # Ends the pause before a retry, and thereby the thread.
        self._exporter.shutdown()


class _OtlpSpan(Span):
    __slots__ = ("_span", "_tracer")

    def __init__(self, tracer: Tracer, span: SdkSpan) -> None:
        self._tracer, self._span = tracer, span

    @property
    def is_recording(self) -> bool:  # type: ignore[override]
        return self._span.is_recording()

    @property
    def trace_id(self) -> str:  # type: ignore[override]
        return f"{self._span.get_span_context().trace_id:032x}"

    @contextmanager
    def child(
        self, name: str, kind: Kind = "internal", attributes: Mapping[str, Value] | None = None
    ) -> Iterator[Span]:
        with _running(self._tracer, name, KINDS[kind], set_span_in_context(self._span, Context()), attributes) as span:
            yield span

    def set(self, attributes: Mapping[str, Value]) -> None:
        self._span.set_attributes(attributes)

    def event(self, name: str, at: float | None = None) -> None:
        self._span.add_event(name, timestamp=None if at is None else int(at * 1e9))

    def fail(self, kind: str) -> None:
        self._span.set_attribute("error.type", kind)
        self._span.set_status(StatusCode.ERROR)

    def headers(self) -> dict[str, str]:
        carrier: dict[str, str] = {}
        W3C.inject(carrier, set_span_in_context(self._span, Context()))
        return carrier


@contextmanager
def _running(
    tracer: Tracer, name: str, kind: SpanKind, context: Context, attributes: Mapping[str, Value] | None
) -> Iterator[_OtlpSpan]:
    span = _OtlpSpan(tracer, tracer.start_span(name, context, kind, attributes))
    try:
        yield span
    except asyncio.CancelledError:
        # The client disconnected, which is not a failure.
        span.set({"error.type": "cancelled"})
        raise
    except Exception as error:
        span.fail(type(error).__name__)
        raise
    finally:
        span._span.end()


class _Exporter(SpanExporter):
    """Exporter that logs once when the collector becomes unreachable, and once when it is back."""

    def __init__(self, exporter: OTLPSpanExporter) -> None:
        self._exporter = exporter
        self._is_away = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        is_away = result is not SpanExportResult.SUCCESS
        if is_away and not self._is_away:
            log.warning(
                "traces: the collector at OTEL_EXPORTER_OTLP_ENDPOINT refuses spans or is unreachable; spans are lost"
            )
        elif self._is_away and not is_away:
            log.warning("traces: the collector accepts spans again")
        self._is_away = is_away
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def _resource(service: str) -> Resource:
    """Return the traced service's attributes; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take precedence."""
    named = Resource({"service.version": version("loraplex")}).merge(Resource.create())
    is_default = str(named.attributes["service.name"]).startswith("unknown_service")
    return named.merge(Resource({"service.name": service})) if is_default else named
