"""Counts that no request can have, from a foreign server: no tenant gains or loses by them, and no place is lost."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from testing.gateway import vllm_double
from testing.gateway.foreign_double import PROMPT_TOKENS
from testing.gateway.running import BASE_MODEL, until
from tests.gateway.billing.test_unread_answers import HI_TOKENS
from tests.gateway.fleet.kinds.test_vllm import billed, served

MAX_TOKENS = 5
# A token costs 0.001, and a cached one nothing.
PRICE = {"input": 10**9, "cached": 0, "output": 10**9}
# The counts that a server reports, and the prompt, cached and completion tokens that count.
CASES: list[tuple[dict[str, Any], tuple[int, int, int]]] = [
    ({"completion_tokens": -100}, (PROMPT_TOKENS, 0, 0)),
    ({"prompt_tokens": -100}, (HI_TOKENS, 0, MAX_TOKENS)),
    ({"prompt_tokens": 2**70, "completion_tokens": 2**70}, (HI_TOKENS, 0, 0)),
    ({"completion_tokens": 10**9}, (PROMPT_TOKENS, 0, MAX_TOKENS)),
    ({"prompt_tokens_details": {"cached_tokens": 10**9}}, (PROMPT_TOKENS, PROMPT_TOKENS, MAX_TOKENS)),
    ({"prompt_tokens_details": {"cached_tokens": -3}}, (PROMPT_TOKENS, 0, MAX_TOKENS)),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_impossible_counts_are_none(
    stream: bool, tmp_path: Path, model_dir: Path, redis_url: str, migrated: Path, monkeypatch: pytest.MonkeyPatch
):
    """A negative count was never settled: its request had no usage row and held its place for ever."""
    reported: dict[str, Any] = {}
    usage = vllm_double.usage
    monkeypatch.setattr(vllm_double, "usage", lambda tokens: usage(tokens) | reported)
    async with served(tmp_path, model_dir, redis_url, migrated) as (gateway, _):
        assert (await gateway.admin.call("PUT", f"/admin/api/prices/{BASE_MODEL}", json=PRICE)).status == 200
        for number, (counts, (prompt, cached, completion)) in enumerate(CASES):
            reported.clear()
            reported.update(counts)
            acme = await gateway.tenant(f"acme-{number}", max_concurrent=1)
            assert (await acme.complete(max_tokens=MAX_TOKENS, stream=stream)).status == 200
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
