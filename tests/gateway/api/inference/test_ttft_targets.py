"""A request's target of the time to first token: what engines get of it, and the gateway's own counts."""

import asyncio
import time
from typing import Any

import pytest

from testing.gateway.running import Client, Gateway, until
from testing.gateway.upstream import Upstream

NEVER_OVER, ALWAYS_OVER = 3600, 1e-6


async def counts(gateway: Gateway, tenant: str) -> tuple[int, int]:
    """Return the tenant's streams that met and missed their targets."""
    page = (await gateway.admin.get("/metrics")).body.decode()
    found = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    names = [f'loraplex_gateway_ttft_target_{name}_total{{tenant="{tenant}"}}' for name in ("met", "missed")]
    met, missed = (int(float(found.get(name, 0))) for name in names)
    return met, missed


async def test_the_engine_gets_the_age_of_a_request_with_its_wait_at_the_gateway(serve: Any, upstream: Upstream):
    """The engine gets two batches of one request; the third request waits here."""
    upstream.seats = 1
    upstream.holds = True
    async with serve() as gateway:
        tenant, began = await gateway.tenant("acme"), time.monotonic()
        asked = [asyncio.create_task(tenant.complete(max_tokens=1)) for _ in range(3)]

        async def one_waits() -> bool:
            page = (await gateway.admin.get("/metrics")).body.decode()
            return "loraplex_gateway_queue_waiting 1.0" in page and len(upstream.requests) == 2

        await until(one_waits)
        waits = time.monotonic()
        await asyncio.sleep(0.2)
        released, upstream.holds = time.monotonic(), False
        assert {answer.status for answer in await asyncio.gather(*asked)} == {200}
    ages = [float(headers["x-loraplex-age"]) for headers, _ in upstream.requests]
    assert all(0 <= age <= waits - began for age in ages[:2])
    assert released - waits <= ages[2] <= time.monotonic() - began


async def test_a_clients_own_age_is_not_passed_on(gateway: Gateway, upstream: Upstream):
    tenant, began = await gateway.tenant("acme"), time.monotonic()
    answer = await tenant.post(
        "/v1/completions", {"model": "base", "prompt": "Hi"}, headers={"x-loraplex-age": "1000000"}
    )
    assert answer.status == 200
    [(headers, _)] = upstream.requests
    assert float(headers["x-loraplex-age"]) <= time.monotonic() - began


@pytest.mark.parametrize("says_progress", [True, False])
async def test_streams_count_by_their_first_token(says_progress: bool, gateway: Gateway, upstream: Upstream):
    """says_progress: False for an engine without our extensions, like vLLM."""
    upstream.says_progress = says_progress
    tenant = await gateway.tenant("acme", ttft_target=NEVER_OVER)
    assert (await tenant.complete(stream=True)).status == 200
    assert await counts(gateway, "acme") == (1, 0)
    # A request's own target goes before its tenant's.
    assert (await tenant.complete(stream=True, ttft_target=ALWAYS_OVER)).status == 200
    assert await counts(gateway, "acme") == (1, 1)
    # The client of a whole answer gets its first token with its last.
    assert (await tenant.complete(ttft_target=ALWAYS_OVER)).status == 200
    assert await counts(gateway, "acme") == (1, 1)


async def test_requests_without_a_target_count_nowhere(gateway: Gateway):
    tenant = await gateway.tenant("acme")
    assert (await tenant.complete(stream=True)).status == 200
    assert await counts(gateway, "acme") == (0, 0)


async def test_a_request_that_a_limit_refuses_missed_its_target(gateway: Gateway):
    tenant = await gateway.tenant("acme", requests_per_minute=1, ttft_target=NEVER_OVER)
    assert [(await tenant.complete(stream=True)).status for _ in range(2)] == [200, 429]
    assert await counts(gateway, "acme") == (1, 1)
    # A whole answer that is refused counts no more than one that is served.
    assert (await tenant.complete()).status == 429
    assert await counts(gateway, "acme") == (1, 1)


@pytest.mark.parametrize(
    ("refusal", "status", "missed"), [((503, "engine_overloaded"), 503, 1), ((400, "bad"), 400, 0), (None, 503, 1)]
)
async def test_a_request_that_no_engine_serves_missed_its_target_unless_it_is_invalid(
    refusal: tuple[int, str] | None, status: int, missed: int, gateway: Gateway, upstream: Upstream
):
    upstream.refuses = refusal
    tenant = await gateway.tenant("acme", ttft_target=NEVER_OVER)
    assert (await tenant.complete(stream=True)).status == status
    assert await counts(gateway, "acme") == (0, missed)


async def leave(tenant: Client, upstream: Upstream, **fields: float) -> None:
    """Ask for a stream, and leave once the engine has the request."""
    upstream.holds, before = True, len(upstream.requests)
    asked = asyncio.create_task(tenant.complete(stream=True, **fields))

    async def is_there() -> bool:
        return len(upstream.requests) > before

    await until(is_there)
    asked.cancel()
    await asyncio.wait([asked])


async def test_a_client_that_leaves_counts_only_once_its_target_is_over(gateway: Gateway, upstream: Upstream):
    tenant = await gateway.tenant("acme")
    await leave(tenant, upstream, ttft_target=NEVER_OVER)
    await leave(tenant, upstream, ttft_target=ALWAYS_OVER)

    async def is_counted() -> bool:
        return upstream.cancelled == 2 and await counts(gateway, "acme") != (0, 0)

    await until(is_counted)
    assert await counts(gateway, "acme") == (0, 1)
