"""Double of an OpenTelemetry collector: it receives spans over OTLP/HTTP and keeps them, decoded."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from testing.serving import serving


@dataclass(frozen=True)
class Seen:
    """A received span.

    kind: 1 internal, 2 server, 3 client. status: 2 is an error. start, end and events: nanoseconds.
    """

    service: str
    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    start: int
    end: int
    status: int
    attributes: dict[str, Any]
    events: dict[str, int]


class Collector:
    def __init__(self) -> None:
        self.url = ""
        self.status = 200
        self.asked = 0
        self.spans: list[Seen] = []
        # Every received payload, unchanged.
        self.raw = b""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Collector"]:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/traces", self._take)
        async with serving(app) as self.url:
            yield self

    async def _take(self, request: web.Request) -> web.Response:
        self.asked += 1
        body = await request.read()
        if self.status == 200:
            self.raw += body
            self.spans += decode(body)
        return web.Response(status=self.status, content_type="application/x-protobuf")

    def named(self, name: str) -> list[Seen]:
        return [span for span in self.spans if span.name == name]


def decode(body: bytes) -> list[Seen]:
    return [
        Seen(
            service=str(_attributes(of.resource.attributes)["service.name"]),
            name=span.name,
            kind=span.kind,
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            start=span.start_time_unix_nano,
            end=span.end_time_unix_nano,
            status=span.status.code,
            attributes=_attributes(span.attributes),
            events={event.name: event.time_unix_nano for event in span.events},
        )
        for of in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in of.scope_spans
        for span in scope.spans
    ]


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
