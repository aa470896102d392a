"""Data of the engines' pages as JSON: an engine's history, where adapters are, what needs attention, all keys."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gateway.fleet import history
from testing.gateway.running import Gateway, running, settings, until
from testing.gateway.upstream import Upstream

ON_DEVICE, ON_HOST, ON_BOTH = "d" * 64, "e" * 64, "f" * 64


@pytest.fixture
async def upstream(starts_servers: None) -> AsyncIterator[Upstream]:
    async with Upstream().serving() as upstream:
        yield upstream


@pytest.fixture
async def gateway(
    tmp_path: Path, model_dir: Path, redis_url: str, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Gateway]:
    monkeypatch.setattr(history, "SAMPLE_SECONDS", 0.1)
    async with running(settings(tmp_path, model_dir, [upstream.url], redis_url)) as gateway:
        yield gateway


async def places(gateway: Gateway, upstream: Upstream) -> dict[str, str]:
    """Return the place of each adapter on the engine; "unknown" while the engine is down."""
    got = await gateway.admin.get("/admin/api/residency")
    assert got.status == 200, got.body
    return {
        row["digest"][7:]: row["places"].get(upstream.url, {"place": "unknown"})["place"] for row in got.json["data"]
    }


async def test_the_matrix_has_device_and_host_as_the_engine_reports_them(gateway: Gateway, upstream: Upstream):
    upstream.resident = [f"sha256:{digest}" for digest in (ON_DEVICE, ON_BOTH)]
    upstream.host = [ON_HOST, ON_BOTH]
    expected = {ON_DEVICE: "device", ON_BOTH: "device", ON_HOST: "host"}

    async def is_known() -> bool:
        return await places(gateway, upstream) == expected

    await until(is_known)
    # A report without the list means that it did not change.
    upstream.host, upstream.running = None, 1

    async def is_loaded() -> bool:
        [engine] = (await gateway.admin.get("/admin/api/engines")).json["data"]
        return engine["load"] == 1

    await until(is_loaded)
    assert await places(gateway, upstream) == expected
    async with gateway.browser() as operator:
        page = (await operator.get(f"/admin/engines/residency?q={ON_HOST[:12]}")).body.decode()
    assert "cell-host" in page
    assert "cell-device" not in page
    upstream.host = []

    async def is_forgotten() -> bool:
        return await places(gateway, upstream) == {ON_DEVICE: "device", ON_BOTH: "device"}

    await until(is_forgotten)
    # Another instance that reports no list has none.
    upstream.host = [ON_HOST]
    await until(lambda: _has(gateway, upstream, ON_HOST))
    upstream.host, upstream.instance = None, "two"
    await until(is_forgotten)


async def _has(gateway: Gateway, upstream: Upstream, digest: str) -> bool:
    return digest in await places(gateway, upstream)


async def test_the_matrix_has_pages_and_a_filter(gateway: Gateway, upstream: Upstream):
    upstream.host = [f"{i:064x}" for i in range(25)]

    async def is_known() -> bool:
        return len(await places(gateway, upstream)) == 25

    await until(is_known)
    first = (await gateway.admin.get("/admin/api/residency?limit=20")).json
    second = (await gateway.admin.get("/admin/api/residency?limit=20&page=2")).json
    assert (len(first["data"]), first["has_more"], first["total"]) == (20, True, 25)
    assert (len(second["data"]), second["has_more"]) == (5, False)
    assert not {row["digest"] for row in first["data"]} & {row["digest"] for row in second["data"]}
    [found] = (await gateway.admin.get(f"/admin/api/residency?q={7:064x}")).json["data"]
    assert found["places"] == {upstream.url: {"place": "host", "running": 0}}
    bad = await gateway.admin.get("/admin/api/residency?page=0")
    assert (bad.status, bad.error["param"]) == (400, "page")


async def test_an_engines_history_has_samples_and_changes(gateway: Gateway, upstream: Upstream):
    async def has_samples() -> bool:
        got = await gateway.admin.get("/admin/api/engines/history", params={"url": upstream.url})
        assert got.status == 200, got.body
        return len(got.json["samples"]) > 1 and [each["state"] for each in got.json["changes"]][-1:] == ["up"]

    await until(has_samples)
    [*_, last] = (await gateway.admin.get("/admin/api/engines/history")).json["samples"]
    assert last.keys() == {"at", "waiting", "inside"}
    unknown = await gateway.admin.get("/admin/api/engines/history?url=http://nowhere:1")
    assert (unknown.status, unknown.error["param"]) == (404, "url")


async def test_what_needs_attention_is_plain_text_with_a_link(gateway: Gateway, upstream: Upstream):
    upstream.draining = True

    async def is_listed() -> bool:
        got = await gateway.admin.get("/admin/api/attention")
        assert got.status == 200, got.body
        return any(upstream.url in entry["text"] for entry in got.json["data"])

    await until(is_listed)
    found = (await gateway.admin.get("/admin/api/attention")).json["data"]
    [entry] = [each for each in found if upstream.url in each["text"]]
    assert entry["level"] == "warn"
    assert "<" not in entry["text"]
    assert entry["act"]["url"].startswith("/admin/engines/one?url=")


async def keys(gateway: Gateway, query: str) -> Any:
    got = await gateway.admin.get(f"/admin/api/keys{query}")
    assert got.status == 200, got.body
    return got.json


async def test_keys_are_listed_by_the_filters_of_the_page(gateway: Gateway):
    await gateway.tenant("acme")
    await gateway.tenant("globex")
    await gateway.admin.post("/admin/api/tenants/acme/keys", {"label": "Nightly build"})
    made = (await gateway.admin.post("/admin/api/keys", {"label": "ops"})).json["id"]
    assert [key["id"] for key in (await keys(gateway, ""))["data"]] == [made]
    assert [key["id"] for key in (await keys(gateway, "?q=OPS"))["data"]] == [made]
    assert {key["tenant"] for key in (await keys(gateway, "?tenant=acme"))["data"]} == {"acme"}
    everything = await keys(gateway, "?all=true&sort=tenant&limit=2")
    assert (everything["total"], everything["has_more"], len(everything["data"])) == (4, True, 2)
    assert [key["tenant"] for key in everything["data"]] == ["acme", "acme"]
    assert (await keys(gateway, "?all=true&sort=tenant&limit=2&page=2"))["has_more"] is False
    [build] = (await keys(gateway, "?all=true&q=nightly"))["data"]
    assert build["label"] == "Nightly build"
    assert "key" not in build
    await gateway.admin.call("DELETE", f"/admin/api/keys/{build['id']}")
    assert [key["id"] for key in (await keys(gateway, "?tenant=acme&state=revoked"))["data"]] == [build["id"]]
    for query, param in (("state=good", "state"), ("sort=secret", "sort"), ("limit=0", "limit"), ("all=maybe", "all")):
        bad = await gateway.admin.get(f"/admin/api/keys?{query}")
        assert (bad.status, bad.error["param"]) == (400, param)


async def test_a_viewer_reads_and_a_tenant_does_not(gateway: Gateway):
    viewer = gateway.client((await gateway.admin.post("/admin/api/keys", {"role": "viewer"})).json["key"])
    acme = await gateway.tenant("acme")
    for path in ("engines/history", "residency", "attention", "keys?all=true", "fairness"):
        assert (await viewer.get(f"/admin/api/{path}")).status == 200
        assert (await acme.get(f"/admin/api/{path}")).status in (401, 403)
