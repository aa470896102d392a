"""Threads for requests' long work: a tenant's requests that are slow to read delay no other tenant's."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testing.engine import Client, RunningServer
from wire.text.tokenizer import Tokenizer

TOKEN = "internal"
TIMEOUT = 20
# A body that is read on a thread.
LONG = {"model": "tiny", "prompt": "hi", "max_tokens": 1, "user": "x" * 20_000}
# More requests than a pool of the event loop has threads.
MANY = 40


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[RunningServer]:
    running = RunningServer(model, internal_token=TOKEN)
    yield running
    running.close()


def of(tenant_id: str) -> dict[str, Any]:
    return {"headers": {"x-loraplex-internal-token": TOKEN, "x-loraplex-tenant": tenant_id}}


@pytest.mark.parametrize("slow", [LONG | {"prompt": "slow"}, LONG | {"bad_words": ["slow"], "user": ""}])
async def test_a_tenants_long_work_delays_no_other_tenants(
    client: Client, slow: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    gate, begun, encode = threading.Event(), list[str](), Tokenizer.encode

    def encode_later(self: Tokenizer, text: str, **options: Any) -> list[int]:
        if text == "slow":
            begun.append(text)
            assert gate.wait(TIMEOUT)
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", encode_later)
    asked = [asyncio.create_task(client.ok("/v1/completions", slow, **of("greedy"))) for _ in range(MANY)]
    try:
        async with asyncio.timeout(TIMEOUT):
            while not begun:  # noqa: ASYNC110 - appended to on other threads
                await asyncio.sleep(0.01)
            for _ in range(5):
                await client.ok("/v1/completions", LONG, **of("neighbour"))
    finally:
        gate.set()
    assert all(answer["choices"] for answer in await asyncio.gather(*asked))
