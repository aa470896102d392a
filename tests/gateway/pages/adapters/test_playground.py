"""Playground: the page, and its requests with the session, the roles and the CSRF value that they need."""

import json
import logging
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from testing.gateway.running import HI, Browser, Gateway, until
from testing.gateway.upstream import Upstream
from tests.gateway.api.adapters.test_adapters import files, push

PAGE, CHAT = "/admin/playground", "/admin/playground/acme/chat"
HOSTILE = "</textarea><img src=x onerror=alert(1)>\"'"
BODY = {"model": "pirate", "messages": HI, "stream": True, "stream_options": {"include_usage": True}}


async def ask(browser: Browser, body: dict[str, Any] | None = None, **headers: str) -> Any:
    sent = {"x-csrf": await browser.csrf()} | headers
    return await browser.call("POST", CHAT, json=body or BODY, headers=sent)


async def test_the_page_offers_the_tenants_own_models(gateway: Gateway):
    acme, globex = await gateway.tenant("acme"), await gateway.tenant("globex")
    for seed in (1, 2):
        assert (await push(acme, "pirate", files(seed))).status == 201
    assert (await push(globex, "secret", files(3))).status == 201
    targets = {"targets": [{"version": 1, "weight": 9}, {"version": 2}]}
    assert (await acme.call("PUT", "/v1/adapters/pirate/aliases/prod", json=targets)).status == 201
    mixture = {"model": "pirate@1*0.5+pirate@2*0.5"}
    assert (await acme.call("PUT", "/v1/mixtures/blend", json=mixture)).status == 201
    listed = await gateway.admin.get("/admin/api/tenants/acme/models")
    ids = [each["id"] for each in listed.json["data"]]
    assert ids == ["base", "pirate", "pirate:prod", "pirate@2", "pirate@1", "blend"]
    async with gateway.browser() as browser:
        text = (await browser.get(PAGE, params={"tenant": "acme"})).body.decode()
        assert re.findall(r'<option value="(\S+)">(?!<)', text.partition('id="models"')[2]) == ids
        assert f'data-url="{CHAT}"' in text
        assert "secret" not in text
        chosen = await browser.get(PAGE, params={"tenant": "acme", "a": HOSTILE})
        assert "<img" not in chosen.body.decode()
        assert "There is no tenant" in (await browser.get(PAGE, params={"tenant": HOSTILE})).body.decode()
        assert "Choose a tenant" in (await browser.get(PAGE)).body.decode()
        assert (await gateway.admin.call("PATCH", "/admin/api/tenants/acme", json={"suspended": True})).status == 200
        assert "suspended" in (await browser.get(PAGE, params={"tenant": "acme"})).body.decode()


async def test_an_answer_is_streamed_charged_and_kept_out_of_logs(
    gateway: Gateway, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.DEBUG)
    acme = await gateway.tenant("acme")
    digest = (await push(acme, "pirate", files(1))).json["digest"]
    price = {"input": 1_000_000, "output": 1_000_000}
    assert (await gateway.admin.call("PUT", "/admin/api/prices/base", json=price)).status == 200
    async with gateway.browser() as browser:
        secret = "words that stay between two"
        answer = await ask(browser, {**BODY, "messages": [{"role": "user", "content": secret}]})
        assert answer.status == 200, answer.body
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        assert answer.headers["x-loraplex-adapter-digest"] == digest
        assert answer.events[-1] == "[DONE]"
        usage = answer.events[-2]["usage"]
        assert (usage["completion_tokens"], usage["currency"]) == (2, "USD")
        assert usage["cost"] > 0

        def found(query: str) -> list[Any]:
            with closing(sqlite3.connect(tmp_path / "gateway.db")) as database:
                return database.execute(query).fetchall()

        async def recorded() -> bool:
            return found("SELECT tenant, key_id, model FROM usage") == [("acme", "operator:bootstrap", "pirate")]

        await until(recorded)
        assert found("SELECT actor FROM audit WHERE action = 'playground.request'") == [("bootstrap",)]
        assert secret not in caplog.text
        assert secret not in json.dumps(found("SELECT detail, target FROM audit"))


async def test_a_closed_connection_ends_the_request_at_the_engine(gateway: Gateway, upstream: Upstream):
    acme = await gateway.tenant("acme")
    assert (await push(acme, "pirate", files(1))).status == 201
    async with gateway.browser() as browser:
        body = {**BODY, "max_tokens": 60, "x_engine": {"tokens": 60, "delay": 0.1}}
        headers = {"x-csrf": await browser.csrf()}
        async with browser.session.post(gateway.url + CHAT, json=body, headers=headers) as response:
            await response.content.readline()
            response.close()

        async def cancelled() -> bool:
            return upstream.cancelled == 1

        await until(cancelled)


async def test_only_operators_ask_and_only_from_the_page(gateway: Gateway, upstream: Upstream):
    acme = await gateway.tenant("acme")
    for role in ("viewer", "billing"):
        made = await gateway.admin.post("/admin/api/keys", {"role": role, "label": role})
        async with gateway.browser(made.json["key"]) as reader:
            assert (await reader.get(PAGE)).status == 403
            assert (await ask(reader)).status == 403
            assert PAGE not in (await reader.get("/admin/adapters")).body.decode()
    async with gateway.browser() as browser:
        assert (await browser.call("POST", CHAT, json=BODY)).error["code"] == "csrf_mismatch"
        assert (await ask(browser, **{"Sec-Fetch-Site": "cross-site"})).error["code"] == "csrf_mismatch"
        assert (await ask(browser)).error["code"] == "model_not_found"
    async with gateway.browser(acme.key, "/console") as tenant:
        assert (await ask(tenant)).status == 303
    assert not upstream.requests
