"""Answers of the playground end with the session that asked for them, as an API stream ends with its key."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from testing.gateway.running import HI, Browser, Gateway, until
from testing.gateway.upstream import Upstream

TOKENS = 60
# Much longer than the tenth of a second in which a gateway notices, and much shorter than the whole answer.
SOON_SECONDS = 3.0
BODY = {"model": "base", "messages": HI, "max_tokens": TOKENS}
CHATS = {"/admin": "/admin/playground/acme/chat", "/console": "/console/playground/chat"}


@pytest.fixture(params=["/admin", "/console"])
async def browser(request: pytest.FixtureRequest, gateway: Gateway) -> AsyncIterator[Browser]:
    """Return a browser of an operator with a key, and of a tenant."""
    acme = await gateway.tenant("acme")
    key = acme.key if request.param == "/console" else (await gateway.admin.post("/admin/api/keys")).json["key"]
    async with gateway.browser(key, request.param) as browser:
        yield browser


async def ask(browser: Browser, *, stream: bool, tokens: int = TOKENS) -> asyncio.Task[tuple[int, bytes]]:
    """Begin an answer, and return the task that reads it to its end."""
    headers = {"x-csrf": await browser.csrf()}

    async def read() -> tuple[int, bytes]:
        body = BODY | {"stream": stream, "x_engine": {"tokens": tokens, "delay": 0.1}}
        async with browser.session.post(browser.url + CHATS[browser.home], json=body, headers=headers) as response:
            return response.status, await response.read()

    return asyncio.create_task(read())


async def own_session(gateway: Gateway, browser: Browser) -> str:
    found = (await gateway.admin.get("/admin/api/sessions")).json["data"]
    [own] = [each["id"] for each in found if (each["tenant"] is None) == (browser.home == "/admin")]
    return own


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("how", ["log-out", "revocation"])
async def test_a_session_that_ends_ends_its_answers(
    browser: Browser, gateway: Gateway, upstream: Upstream, how: str, stream: bool
):
    answer = await ask(browser, stream=stream)

    async def has_begun() -> bool:
        return bool(upstream.requests) and (not stream or upstream.events >= 3)

    await until(has_begun)
    if how == "log-out":
        assert (await browser.submit(f"{browser.home}/logout")).status == 303
    else:
        ended = await gateway.admin.call("DELETE", f"/admin/api/sessions/{await own_session(gateway, browser)}")
        assert ended.status == 200
    begun = time.monotonic()
    status, body = await answer
    assert time.monotonic() - begun < SOON_SECONDS
    if stream:
        events = [json.loads(line[6:]) for line in body.decode().split("\n\n") if line and line != "data: [DONE]"]
        assert status == 200
        assert "session has ended" in events[-1]["error"]["message"]
    else:
        assert (status, json.loads(body)["error"]["code"]) == (401, "invalid_api_key")

    async def is_billed() -> Any:
        return (await gateway.admin.get("/admin/api/usage?tenant=acme")).json["data"]

    await until(is_billed)
    [row] = (await gateway.admin.get("/admin/api/requests?tenant=acme")).json["data"]
    assert row["status"] == "revoked"
    assert row["completion_tokens"] < TOKENS
    if stream:
        assert row["completion_tokens"] >= 3


async def test_another_session_of_the_same_key_keeps_its_answer(gateway: Gateway, upstream: Upstream):
    acme = await gateway.tenant("acme")
    async with gateway.browser(acme.key, "/console") as first, gateway.browser(acme.key, "/console") as second:
        answer = await ask(second, stream=True, tokens=15)

        async def has_begun() -> bool:
            return upstream.events >= 3

        await until(has_begun)
        assert (await first.submit("/console/logout")).status == 303
        status, body = await answer
        assert (status, body.endswith(b"data: [DONE]\n\n"), upstream.events) == (200, True, 15)
