"""Mutated uploads are refused with a short reason, soon, and leave nothing behind. The benchmark runs all of them."""

import asyncio
import io
import os
import time
from pathlib import Path

from testing.gateway.mutated_uploads import mutated
from testing.gateway.running import Answer, Client, Gateway
from tests.gateway.api.test_adapters import files, push

COUNT = int(os.environ.get("LORAPLEX_TEST_MUTATED_UPLOADS", "60"))
# The benchmark's limit is 5 s on a quiet machine; here other tests use the cores as well.
SECONDS = 30.0


async def send(client: Client, body: bytes, content_type: str) -> tuple[Answer, float]:
    begun = time.monotonic()
    answer = await client.call("POST", "/v1/adapters", data=io.BytesIO(body), headers={"Content-Type": content_type})
    return answer, time.monotonic() - begun


async def test_mutated_uploads_are_refused_with_a_reason(gateway: Gateway, tmp_path: Path):
    acme = await gateway.tenant("acme", adapter_changes_per_minute=None, max_concurrent_uploads=None)
    together = asyncio.Semaphore(4)
    wrong: list[tuple[str, int, bytes, float]] = []

    async def one(kind: str, body: bytes, content_type: str) -> None:
        async with together:
            answer, seconds = await send(acme, body, content_type)
        fine = 400 <= answer.status < 500 and len(answer.body) <= 2048 and seconds < SECONDS
        if not fine or not answer.error["message"]:
            wrong.append((kind, answer.status, answer.body[:300], seconds))

    await asyncio.gather(*(one(m.kind, m.body, m.content_type) for m in mutated(files(), seed=1, count=COUNT)))
    assert not wrong
    assert (await acme.get("/v1/adapters")).json["data"] == []
    assert list((tmp_path / "adapters").iterdir()) == []
    assert (await push(acme, "good", files())).status == 201
