"""Fairness in whole gateways before an engine double: shares of tenants that wait, the page, and the viewer's role."""

import asyncio
import csv
import io
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gateway.fleet.queueing import fairness
from gateway.pages.fleet import first_tokens
from testing.gateway.running import Client, Gateway, running, settings, until
from testing.gateway.upstream import Upstream

SEATS = 2
HOSTILE = "<script>alert(1)</script>"


@asynccontextmanager
async def load(*clients: Client) -> AsyncIterator[None]:
    """Keep more requests of each client in the queue than the engine has places."""

    async def ask(client: Client) -> None:
        while True:
            await client.complete(max_tokens=4, x_engine={"tokens": 4, "delay": 0.005})

    tasks = [asyncio.ensure_future(ask(client)) for client in clients for _ in range(4 * SEATS)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
async def upstream(starts_servers: None) -> AsyncIterator[Upstream]:
    async with Upstream().serving() as upstream:
        upstream.seats = SEATS
        yield upstream


@pytest.fixture
async def gateway(
    tmp_path: Path, model_dir: Path, redis_url: str, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Gateway]:
    monkeypatch.setattr(fairness, "SAMPLE_SECONDS", 0.25)
    async with running(settings(tmp_path, model_dir, [upstream.url], redis_url)) as gateway:
        yield gateway


async def read(gateway: Gateway) -> dict[str, Any]:
    got = await gateway.admin.get("/admin/api/fairness")
    assert got.status == 200, got.body
    return {**got.json, "data": {row["tenant"]: row for row in got.json["data"]}}


async def test_waiting_tenants_get_shares_by_their_weights(gateway: Gateway):
    one, two = await gateway.tenant("one", weight=1.0), await gateway.tenant("two", weight=2.0)

    async def is_settled() -> bool:
        now = await read(gateway)
        return len(now["history"]["times"]) > 1 and now["jain"]["now"] is not None

    async with load(one, two):
        await until(is_settled)
        now = await read(gateway)
        rows = now["data"]
        assert rows["one"]["now"]["due"] == pytest.approx(1 / 3, abs=0.01)
        assert rows["one"]["now"]["share"] == pytest.approx(1 / 3, abs=0.04)
        assert rows["two"]["now"]["share"] == pytest.approx(2 / 3, abs=0.04)
        assert now["jain"]["now"] == pytest.approx(1, abs=0.02)
        assert not rows["one"]["is_behind"]
        assert rows["one"]["waiting"] > 0
        assert 0 < rows["one"]["p50"] <= rows["one"]["p95"] < 60
        assert 0 < now["waits"]["p50"] <= now["waits"]["p95"]
        assert now["waits"]["waiting"] == rows["one"]["waiting"] + rows["two"]["waiting"] > 0
        async with gateway.browser() as operator:
            page = (await operator.get("/admin/fairness?state=waiting")).body.decode()
            table = (await operator.get("/admin/fairness?format=csv")).body.decode()
        assert 'href="/admin/tenants/two"' in page
        assert "Jain" in page
        assert table.splitlines()[0].startswith("tenant,weight,now,due")
        assert len(table.splitlines()) == 3


async def test_the_page_shows_each_tenants_time_to_first_token(gateway: Gateway, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(first_tokens, "FRESH_SECONDS", 0.0)
    streams, whole = await gateway.tenant("streams"), await gateway.tenant("whole")
    assert (await streams.complete(max_tokens=4, stream=True)).status == 200
    assert (await whole.complete(max_tokens=4)).status == 200
    async with gateway.browser() as operator:

        async def shown() -> dict[str, str]:
            answer = await operator.get("/admin/fairness?format=csv&sort=ttft_p95_ms")
            rows = {row["tenant"]: row for row in csv.DictReader(io.StringIO(answer.body.decode()))}
            return rows if rows.keys() == {"streams", "whole"} and rows["streams"]["ttft_p50_ms"] else {}

        await until(shown)
        rows = await shown()
        assert 0 < float(rows["streams"]["ttft_p50_ms"]) <= float(rows["streams"]["ttft_p95_ms"])
        assert (rows["whole"]["ttft_p50_ms"], rows["whole"]["ttft_p95_ms"]) == ("", "")
        page = (await operator.get("/admin/fairness")).body.decode()
    assert "TTFT p95" in page
    cell = r"<td class=\"n\"[^>]*>[\d.]+ m?s</td>\s*"
    assert len(re.findall(rf"{cell}{cell}</tr>", page)) == 1


async def test_a_tenant_alone_gets_everything_and_has_no_index(gateway: Gateway):
    one = await gateway.tenant("one", weight=0.5)
    assert (await one.complete(max_tokens=4)).status == 200

    async def has_share() -> bool:
        rows = (await read(gateway))["data"]
        return "one" in rows and rows["one"]["now"]["share"] == 1

    await until(has_share)
    now = await read(gateway)
    assert now["jain"] == {"now": None, "hour": None}
    assert now["history"]["shares"].keys() == {"one"}


async def test_preemptions_name_both_tenants_and_a_hostile_name_is_inert(gateway: Gateway, upstream: Upstream):
    acme = await gateway.tenant("acme")
    assert (await acme.complete()).status == 200
    tenant_id = upstream.requests[-1][0]["x-loraplex-tenant"]
    upstream.preempted = [
        {"tenant": tenant_id, "by": HOSTILE, "number": 3},
        {"tenant": "zeta", "by": tenant_id, "number": 5},
    ]

    async def is_known() -> bool:
        return bool((await read(gateway))["preemptions"])

    await until(is_known)
    assert (await read(gateway))["preemptions"] == [
        {"engine": upstream.url, "tenant": "zeta", "by": "acme", "number": 5},
        {"engine": upstream.url, "tenant": "acme", "by": HOSTILE, "number": 3},
    ]
    made = (await gateway.admin.post("/admin/api/keys", {"role": "viewer"})).json["key"]
    async with gateway.browser(made) as viewer:
        got = await viewer.get("/admin/fairness")
        page = got.body.decode()
        for order, expected in (("", ["zeta", "acme"]), ("number", ["acme", "zeta"]), ("-by", ["zeta", "acme"])):
            one = (await viewer.get(f"/admin/fairness?preemptions_sort={order}")).body.decode()
            [body] = re.findall(r'id="preemptions">.*?<tbody>(.*?)</tbody>', one, re.DOTALL)
            assert re.findall(r'<th scope="row">(\w+)</th>', body) == expected, order
        assert (await viewer.get("/admin/fairness?preemptions_sort=weight")).status == 400
    assert got.status == 200
    assert "&lt;script&gt;alert(1)" in page
    assert HOSTILE not in page
    assert (await gateway.client(made).get("/admin/api/fairness")).status == 200
    assert (await acme.get("/admin/api/fairness")).status in (401, 403)
