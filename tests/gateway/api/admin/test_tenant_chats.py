"""Operators' requests to a tenant's models: limits, ledger and audit of the tenant, streams and their end."""

import asyncio
import logging
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from testing.gateway.running import HI, Gateway, until
from testing.gateway.upstream import Upstream
from tests.gateway.api.adapters.test_adapters import files, push

CHAT = "/admin/api/tenants/acme/chat/completions"
SECRET = "a prompt that nobody else reads"


def rows(tmp_path: Path, query: str) -> list[Any]:
    with closing(sqlite3.connect(tmp_path / "gateway.db")) as database:
        return database.execute(query).fetchall()


async def test_the_tenant_pays_and_the_row_names_the_operator(
    gateway: Gateway, upstream: Upstream, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.DEBUG)
    acme = await gateway.tenant("acme", requests_per_minute=3)
    digest = (await push(acme, "pirate", files(1))).json["digest"]
    for stream in (False, True):
        body = {"model": "pirate", "messages": [{"role": "user", "content": SECRET}], "stream": stream}
        answer = await gateway.admin.post(CHAT, body)
        assert answer.status == 200, answer.body
        assert answer.headers["x-loraplex-adapter-digest"] == digest
        assert upstream.requests[-1][1]["model"] == digest
    continued = await gateway.admin.post(
        CHAT.replace("chat/", ""), {"model": "pirate", "prompt": "Hi", "max_tokens": 4}
    )
    assert continued.status == 200, continued.body
    # The limit is the tenant's, whoever asks.
    refused = await gateway.admin.post(CHAT, {"model": "pirate", "messages": HI})
    assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
    assert (await acme.chat()).status == 429

    async def recorded() -> bool:
        found = rows(tmp_path, "SELECT tenant, key_id, model, status FROM usage")
        return found == [("acme", "operator:bootstrap", "pirate", "ok")] * 3

    await until(recorded)

    # The tenant sees the refusals, and no address of the operator.
    async def noted() -> bool:
        found = rows(tmp_path, "SELECT key_id, address IS NULL FROM refused_requests ORDER BY at")
        return [each for each in found if each[0].startswith("operator:")] == [("operator:bootstrap", 1)]

    await until(noted)
    entries = rows(tmp_path, "SELECT actor, target, tenant, detail FROM audit WHERE action = 'playground.request'")
    assert entries == [("bootstrap", "acme", "acme", "{}")] * 4
    assert SECRET not in caplog.text
    assert not [row for row in rows(tmp_path, "SELECT * FROM audit") if SECRET in str(row)]


async def test_a_running_stream_lasts_and_its_client_ends_it(gateway: Gateway, upstream: Upstream):
    await gateway.tenant("acme")
    body = {
        "model": "base",
        "messages": HI,
        "stream": True,
        "max_tokens": 60,
        "x_engine": {"tokens": 60, "delay": 0.05},
    }
    # Longer than the time after which the keys of running requests are looked up.
    answer = await gateway.admin.post(CHAT, body)
    assert answer.events[-1] == "[DONE]"
    assert "error" not in str(answer.events)
    async with gateway.session.post(gateway.url + CHAT, json=body, headers=gateway.admin.headers) as response:
        await response.content.readline()
        response.close()

    async def cancelled() -> bool:
        return upstream.cancelled == 1

    await until(cancelled)


async def test_a_suspension_ends_an_operators_stream_too(gateway: Gateway, upstream: Upstream):
    await gateway.tenant("acme")
    body = {"model": "base", "messages": HI, "stream": True, "max_tokens": 60, "x_engine": {"tokens": 60, "delay": 0.5}}
    stream = asyncio.create_task(gateway.admin.post(CHAT, body))
    await until(lambda: _is_running(upstream))
    assert (await gateway.admin.call("PATCH", "/admin/api/tenants/acme", json={"suspended": True})).status == 200
    answer = await asyncio.wait_for(stream, 25)
    assert answer.events[-1]["error"]["code"] == "tenant_suspended"


async def _is_running(upstream: Upstream) -> bool:
    return bool(upstream.requests)


async def test_an_idempotency_key_does_not_stand_in_the_way_of_a_stream(gateway: Gateway):
    await gateway.tenant("acme")
    headers = {"Idempotency-Key": "once"}
    for stream in (True, False):
        body = {"model": "base", "messages": HI, "stream": stream}
        for _ in range(2):
            answer = await gateway.admin.call("POST", CHAT, json=body, headers=headers)
            assert answer.status == 200, answer.body
            assert "Idempotent-Replayed" not in answer.headers


async def test_only_operators_ask_and_only_for_tenants_that_are_served(gateway: Gateway):
    acme = await gateway.tenant("acme")
    body = {"model": "base", "messages": HI}
    assert (await acme.post(CHAT, body)).status == 403
    assert (await gateway.nobody.post(CHAT, body)).status == 401
    assert (await gateway.admin.post(CHAT.replace("acme", "none"), body)).status == 404
    assert (await gateway.admin.post(CHAT, {**body, "model": "pirate"})).error["code"] == "model_not_found"
    suspended = await gateway.admin.call("PATCH", "/admin/api/tenants/acme", json={"suspended": True})
    assert suspended.status == 200
    assert (await gateway.admin.post(CHAT, body)).error["code"] == "tenant_suspended"


async def test_prefetch_loads_a_version_on_one_engine(gateway: Gateway, upstream: Upstream):
    acme = await gateway.tenant("acme")
    digest = (await push(acme, "pirate", files(1))).json["digest"]
    path = "/admin/api/tenants/acme/adapters/pirate/versions/1/prefetch"
    loaded = await gateway.admin.post(path, params={"engine": upstream.url})
    assert (loaded.status, loaded.json["engine"]) == (200, upstream.url), loaded.body
    [(asked, _)] = upstream.hints
    assert asked == digest
    upstream.takes_hints = False
    assert (await gateway.admin.post(path, params={"engine": upstream.url})).status == 503
    for query in ({}, {"engine": "http://elsewhere"}):
        refused = await gateway.admin.post(path, params=query)
        assert (refused.status, refused.error["param"]) == (400, "engine")
        assert upstream.url in refused.error["message"]
    retired = path.removesuffix("/prefetch")
    assert (await gateway.admin.call("PATCH", f"{retired}?force=true", json={"state": "retired"})).status == 200
    assert (await gateway.admin.post(path, params={"engine": upstream.url})).error["param"] == "version"


async def test_an_adapters_use_and_changes_are_its_tenants_own(gateway: Gateway, tmp_path: Path):
    acme, globex = await gateway.tenant("acme"), await gateway.tenant("globex")
    for tenant in (acme, globex):
        for seed in (1, 2):
            assert (await push(tenant, "pirate", files(seed))).status == 201
    await acme.chat(model="pirate", user="ada")
    await acme.chat(model="pirate@1", user="ada")
    await acme.chat(model="pirate:latest", user="<b>eve</b>")
    await globex.chat(model="pirate", user="other")

    async def used() -> bool:
        return rows(tmp_path, "SELECT count(*) FROM usage") == [(4,)]

    await until(used)
    # The second query waits: a tenant rests after each.
    use, seen = await asyncio.gather(
        acme.get("/v1/adapters/pirate/use"), gateway.admin.get("/admin/api/tenants/acme/adapters/pirate/use")
    )
    assert use.json == seen.json
    assert [(each["name"], each["requests"]) for each in use.json["users"]] == [("ada", 2), ("<b>eve</b>", 1)]
    assert [(each["name"], each["requests"]) for each in use.json["versions"]] == [("2", 2), ("1", 1)]
    assert [each["requests"] for each in use.json["keys"]] == [3]
    assert {each["target"] for each in use.json["changes"]} == {"acme/pirate"}
    assert (await acme.get("/v1/adapters/none/use")).status == 404


async def test_an_adapters_changes_are_not_those_of_a_similar_name(gateway: Gateway):
    """An underscore stands for any character in SQL's patterns."""
    acme = await gateway.tenant("acme")
    for name in ("a_b", "axb"):
        assert (await push(acme, name, files())).status == 201
        path = f"/admin/api/tenants/acme/adapters/{name}/versions/1"
        assert (await gateway.admin.call("PATCH", path, json={"pinned": True})).status == 200
    changes = (await gateway.admin.get("/admin/api/tenants/acme/adapters/a_b/use")).json["changes"]
    assert {each["target"] for each in changes} == {"acme/a_b", "acme/a_b@1"}


async def test_a_stream_ends_with_the_operators_key(gateway: Gateway, upstream: Upstream):
    await gateway.tenant("acme")
    made = (await gateway.admin.post("/admin/api/keys", {"label": "leaves soon"})).json
    operator = gateway.client(made["key"])
    body = {"model": "base", "messages": HI, "stream": True, "max_tokens": 200}
    endless = body | {"x_engine": {"tokens": 200, "delay": 1.0}}
    number = len(upstream.requests)
    stream = asyncio.ensure_future(operator.post(CHAT, endless))
    bystander = asyncio.ensure_future(gateway.admin.post(CHAT, endless))

    async def both_run() -> bool:
        return len(upstream.requests) == number + 2

    await until(both_run)
    try:
        assert (await gateway.admin.call("DELETE", f"/admin/api/keys/{made['id']}")).status == 200
        async with asyncio.timeout(30):
            error = (await stream).events[-1]["error"]
        assert (error["code"], error["message"]) == ("invalid_api_key", "This API key has been revoked.")
        assert not bystander.done()
    finally:
        stream.cancel()
        bystander.cancel()
