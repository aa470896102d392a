"""Whole answers behind servers without counts of ended requests: their tokens are billed, read or not."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from gateway.billing import estimates
from gateway.billing.charges import Ending
from gateway.billing.estimates import MIN_TOKENS, Speeds
from testing.gateway.running import Client, Gateway, until
from testing.gateway.vllm_double import VllmDouble
from tests.gateway.fleet.kinds.test_vllm import billed, served

ENGINE = "http://engine"
# Tokens of the prompt by the gateway's count, which applies until the server has sent its own.
HI_TOKENS = 2


async def leave(client: Client, vllm: VllmDouble, **body: Any) -> None:
    """Send a request and leave once the server has it."""
    vllm.hold.clear()
    asked = len(vllm.requests)
    task = asyncio.create_task(client.complete(**body))

    async def has_come() -> bool:
        return len(vllm.requests) > asked

    await until(has_come)
    await asyncio.sleep(0.05)
    task.cancel()


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let servers without a known answer count as so fast that `max_tokens` is the bound."""
    monkeypatch.setattr(estimates, "FIRST_SPEED", 1e6)


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("choices", [1, 3])
async def test_a_client_that_leaves_late_pays_at_most_max_tokens_of_each_choice(
    choices: int, tmp_path: Path, model_dir: Path, redis_url: str, migrated: Path
):
    async with served(tmp_path, model_dir, redis_url, migrated) as (gateway, vllm):
        acme = await gateway.tenant("acme", tokens_per_minute=1000)
        await leave(acme, vllm, max_tokens=40, n=choices)
        await until(lambda: billed(acme, (1, HI_TOKENS, 40 * choices)))


async def test_a_client_that_leaves_pays_by_the_servers_speed(
    tmp_path: Path, model_dir: Path, redis_url: str, migrated: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(estimates, "FIRST_SPEED", 1e-9)
    async with served(tmp_path, model_dir, redis_url, migrated) as (gateway, vllm):
        acme, slow = await gateway.tenant("acme"), await gateway.tenant("slow")
        await leave(slow, vllm, max_tokens=200)
        await until(lambda: billed(slow, (1, HI_TOKENS, 0)))
        # The double answers at once, so its speed is some thousand tokens a second.
        vllm.hold.set()
        assert (await acme.complete(max_tokens=200)).status == 200
        await leave(acme, vllm, max_tokens=200)

        async def is_billed() -> bool:
            rows = await acme.usage()
            return sum(row["requests"] for row in rows) == 2

        await until(is_billed)
        [row] = await acme.usage()
        assert 200 < row["completion_tokens"] <= 400


@pytest.mark.usefixtures("fast")
async def test_a_revoked_key_pays_for_the_answer_that_it_did_not_read(
    tmp_path: Path, model_dir: Path, redis_url: str, migrated: Path
):
    async with served(tmp_path, model_dir, redis_url, migrated) as (gateway, vllm):
        acme = await gateway.tenant("acme")
        other = await _key(gateway, "acme")
        vllm.hold.clear()
        task = asyncio.create_task(gateway.client(other["key"]).complete(max_tokens=30))
        await until(lambda: asyncio.sleep(0, len(vllm.requests) == 1))
        assert (await gateway.admin.call("DELETE", f"/admin/api/keys/{other['id']}")).status == 200
        assert (await task).status == 401
        vllm.hold.set()
        await until(lambda: billed(acme, (1, HI_TOKENS, 30)))


async def _key(gateway: Gateway, tenant: str) -> dict[str, Any]:
    return (await gateway.admin.post(f"/admin/api/tenants/{tenant}/keys")).json


@pytest.mark.usefixtures("fast")
async def test_an_answer_beyond_the_size_limit_is_billed_and_one_that_the_server_breaks_is_not(
    tmp_path: Path, model_dir: Path, redis_url: str, migrated: Path, monkeypatch: pytest.MonkeyPatch
):
    async def large(_: VllmDouble, request: web.Request, body: dict[str, Any], is_chat: bool) -> web.StreamResponse:
        return web.json_response({"choices": [], "pad": "a" * 100_000})

    async def broken(_: VllmDouble, request: web.Request, body: dict[str, Any], is_chat: bool) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000", "Content-Type": "application/json"})
        await response.prepare(request)
        await response.write(b"{")
        assert request.transport is not None
        request.transport.close()
        return response

    async with served(tmp_path, model_dir, redis_url, migrated, max_answer_bytes=2**16) as (gateway, _):
        acme, other = await gateway.tenant("acme"), await gateway.tenant("other")
        monkeypatch.setattr(VllmDouble, "_answer", large)
        got = await acme.complete(max_tokens=25)
        assert (got.status, got.error["code"]) == (400, "answer_too_large")
        await until(lambda: billed(acme, (1, HI_TOKENS, 25)))
        monkeypatch.setattr(VllmDouble, "_answer", broken)
        assert (await other.complete(max_tokens=25)).status == 502
        await until(lambda: billed(other, (1, HI_TOKENS, 0)))


class Left(SimpleNamespace):
    """A whole answer of at most 10,000 tokens. seconds: the time that the server had for it."""

    def __init__(self, seconds: float, ending: Ending = Ending.CANCELLED, completion_tokens: int = 0) -> None:
        used = SimpleNamespace(engine=ENGINE, remembers=False, seconds=lambda ended: seconds)
        super().__init__(
            used_engines=used, ending=ending, choices=1, completion_tokens=completion_tokens,
            is_counted=completion_tokens > 0, is_whole=True, is_clients_cause=False,
        )  # fmt: skip

    def set_completion(self, tokens: int) -> None:
        self.completion_tokens = min(tokens, 10_000)


def test_the_time_of_a_server_that_finishes_nothing_counts_for_two_minutes():
    speeds = Speeds()

    def billed(seconds: float, ended: float) -> int:
        left = Left(seconds)
        speeds.count_unread(left, ended)
        return left.completion_tokens

    assert billed(600.0, 1000.0) == 120 * estimates.FIRST_SPEED, "no answer is known"
    speeds.count_unread(Left(10.0, Ending.FINISHED, 300), 1000.0)
    assert billed(60.0, 1060.0) == 60 * 30
    # The last answer came 100 s after the request.
    assert billed(300.0, 1200.0) == (100 + 120) * 30
    assert billed(300.0, 5000.0) == 120 * 30


def test_a_speed_follows_the_servers_fast_answers():
    speeds = Speeds()
    assert speeds.tokens(ENGINE, 2.0) == 2 * estimates.FIRST_SPEED
    speeds.learn(ENGINE, MIN_TOKENS - 1, 10.0)
    assert speeds.tokens(ENGINE, 2.0) == 2 * estimates.FIRST_SPEED, "a short answer shows no speed"
    speeds.learn(ENGINE, 300, 10.0)
    assert speeds.tokens(ENGINE, 2.0) == 60
    assert speeds.tokens("http://another", 2.0) == 2 * estimates.FIRST_SPEED
    for number in range(1000):
        # Each tenth answer is five times as fast as the others.
        speeds.learn(ENGINE, 1000 if number % 10 == 0 else 200, 10.0)
    assert 2 * 20 <= speeds.tokens(ENGINE, 2.0) <= 2 * 100
    for _ in range(10):
        speeds.learn(ENGINE, 16, 1000.0)
    assert speeds.tokens(ENGINE, 2.0) > 20, "a few slow answers do not make later ones free"
