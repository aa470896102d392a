"""Refusals of requests while no engine is available."""

import asyncio
import time

from testing.gateway.running import Gateway, until
from testing.gateway.upstream import Upstream


async def test_a_refusal_says_if_an_engine_loads_its_model(gateway: Gateway, upstream: Upstream):
    """It says so only while the engine's health route does."""
    acme = await gateway.tenant("acme")

    async def is_refused(part: str) -> bool:
        got = await acme.complete()
        assert (got.status, got.error["code"], got.headers["Retry-After"]) == (503, "no_engine", "1")
        return part in got.error["message"]

    upstream.health_status, upstream.healthy = "loading", False
    await gateway.engines_up(0)
    await until(lambda: is_refused("One loads its model and will serve it then; try again shortly."))
    upstream.health_status = "unhealthy"
    await until(lambda: is_refused("No engine is available to serve this request; try again shortly."))
    upstream.healthy = True
    await gateway.engines_up(1)
    assert (await acme.complete()).status == 200


async def test_a_refusal_while_an_engine_loads_tells_the_rest_of_a_load_as_long_as_the_last(
    gateway: Gateway, upstream: Upstream
):
    acme = await gateway.tenant("acme")

    async def wait_of_loading() -> int:
        got = await acme.complete()
        is_known = got.status == 503 and "loads its model" in got.error["message"]
        return int(got.headers["Retry-After"]) if is_known else 0

    async def is_loading() -> bool:
        return await wait_of_loading() > 0

    upstream.health_status, upstream.healthy = "loading", False
    begun = time.monotonic()
    await until(is_loading)
    assert await wait_of_loading() == 1, "no load is known yet"
    await asyncio.sleep(4)
    upstream.healthy = True
    await gateway.engines_up(1)
    took = time.monotonic() - begun
    upstream.healthy = False
    await until(is_loading)
    assert 1 < await wait_of_loading() <= took + 1

    async def is_overdue() -> bool:
        return await wait_of_loading() == 1

    await until(is_overdue)
