"""Refusals of requests while no engine is available."""

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
