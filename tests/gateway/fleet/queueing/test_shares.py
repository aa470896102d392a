"""Places of full engines between tenants, in whole gateways before an engine double."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from testing.gateway.running import Client, Gateway, running, settings, until
from testing.gateway.upstream import Upstream

# Seats of the engine. It gets two batches, so it has twice as many places.
SEATS = 4


@asynccontextmanager
async def long_answers(client: Client, number: int) -> AsyncIterator[None]:
    """Keep streams open that generate nothing after their first token."""
    endless = {"stream": True, "max_tokens": 60, "x_engine": {"tokens": 60, "pause": True}}
    streams = [asyncio.ensure_future(client.complete(prompt=f"long {i}", **endless)) for i in range(number)]
    try:
        yield
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


async def queue(gateway: Gateway) -> dict[str, Any]:
    got = await gateway.admin.get("/admin/api/queue")
    assert got.status == 200
    return {**got.json, "data": {row["tenant"]: row for row in got.json["data"]}}


async def test_a_late_tenant_does_not_wait_for_the_end_of_anothers_long_answers(
    tmp_path: Path, model_dir: Path, redis_url: str
):
    async with Upstream().serving() as upstream:
        upstream.seats = SEATS
        of = settings(tmp_path, model_dir, [upstream.url], redis_url)
        async with running(of) as gateway:
            long, late = await gateway.tenant("long"), await gateway.tenant("late", weight=3.0)
            async with long_answers(long, 3 * SEATS):

                async def is_full() -> bool:
                    now = await queue(gateway)
                    return (now["inside"], now["waiting"]) == (2 * SEATS, SEATS)

                await until(is_full)
                assert (await late.complete(max_tokens=2)).status == 200
                # No place was taken from the long answers, and they got none more.
                now = await queue(gateway)
                row = now["data"]["long"]
                assert (now["places"], row["inside"], row["waiting"], row["share"]) == (8, 8, 4, 8)
                assert 0 < row["waited"] < 3600
                assert (await late.complete(max_tokens=2, stream=True)).status == 200


async def test_a_tenants_share_holds_over_two_gateways(tmp_path: Path, model_dir: Path, redis_url: str):
    async with Upstream().serving() as upstream:
        upstream.seats = SEATS
        of = settings(tmp_path, model_dir, [upstream.url], redis_url)
        async with running(of) as one, running(of) as other:
            long, late = await one.tenant("long"), await one.tenant("late")
            late = Client(other.session, other.url, late.key)
            async with long_answers(long, 3 * SEATS):

                async def other_sees_no_room() -> bool:
                    engines = (await other.admin.get("/admin/api/engines")).json["data"]
                    return engines[0]["load"] == 2 * SEATS

                await until(other_sees_no_room)

                async def has(gateway: Gateway, tenant: str, **expected: int) -> bool:
                    row = (await queue(gateway))["data"].get(tenant, {})
                    return expected.items() <= row.items()

                async with long_answers(late, 1):
                    # Its share is half as soon as the gateways have exchanged who is active.
                    await until(lambda: has(other, "late", inside=1, share=SEATS))
                    async with long_answers(late, 3 * SEATS):
                        await until(lambda: has(other, "late", inside=SEATS, waiting=2 * SEATS + 1))
                        # The other tenant's share shrank: its next places go to nobody until it has no more than half.
                        await until(lambda: has(one, "long", inside=2 * SEATS, share=SEATS))
