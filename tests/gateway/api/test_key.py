"""A tenant's key describes itself: scopes, models, limits and budget, over HTTP and on the command line."""

import asyncio
import json
import os
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from click.testing import CliRunner, Result

from gateway.errors import Unavailable
from gateway.quota.quota import Quota
from loraplex.cli import main
from testing.gateway.running import Gateway, until
from testing.gateway.upstream_bodies import PROMPT_TOKENS


def first_of_next_month() -> datetime:
    now = datetime.now(UTC)
    return (now.replace(day=1) + timedelta(days=32)).replace(day=1, hour=0, minute=0, second=0, microsecond=0)


async def priced(gateway: Gateway, tenant: str, **limits: Any) -> Any:
    """Return the client of a tenant whose tokens cost 0.001 each."""
    price = {"input": 10**9, "cached": 10**9, "output": 10**9}
    assert (await gateway.admin.call("PUT", "/admin/api/prices/base", json=price)).status == 200
    return await gateway.tenant(tenant, **limits)


async def test_a_key_shows_its_limits_and_what_is_left_and_uses_up_nothing(serve: Any):
    async with serve(currency="EUR") as gateway:
        await gateway.tenant("acme", requests_per_minute=60, max_concurrent=3)
        body = {"label": "ci", "scopes": ["inference"], "allowed_models": ["base"], "requests_per_day": 5}
        made = await gateway.admin.post("/admin/api/tenants/acme/keys", body)
        key = gateway.client(made.json["key"])
        before = (await key.get("/v1/key")).json
        assert (
            before
            | {
                "object": "key",
                "id": made.json["id"],
                "label": "ci",
                "tenant": "acme",
                "scopes": ["inference"],
                "models": ["base"],
                "expires_at": None,
                "budget": None,
            }
            == before
        )
        assert before["limits"]["tenant"]["max_concurrent"] == {"limit": 3, "remaining": 3, "resets_at": None}
        assert (await key.complete(max_tokens=1)).status == 200
        for _ in range(3):
            now = (await key.get("/v1/key")).json["limits"]
            assert now["key"]["requests_per_day"]["remaining"] == 4
            assert now["tenant"]["max_concurrent"]["remaining"] == 3
        resets = datetime.fromisoformat(now["key"]["requests_per_day"]["resets_at"]) - datetime.now(UTC)
        assert timedelta(hours=4) < resets < timedelta(hours=4.9)


async def test_a_budget_is_money_with_its_currency_and_its_reset(serve: Any):
    async with serve(currency="EUR") as gateway:
        acme = await priced(gateway, "acme", budget_per_month=100_000_000)
        fresh = (await acme.get("/v1/key")).json["budget"]
        assert (fresh["spent"], fresh["remaining"]) == ("0.00", "100.00")
        answer = await acme.complete(max_tokens=4)
        # The highest cost is reserved: 2 tokens of the prompt as the gateway counts them, and max_tokens.
        assert answer.headers["x-loraplex-budget-remaining"] == "99.994 EUR"
        budget = (await acme.get("/v1/key")).json["budget"]
        assert answer.json["usage"]["total_tokens"] == PROMPT_TOKENS + 2
        assert (budget["spent"], budget["remaining"]) == ("0.013", "99.987")
        assert budget | {"owner": "tenant", "period": "month", "limit": "100.00", "currency": "EUR"} == budget
        assert datetime.fromisoformat(budget["resets_at"]) - first_of_next_month() < timedelta(seconds=5)


@pytest.mark.parametrize("stream", [False, True])
async def test_each_answer_says_what_it_cost(stream: bool, serve: Any):
    """The cost is a JSON number with all of its decimals; a stream has it in its last event."""
    async with serve(currency="EUR") as gateway:
        acme = await priced(gateway, "acme")
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer = await acme.chat(max_tokens=4, **options)
        usage = answer.events[-2]["usage"] if stream else answer.json["usage"]
        assert (usage["cost"], usage["currency"]) == (0.013, "EUR")
        assert b'"cost":0.013,' in answer.body

        async def recorded() -> bool:
            total = (await acme.get("/v1/usage")).json
            return (total["total"]["cost"], total["currency"]) == ("0.013", "EUR")

        await until(recorded)


async def test_a_budget_of_nothing_admits_what_is_free(gateway: Gateway):
    poor = await gateway.tenant("poor", budget_per_month=0)
    assert (await poor.complete()).status == 200
    await priced(gateway, "rich")
    refused = await poor.complete()
    assert (refused.status, refused.error["code"]) == (429, "insufficient_quota")
    assert (await poor.get("/v1/key")).json["budget"]["remaining"] == "0.00"


async def test_a_key_of_another_tenant_or_no_key_learns_nothing(gateway: Gateway):
    acme, other = await gateway.tenant("acme", requests_per_minute=7), await gateway.tenant("other")
    assert (await gateway.nobody.get("/v1/key")).status == 401
    assert (await gateway.admin.get("/v1/key")).status == 403
    seen = (await other.get("/v1/key")).body
    assert b"acme" not in seen
    assert (await acme.get("/v1/key?tenant=other")).status == 400


async def test_without_redis_the_limits_are_shown_without_their_rest(gateway: Gateway, monkeypatch: pytest.MonkeyPatch):
    acme = await gateway.tenant("acme", requests_per_minute=7, budget_per_month=5_000_000)

    async def away(*_: Any) -> Any:
        raise Unavailable("away")

    monkeypatch.setattr(Quota, "peek", away)
    shown = (await acme.get("/v1/key")).json
    assert shown["limits"]["tenant"]["requests_per_minute"] == {"limit": 7, "remaining": None, "resets_at": None}
    budget = shown["budget"]
    assert (budget["limit"], budget["spent"], budget["remaining"], budget["resets_at"]) == ("5.00", None, None, None)


async def loraplex(gateway: Gateway, key: str | None, *arguments: str) -> Result:
    clean = {name: None for name in os.environ if name.startswith("LORAPLEX_")}
    env = clean | {"LORAPLEX_GATEWAY": gateway.url, "LORAPLEX_API_KEY": key}
    return await asyncio.to_thread(CliRunner().invoke, main, arguments, env=env)


async def test_whoami_and_usage_show_a_tenant_what_is_left(serve: Any):
    async with serve(currency="EUR") as gateway:
        acme = await priced(gateway, "acme", budget_per_month=50_000_000, requests_per_minute=2)
        assert (await acme.complete(max_tokens=1)).status == 200
        budget = (await acme.get("/v1/key")).json["budget"]
        end = first_of_next_month()
        line = f"{budget['spent']} of 50.00 EUR this month, resets 1 {end:%b}"
        shown = await loraplex(gateway, acme.key, "whoami")
        assert shown.exit_code == 0, shown.output
        lines = shown.stdout.splitlines()
        assert lines[0] == "tenant   acme"
        assert f"budget   {line}" in lines
        assert any(text.split()[:4] == ["requests_per_minute", "tenant", "2", "1"] for text in lines)
        assert json.loads((await loraplex(gateway, acme.key, "whoami", "--json")).stdout)["tenant"] == "acme"
        assert (await loraplex(gateway, acme.key, "usage")).stderr.splitlines()[-1] == line
        refused = await loraplex(gateway, None, "whoami")
        assert (refused.exit_code, refused.stderr) == (2, "Error: expected --api-key KEY, a tenant's key\n")
