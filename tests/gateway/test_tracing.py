"""The gateway's traces: failures, unsampled requests, and no harm from a collector that is away."""

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.settings import SettingsError
from testing.collector import Collector
from testing.gateway.running import Gateway, running, settings, until
from testing.gateway.upstream import Upstream

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
# W3C trace flags.
SAMPLED = 1
CHAT = {"model": "base", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
async def collector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    async with Collector().serving() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{collector.url}/v1/traces")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        yield collector


@pytest.fixture
async def traced(
    collector: Collector, tmp_path: Path, model_dir: Path, upstream: Upstream, redis_url: str
) -> AsyncIterator[Gateway]:
    async with running(settings(tmp_path, model_dir, [upstream.url], redis_url)) as gateway:
        yield gateway


async def test_what_failed_says_so_and_where(traced: Gateway, collector: Collector, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "gateway.api.access_log")
    acme = await traced.tenant("acme", requests_per_minute=2)
    asked = [await acme.chat(x_engine={"status": 500})]
    torn_off = await acme.chat(stream=True, x_engine={"tokens": 3, "fail_after": 1})
    assert "error" in torn_off.events[-1]
    # On a slow machine a few more are admitted.
    while asked[-1].status != 429:
        asked.append(await acme.chat())
    assert asked[0].status == 502

    async def ended() -> bool:
        return len(collector.named("POST /v1/chat/completions")) == len(asked) + 1

    await until(ended)
    spans = sorted(collector.named("POST /v1/chat/completions"), key=lambda span: span.start)
    broken, torn, refused = spans[0], spans[1], spans[-1]
    assert (broken.status, broken.attributes["http.response.status_code"]) == (2, 502)
    # Its status was sent before it failed.
    assert (torn.status, torn.attributes["http.response.status_code"]) == (2, 200)
    assert torn.attributes["loraplex.status"] == "error"
    # A refusal is no failure of the server span, only of the admission span.
    assert (refused.status, refused.attributes["http.response.status_code"]) == (0, 429)
    [admission] = [span for span in collector.named("admission") if span.parent_id == refused.span_id]
    assert (admission.status, admission.attributes["error.type"]) == (2, "RateLimited")
    assert len({span.trace_id for span in spans}) == len(spans)
    [line] = [r.getMessage() for r in caplog.records if " 429 " in r.getMessage()]
    assert line.endswith(f" trace={refused.trace_id}")


async def test_an_unsampled_trace_is_not_sent_and_the_engine_is_informed(
    collector: Collector, tmp_path: Path, model_dir: Path, upstream: Upstream, redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    trusting = settings(tmp_path, model_dir, [upstream.url], redis_url, trust_traceparent="yes")
    async with running(trusting) as gateway:
        acme = await gateway.tenant("acme")
        assert (await acme.chat()).status == 200
        sampled = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=word"}
        assert (await acme.post("/v1/chat/completions", CHAT, headers=sampled)).status == 200
    first, second = (headers for headers, _ in upstream.requests)
    assert int(first["traceparent"][-2:], 16) & SAMPLED == 0
    # The gateway is closed, so all spans have been sent.
    assert {span.trace_id for span in collector.spans} == {TRACE}
    [asked] = collector.named("chat base")
    assert second["traceparent"].startswith(f"00-{TRACE}-{asked.span_id}-")
    assert int(second["traceparent"][-2:], 16) & SAMPLED
    assert second["tracestate"] == "vendor=word"


@pytest.mark.parametrize(("sampler", "recorded"), [("parentbased_always_off", False), ("parentbased_always_on", True)])
async def test_a_client_decides_neither_what_is_recorded_nor_in_which_trace(
    collector: Collector, tmp_path: Path, model_dir: Path, upstream: Upstream, redis_url: str,
    monkeypatch: pytest.MonkeyPatch, sampler: str, recorded: bool,
):  # fmt: skip
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    async with running(settings(tmp_path, model_dir, [upstream.url], redis_url)) as gateway:
        acme = await gateway.tenant("acme")
        for flag in ("00", "01"):
            given = {"traceparent": f"00-{TRACE}-{PARENT}-{flag}", "tracestate": "vendor=word"}
            assert (await acme.post("/v1/chat/completions", CHAT, headers=given)).status == 200
    assert len(upstream.requests) == 2
    for sent, _ in upstream.requests:
        assert bool(int(sent["traceparent"][-2:], 16) & SAMPLED) is recorded
        assert TRACE not in sent["traceparent"]
        assert "tracestate" not in sent
    served = collector.named("POST /v1/chat/completions")
    assert len(served) == (2 if recorded else 0)
    for span in served:
        assert span.trace_id != TRACE
        assert set(span.parent_id) <= {"0"}
        assert span.attributes["loraplex.client_trace_id"] == TRACE


async def test_trace_ids_of_clients_do_not_decide_a_ratio(
    collector: Collector, tmp_path: Path, model_dir: Path, upstream: Upstream, redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    """The ratio sampler records the lowest trace ids, and a client could choose such an id."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.000001")
    async with running(settings(tmp_path, model_dir, [upstream.url], redis_url)) as gateway:
        acme = await gateway.tenant("acme")
        lowest = {"traceparent": f"00-{1:032x}-{PARENT}-01"}
        assert (await acme.post("/v1/chat/completions", CHAT, headers=lowest)).status == 200
    assert not collector.named("POST /v1/chat/completions")


async def test_a_collector_that_refuses_harms_nobody_and_is_told_of_once(
    traced: Gateway, collector: Collector, caplog: pytest.LogCaptureFixture
):
    collector.status = 400
    acme = await traced.tenant("acme")

    def said() -> list[str]:
        return [r.getMessage() for r in caplog.records if "collector" in r.getMessage() or "opentele" in r.name]

    for number in range(1, 4):
        assert (await acme.chat()).status == 200

        async def asked(number: int = number) -> bool:
            return collector.asked >= number

        await until(asked)
    collector.status = 200

    async def arrived() -> bool:
        assert (await acme.chat()).status == 200
        return bool(collector.spans)

    await until(arrived)

    async def both() -> bool:
        return len(said()) >= 2

    await until(both)
    away, back = said()
    assert "spans are lost" in away
    assert "accepts spans again" in back


async def test_a_collector_that_is_gone_keeps_nobody_from_leaving(
    tmp_path: Path, model_dir: Path, upstream: Upstream, redis_url: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("wire.telemetry.otlp.FLUSH_SECONDS", 0.3)
    async with Collector().serving() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    async with running(settings(tmp_path, model_dir, [upstream.url], redis_url)) as gateway:
        assert (await (await gateway.tenant("acme")).chat()).status == 200


@pytest.mark.parametrize("trusts", ["no", "yes"])
async def test_without_traces_a_trusted_clients_own_are_passed_on(
    tmp_path: Path, model_dir: Path, upstream: Upstream, redis_url: str, trusts: str
):
    own = f"00-{TRACE}-{PARENT}-01"
    of = settings(tmp_path, model_dir, [upstream.url], redis_url, trust_traceparent=trusts)
    async with running(of) as gateway:
        acme = await gateway.tenant("acme")
        for given in (own, "nonsense"):
            assert (await acme.post("/v1/chat/completions", CHAT, headers={"traceparent": given})).status == 200
    passed = [headers.get("traceparent") for headers, _ in upstream.requests]
    assert passed == [own if trusts == "yes" else None, None]


async def test_what_cannot_be_spoken_is_a_wrong_setting(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4317")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(SettingsError, match=r"^OTEL_EXPORTER_OTLP_PROTOCOL"):
        async with running(settings(tmp_path, model_dir, ["http://e"], "redis://r")):
            pass
