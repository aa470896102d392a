"""Engines that come and go: health, announcements, and requests that find another."""

import asyncio
from pathlib import Path

import pytest

from tests.gateway.running import BASE_MODEL, Gateway, running, settings, until
from tests.gateway.upstream import Upstream


async def test_residency_is_read_and_followed(tmp_path: Path, model_dir: Path, redis_url: str):
    async with Upstream().serving() as one, Upstream().serving() as two:
        two.resident = ["sha256:" + "d" * 64]
        async with running(settings(tmp_path, model_dir, [one.url, two.url], redis_url)) as gateway:
            listed = (await gateway.admin.get("/admin/api/engines")).json["data"]
            assert [e["resident"] for e in listed] == [[], ["d" * 64]]
            assert all(e["healthy"] and e["in_flight"] == 0 for e in listed)


async def test_an_engine_that_dies_is_passed_over_and_found_again(tmp_path: Path, model_dir: Path, redis_url: str):
    async with Upstream().serving() as stays:
        async with Upstream().serving() as goes:
            port = int(goes.url.rsplit(":", 1)[1])
            of = settings(tmp_path, model_dir, [goes.url, stays.url], redis_url)
            gateway_of = running(of)
            gateway = await gateway_of.__aenter__()
            acme = await gateway.tenant("acme")
            assert (await acme.complete()).status == 200
        try:
            # The first to meet the refused connection goes on to the next engine, unseen by its client.
            for i in range(8):
                got = await acme.complete(prompt=f"conversation {i}")
                assert got.status == 200, got.body
            await until(lambda: up(gateway, 1))
            assert [e["healthy"] for e in (await gateway.admin.get("/admin/api/engines")).json["data"]] == [False, True]
            async with Upstream().serving(port):
                await until(lambda: up(gateway, 2))
        finally:
            await gateway_of.__aexit__(None, None, None)


async def up(gateway: Gateway, engines: int) -> bool:
    return (await gateway.nobody.get("/readyz")).json["engines_up"] == engines


async def test_an_engine_of_another_model_gets_no_requests(
    tmp_path: Path, model_dir: Path, redis_url: str, caplog: pytest.LogCaptureFixture
):
    problem = "engine serves other, not base; start it with --served-model-name base"
    async with Upstream().serving() as wrong, Upstream().serving() as right:
        wrong.model = "other"
        async with running(settings(tmp_path, model_dir, [wrong.url, right.url], redis_url)) as gateway:
            acme = await gateway.tenant("acme")
            assert [(await acme.complete()).status for _ in range(3)] == [200] * 3
            assert wrong.requests == []
            ready = await gateway.nobody.get("/readyz")
            assert (ready.status, ready.json["engines_up"], ready.json["engine_problems"]) == (200, 1, [problem])
            right.healthy = False
            await until(lambda: up(gateway, 0))
            ready = await gateway.nobody.get("/readyz")
            assert (ready.status, ready.json["parts"]["engines"]) == (503, problem)
            assert (await acme.complete()).status == 503
            wrong.model = BASE_MODEL
            await until(lambda: up(gateway, 1))
            ready = await gateway.nobody.get("/readyz")
            assert (ready.status, ready.json["engine_problems"]) == (200, [])
    assert caplog.text.count(problem) == 1


async def test_without_an_engine(gateway: Gateway, upstream: Upstream):
    acme = await gateway.tenant("acme", tokens_per_minute=100)
    upstream.healthy = False
    await until(lambda: up(gateway, 0))
    for _ in range(3):
        # Nothing is charged: three times 64 of 100 tokens.
        got = await acme.complete(max_tokens=62)
        assert (got.status, got.error["code"]) == (503, "no_engine")
        assert got.headers["Retry-After"] == "1"
    ready = await gateway.nobody.get("/readyz")
    assert (ready.status, ready.json["parts"]["engines"]) == (503, "none is up")
    upstream.healthy = True
    await until(lambda: up(gateway, 1))
    assert (await acme.complete(max_tokens=62)).status == 200


async def test_own_requests_are_counted_while_they_run(gateway: Gateway):
    acme = await gateway.tenant("acme")
    running_one = asyncio.ensure_future(acme.complete(x_engine={"tokens": 2, "delay": 0.2}))

    async def in_flight() -> int:
        return (await gateway.admin.get("/admin/api/engines")).json["data"][0]["in_flight"]

    await until(in_flight)
    await running_one
    assert await in_flight() == 0
