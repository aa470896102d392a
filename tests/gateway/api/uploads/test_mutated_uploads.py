"""Mutated uploads are refused with a short reason, soon, and leave nothing behind. The benchmark runs all of them."""

import asyncio
import io
import os
import time
from pathlib import Path

from testing.gateway.mutated_uploads import mutated
from testing.gateway.running import Answer, Client, Gateway
from tests.gateway.api.adapters.test_adapters import files, push

COUNT = int(os.environ.get("LORAPLEX_TEST_MUTATED_UPLOADS", "60"))
# The benchmark's limit is 5 s on a quiet machine; here other tests use the cores as well.
SECONDS = 30.0
TENANTS = 20


async def send(client: Client, body: bytes, content_type: str) -> tuple[Answer, float]:
    begun = time.monotonic()
    answer = await client.call("POST", "/v1/adapters", data=io.BytesIO(body), headers={"Content-Type": content_type})
    return answer, time.monotonic() - begun


async def test_mutated_uploads_are_refused_with_a_reason(gateway: Gateway, tmp_path: Path):
    # A tenant's refused uploads may take little CPU time (429 after that), so many tenants send them.
    tenants = [
        await gateway.tenant(f"tenant-{number}", adapter_changes_per_minute=None, max_concurrent_uploads=None)
        for number in range(TENANTS)
    ]
    together = asyncio.Semaphore(4)
    wrong: list[tuple[str, int, bytes, float]] = []

    async def one(tenant: Client, kind: str, body: bytes, content_type: str) -> None:
        async with together:
            answer, seconds = await send(tenant, body, content_type)
        is_refused = 400 <= answer.status < 500 and answer.status != 429
        if not is_refused or len(answer.body) > 2048 or seconds >= SECONDS or not answer.error["message"]:
            wrong.append((kind, answer.status, answer.body[:300], seconds))

    uploads = enumerate(mutated(files(), seed=1, count=COUNT))
    await asyncio.gather(*(one(tenants[i % TENANTS], each.kind, each.body, each.content_type) for i, each in uploads))
    assert not wrong
    for tenant in tenants:
        assert (await tenant.get("/v1/adapters")).json["data"] == []
    assert list((tmp_path / "adapters").iterdir()) == []
    acme = await gateway.tenant("acme")
    assert (await push(acme, "good", files())).status == 201
