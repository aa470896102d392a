"""Drained engines: no gateway sends them new requests, running ones end well, and a restart changes nothing."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from testing.gateway.running import Gateway, running, settings, until
from testing.gateway.upstream import Upstream


@pytest.fixture(autouse=True)
async def no_drains_left(redis_url: str):
    """Tests share a Redis, and drains have no lifetime."""
    from gateway.redis.client import connect
    from gateway.redis.keys import DRAINED_ENGINES_KEY

    yield
    redis = connect(redis_url, timeout=10.0)
    await redis.delete(DRAINED_ENGINES_KEY)
    await redis.aclose()


async def listed(gateway: Gateway) -> dict[str, Any]:
    return {engine["url"]: engine for engine in (await gateway.admin.get("/admin/api/engines")).json["data"]}


async def drained_everywhere(url: str, *gateways: Gateway, drained: bool = True) -> None:
    for gateway in gateways:

        async def seen(gateway: Gateway = gateway) -> bool:
            return ((await listed(gateway))[url]["drained"] is not None) is drained

        await until(seen)


async def test_a_drained_engine_gets_no_requests_from_any_gateway(
    tmp_path: Path, model_dir: Path, redis_url: str, postgres_url: str
):
    async with Upstream().serving() as stays, Upstream().serving() as goes:
        of = [
            settings(tmp_path / name, model_dir, [goes.url, stays.url], redis_url, database_url=postgres_url)
            for name in ("a", "b")
        ]
        async with running(of[0]) as one, running(of[1]) as two:
            acme = await one.tenant("acme")
            begun = len(goes.requests)
            # A long answer is running there when the drain begins.
            assert (await one.admin.post("/admin/api/engines/drain", {"url": stays.url})).status == 200
            await drained_everywhere(stays.url, two)
            running_there = asyncio.create_task(acme.complete(max_tokens=8, x_engine={"tokens": 8, "delay": 0.1}))
            await until(lambda: _is(len(goes.requests) > begun))
            await one.admin.post("/admin/api/engines/resume", {"url": stays.url})
            answer = await two.admin.post("/admin/api/engines/drain", {"url": goes.url})
            assert answer.status == 200
            assert answer.json["drained"]["by"]
            assert answer.json["reason"].startswith("drained")
            await drained_everywhere(goes.url, one, two)
            await drained_everywhere(stays.url, one, two, drained=False)
            seen = len(goes.requests)
            other = two.client(acme.key)
            for i in range(6):
                assert (await acme.complete(prompt=f"conversation {i}")).status == 200
                assert (await other.complete(prompt=f"conversation {i}")).status == 200
            assert len(goes.requests) == seen
            ended = await running_there
            assert (ended.status, ended.json["usage"]["completion_tokens"]) == (200, 8)
            assert f'loraplex_gateway_engine_drained{{engine="{goes.url}"}} 1.0' in await metrics(one)
        async with running(of[0]) as again:
            assert (await listed(again))[goes.url]["drained"] is not None
            assert (await again.admin.post("/admin/api/engines/resume", {"url": goes.url})).json["drained"] is None
            actions = [entry["action"] for entry in (await again.admin.get("/admin/api/audit")).json["data"]]
            assert actions[:2] == ["engine.resume", "engine.drain"]


async def _is(value: bool) -> bool:
    return value


async def metrics(gateway: Gateway) -> str:
    return (await gateway.admin.get("/metrics")).body.decode()


async def test_without_any_engine_left_requests_are_refused_with_the_reason(gateway: Gateway, upstream: Upstream):
    acme = await gateway.tenant("acme")
    await gateway.admin.post("/admin/api/engines/drain", {"url": upstream.url})
    refused = await acme.complete()
    assert (refused.status, refused.error["code"]) == (503, "no_engine")
    ready = (await gateway.nobody.get("/readyz")).json
    assert ready["parts"]["engines"] != "ok"
    assert ready["engine_problems"] == ["drained"]
    await gateway.admin.post("/admin/api/engines/resume", {"url": upstream.url})
    assert (await acme.complete()).status == 200


async def test_only_known_engines_can_be_drained(gateway: Gateway):
    for act in ("drain", "resume"):
        answer = await gateway.admin.post(f"/admin/api/engines/{act}", {"url": "http://nowhere:1"})
        assert (answer.status, answer.error["param"]) == (404, "url")
        assert "http://nowhere:1" in answer.error["message"]
        assert (await gateway.admin.post(f"/admin/api/engines/{act}", {})).status == 400
    tenant = await gateway.tenant("acme")
    assert (await tenant.post("/admin/api/engines/drain", {"url": "x"})).status in (401, 403)
