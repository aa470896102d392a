"""Pieces of reasoning in a stream without counts, whose client leaves."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from testing.gateway.running import BASE_MODEL, HI, until
from testing.gateway.vllm_double import VllmDouble, envelope
from tests.gateway.fleet.kinds.test_vllm import served

PIECES = 7


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
async def test_a_client_that_leaves_pays_for_the_reasoning_of_all_choices(
    field: str, tmp_path: Path, model_dir: Path, redis_url: str, migrated: Path, monkeypatch: pytest.MonkeyPatch
):
    async def think(_: VllmDouble, request: web.Request, body: dict[str, Any], is_chat: bool) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        deltas = [{"role": "assistant", "content": ""}] * 2 + [{field: "hm"}] * PIECES
        for number, delta in enumerate(deltas):
            choice = {"index": number % 2, "delta": delta, "finish_reason": None}
            await response.write(b"data: " + json.dumps({**envelope(body), "choices": [choice]}).encode() + b"\n\n")
        await asyncio.Event().wait()
        return response

    monkeypatch.setattr(VllmDouble, "_answer", think)
    async with served(tmp_path, model_dir, redis_url, migrated) as (gateway, _):
        acme = await gateway.tenant("acme")
        body = {"model": BASE_MODEL, "messages": HI, "n": 2, "stream": True, "max_tokens": 50}
        url = f"{acme.url}/v1/chat/completions"
        async with acme.session.post(url, json=body, headers=acme.headers) as response:
            seen = 0
            while seen < PIECES:
                seen += b'"hm"' in await asyncio.wait_for(response.content.readline(), 30.0)
            response.close()

        async def is_billed() -> bool:
            rows = await acme.usage()
            return [row["completion_tokens"] for row in rows] == [PIECES]

        await until(is_billed)
