"""Counts that no request can have, from a foreign server: no tenant gains or loses by them, and no place is lost."""

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from gateway.api.golden.requests import FreeAttemptLog
from gateway.billing import estimates
from gateway.billing.count_limits import TEMPLATE_TOKENS, CountLimits
from gateway.fleet.discovery.addresses import parse_address
from gateway.fleet.engines.engine import EngineRecord
from gateway.fleet.queueing.service_meter import Reported
from testing.gateway import vllm_double
from testing.gateway.foreign_double import PROMPT_TOKENS
from testing.gateway.running import BASE_MODEL, until
from testing.gateway.vllm_double import VllmDouble
from tests.gateway.billing.test_unread_answers import HI_TOKENS
from tests.gateway.fleet.kinds.test_vllm import billed, served
from wire.headers import RECEIPT_HEADER
from wire.responses import REPORT_TYPE

MAX_TOKENS = 5
# A token costs 0.001, and a cached one nothing.
PRICE = {"input": 10**9, "cached": 0, "output": 10**9}
# The counts that a server reports, and the prompt, cached and completion tokens that count.
CASES: list[tuple[dict[str, Any], tuple[int, int, int]]] = [
    ({"completion_tokens": -100}, (PROMPT_TOKENS, 0, MAX_TOKENS)),
    ({"completion_tokens": "5"}, (PROMPT_TOKENS, 0, MAX_TOKENS)),
    ({"prompt_tokens": -100}, (HI_TOKENS, 0, MAX_TOKENS)),
    ({"prompt_tokens": HI_TOKENS + TEMPLATE_TOKENS}, (HI_TOKENS + TEMPLATE_TOKENS, 0, MAX_TOKENS)),
    ({"prompt_tokens": HI_TOKENS + TEMPLATE_TOKENS + 1}, (HI_TOKENS, 0, MAX_TOKENS)),
    ({"prompt_tokens": 2**70, "completion_tokens": 2**70}, (HI_TOKENS, 0, MAX_TOKENS)),
    ({"completion_tokens": 10**9}, (PROMPT_TOKENS, 0, MAX_TOKENS)),
    ({"prompt_tokens": 0, "completion_tokens": 0}, (HI_TOKENS, 0, MAX_TOKENS)),
    (
        {"prompt_tokens": HI_TOKENS + 2 * TEMPLATE_TOKENS, "prompt_tokens_details": {"cached_tokens": TEMPLATE_TOKENS}},
        (HI_TOKENS, 0, MAX_TOKENS),
    ),
    ({"prompt_tokens_details": {"cached_tokens": 10**9}}, (PROMPT_TOKENS, PROMPT_TOKENS, MAX_TOKENS)),
    ({"prompt_tokens_details": {"cached_tokens": -3}}, (PROMPT_TOKENS, 0, MAX_TOKENS)),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_impossible_counts_are_none(
    stream: bool, tmp_path: Path, model_dir: Path, redis_url: str, migrated: Path, monkeypatch: pytest.MonkeyPatch
):
    """A negative count was never settled: its request had no usage row and held its place for ever. An answer with a
    count that is ignored was free.
    """
    reported: dict[str, Any] = {}
    usage = vllm_double.usage
    monkeypatch.setattr(vllm_double, "usage", lambda tokens: usage(tokens) | reported)
    # A whole answer without a count counts as long as `max_tokens`; in a stream, pieces count.
    monkeypatch.setattr(estimates, "FIRST_SPEED", 1e6)
    async with served(tmp_path, model_dir, redis_url, migrated) as (gateway, _):
        assert (await gateway.admin.call("PUT", f"/admin/api/prices/{BASE_MODEL}", json=PRICE)).status == 200
        for number, (counts, (prompt, cached, completion)) in enumerate(CASES):
            reported.clear()
            reported.update(counts)
            acme = await gateway.tenant(f"acme-{number}", max_concurrent=1)
            options = {"stream_options": {"include_usage": True}} if stream else {}
            got = await acme.complete(max_tokens=MAX_TOKENS, stream=stream, **options)
            shown = (got.events[-2] if stream else got.json)["usage"]
            assert (shown["prompt_tokens"], shown["completion_tokens"]) == (prompt, completion)
            assert shown["prompt_tokens_details"]["cached_tokens"] == cached
            await until(partial(billed, acme, (1, prompt, completion)))
            [row] = await acme.usage()
            assert (row["cached_tokens"], row["cost_micros"]) == (cached, 1000 * (prompt - cached + completion))
            # Its place is free again.
            assert (await acme.complete(max_tokens=1)).status == 200


async def test_the_reason_of_an_answers_end_is_kept_in_part(
    tmp_path: Path, model_dir: Path, redis_url: str, migrated: Path
):
    """PostgreSQL refuses a NUL and a longer text, so the request had no usage row."""
    async with served(tmp_path, model_dir, redis_url, migrated) as (gateway, vllm):
        acme = await gateway.tenant("acme")
        vllm.finish_reason = "\0" + "x" * 10_000
        assert (await acme.complete(max_tokens=1)).status == 200
        await until(lambda: billed(acme, (1, PROMPT_TOKENS, 1)))
        [shown] = (await acme.get("/v1/requests")).json["data"]
        assert shown["finish_reason"] == "\ufffd" + "x" * 31


async def test_a_whole_answer_without_a_count_is_not_free(
    tmp_path: Path, model_dir: Path, redis_url: str, migrated: Path, monkeypatch: pytest.MonkeyPatch
):
    """However quickly the server answers."""
    usage = vllm_double.usage
    monkeypatch.setattr(vllm_double, "usage", lambda tokens: usage(tokens) | {"completion_tokens": -1})
    monkeypatch.setattr(estimates, "FIRST_SPEED", 1e-9)
    async with served(tmp_path, model_dir, redis_url, migrated) as (gateway, _):
        acme = await gateway.tenant("acme")
        assert (await acme.complete(max_tokens=MAX_TOKENS, n=2)).json["usage"]["completion_tokens"] == 2
        await until(lambda: billed(acme, (1, PROMPT_TOKENS, 2)))


@pytest.mark.parametrize(
    ("is_chat", "choices", "most"),
    [
        (False, [{"text": "Hi"}, {"text": "é"}], 3 + 3),
        (True, [{"message": {"content": "Hi", "reasoning": "ah", "tool_calls": None}}], 5),
        # Log-probabilities are no text.
        (False, [{"text": "Hi", "logprobs": {"tokens": ["Hi"] * 50}}], 3),
        (False, [{"text": "x" * 2**20}], 100),
    ],
)
async def test_a_whole_answer_without_a_count_has_at_most_a_token_for_each_byte_of_its_text(
    is_chat: bool,
    choices: list[dict[str, Any]],
    most: int,
    tmp_path: Path,
    model_dir: Path,
    redis_url: str,
    migrated: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """A slow server's answer of a word was billed like one of `max_tokens`."""

    async def answer(_: VllmDouble, request: web.Request, body: dict[str, Any], is_chat: bool) -> web.StreamResponse:
        ended = [{"index": number, "finish_reason": "stop", **choice} for number, choice in enumerate(choices)]
        counts = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": 0}
        return web.json_response({**vllm_double.envelope(body), "choices": ended, "usage": counts})

    monkeypatch.setattr(VllmDouble, "_answer", answer)
    monkeypatch.setattr(estimates, "FIRST_SPEED", 1e6)
    async with served(tmp_path, model_dir, redis_url, migrated) as (gateway, _):
        acme = await gateway.tenant("acme")
        ask = acme.chat if is_chat else acme.complete
        got = await ask(max_tokens=100, n=len(choices))
        assert got.json["usage"]["completion_tokens"] == most
        await until(lambda: billed(acme, (1, PROMPT_TOKENS, most)))


async def test_only_our_engines_report_their_progress(
    tmp_path: Path, model_dir: Path, redis_url: str, migrated: Path, monkeypatch: pytest.MonkeyPatch
):
    """A foreign server's report set any count, also a negative one."""

    async def reported(_: VllmDouble, request: web.Request, body: dict[str, Any], is_chat: bool) -> web.StreamResponse:
        answer = {"status": 200, "length": 2, "headers": {}}
        lines = [{"completion_tokens": -(10**9)}, {"completion_tokens": 2**60, "answer": answer}]
        report = b"".join(msgspec.json.encode(line) + b"\n" for line in lines) + b"{}"
        return web.Response(body=report, content_type=REPORT_TYPE)

    progress = {"loraplex": {"completion_tokens": 4, "prompt_tokens": 3, "ended_by_allowance": True}}
    envelope = vllm_double.envelope
    monkeypatch.setattr(vllm_double, "envelope", lambda body: envelope(body) | progress)
    async with served(tmp_path, model_dir, redis_url, migrated) as (gateway, _):
        acme = await gateway.tenant("acme", tokens_per_minute=1000)
        for stream in (False, True):
            got = await acme.complete(max_tokens=MAX_TOKENS, stream=stream)
            assert (got.status, b'"error"' in got.body) == (200, False)
        await until(lambda: billed(acme, (2, 2 * PROMPT_TOKENS, 2 * MAX_TOKENS)))
        monkeypatch.setattr(VllmDouble, "_answer", reported)
        assert (await acme.complete(max_tokens=MAX_TOKENS)).status == 502
        await until(lambda: billed(acme, (3, 2 * PROMPT_TOKENS + HI_TOKENS, 2 * MAX_TOKENS)))


@pytest.mark.parametrize("receipt", ["base", f"sha256:{'a' * 64}", "mixed"])
async def test_only_our_engines_send_receipts(
    receipt: str, tmp_path: Path, model_dir: Path, redis_url: str, migrated: Path, monkeypatch: pytest.MonkeyPatch
):
    """A foreign server could claim any adapter, or make its answers free and itself unused with that of another one."""
    answer = VllmDouble._answer

    async def with_receipt(self: VllmDouble, *given: Any) -> web.StreamResponse:
        response = await answer(self, *given)
        response.headers[RECEIPT_HEADER] = receipt
        return response

    monkeypatch.setattr(VllmDouble, "_answer", with_receipt)
    async with served(tmp_path, model_dir, redis_url, migrated) as (gateway, _):
        acme = await gateway.tenant("acme")
        for _ in range(2):
            got = await acme.complete(max_tokens=1)
            assert (got.status, RECEIPT_HEADER in got.headers) == (200, False)
        await until(lambda: billed(acme, (2, 2 * PROMPT_TOKENS, 2)))
        free = FreeAttemptLog("b" * 64, CountLimits(10, 5))
        free.sent(EngineRecord(parse_address("vllm+http://e")), 1)
        free.observe_receipt(receipt)


def test_a_free_requests_counts_have_limits_too():
    """The fair share would have counted any number for the tenant."""
    free = FreeAttemptLog(None, CountLimits(10, 5))
    for prompt, completion, cached, expected in [
        (9, 4, 3, Reported(6, 4)),
        (9, 2**31 - 1, 2**31 - 1, Reported(0, 5)),
        (11, 4, 3, Reported(None, 4)),
        (9, -1, 3, Reported(0, 0)),
    ]:
        free.reported = Reported(0, 0)
        counts = {"prompt_tokens": prompt, "completion_tokens": completion}
        usage = counts | {"prompt_tokens_details": {"cached_tokens": cached}}
        free.observe_answer({"usage": msgspec.Raw(msgspec.json.encode(usage))})
        assert free.reported == expected
