"""The operators' commands against a real gateway."""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from loraplex.cli import main
from tests.adapters.files import write
from tests.gateway.running import ADMIN_KEY, Gateway, until

Run = Callable[..., Awaitable[Result]]


@pytest.fixture
def run(gateway: Gateway, tmp_path: Path) -> Run:
    """A command as its user starts it, in a thread beside the gateway; it must end well, unless `code` says how."""
    clean = {name: None for name in os.environ if name.startswith("LORAPLEX_")}
    env = clean | {"LORAPLEX_GATEWAY": gateway.url, "LORAPLEX_ADMIN_KEY": ADMIN_KEY}

    async def run(*arguments: str, code: int = 0, **options: Any) -> Result:
        result = await asyncio.to_thread(CliRunner().invoke, main, arguments, env=env, **options)
        assert result.exit_code == code, result.output
        return result

    return run


async def test_a_tenant_from_create_to_delete(run: Run, gateway: Gateway):
    limits = ("--requests-per-minute", "60", "--tokens-per-minute", "none", "--budget-per-month", "12.50")
    others = ("--priority", "2", "--weight", "1.5", "--on-token-limit", "shorten")
    of_models = ("--model-limits", '{"pirate": {"max_concurrent": 1}}')
    await run("tenant", "create", "initech", *limits, *others, *of_models)
    shown = json.loads((await run("tenant", "show", "initech")).stdout)
    expected = {
        "name": "initech",
        "requests_per_minute": 60,
        "tokens_per_minute": None,
        "max_concurrent": 32,
        "budget_per_month": 12_500_000,
        "priority": 2,
        "weight": 1.5,
        "on_token_limit": "shorten",
        "model_limits": {"pirate": {"max_concurrent": 1}},
        "suspended": False,
    }
    assert shown | expected == shown
    done = await run("tenant", "update", "initech", "--requests-per-minute", "none", "--tokens-per-day", "1000")
    assert done.stdout == "updated tenant initech: requests_per_minute, tokens_per_day\n"
    changed = {"requests_per_minute": None, "tokens_per_day": 1000, "budget_per_month": 12_500_000}
    shown = json.loads((await run("tenant", "show", "initech")).stdout)
    assert shown | changed == shown

    key = (await run("key", "create", "initech")).stdout.strip()
    await run("tenant", "suspend", "initech")
    assert (await gateway.client(key).chat()).error["code"] == "tenant_suspended"
    head, row = (await run("tenant", "list")).stdout.splitlines()
    assert head.split()[:4] == ["NAME", "SUSPENDED", "PRIORITY", "WEIGHT"]
    assert row.split()[:4] == ["initech", "True", "2", "1.5"]
    await run("tenant", "resume", "initech")
    assert (await gateway.client(key).chat()).status == 200

    kept = await run("tenant", "delete", "initech", input="n\n", code=1)
    assert "nothing was deleted" in kept.stderr
    await run("tenant", "delete", "initech", "--yes")
    gone = await run("tenant", "show", "initech", code=1)
    assert gone.stderr == "Error: There is no tenant of this name.\n"


async def test_a_key_from_create_to_revoke(run: Run, gateway: Gateway):
    await gateway.tenant("acme")
    made = await run("key", "create", "acme", "--label", "ci", "--expires", "30d", "--scopes", "inference,usage",
                     "--models", "base, pirate", "--tokens-per-day", "500")  # fmt: skip
    key_id = made.stdout.split("_")[1]
    assert f"id {key_id}" in made.stderr
    key = (await gateway.admin.get("/admin/api/tenants/acme/keys")).json["data"][-1]
    expected = {"label": "ci", "scopes": ["inference", "usage"], "allowed_models": ["base", "pirate"]}
    assert key | expected | {"id": key_id, "tokens_per_day": 500} == key
    left = datetime.fromisoformat(key["expires_at"]) - datetime.now(UTC)
    assert timedelta(days=29) < left < timedelta(days=30)

    rotated = (await run("key", "rotate", key_id, "--grace", "0s")).stdout.strip()
    assert (await gateway.client(made.stdout.strip()).chat()).status == 401
    assert (await gateway.client(rotated).chat()).status == 200
    await run("key", "revoke", rotated.split("_")[1])
    assert (await gateway.client(rotated).chat()).status == 401
    lines = (await run("key", "list", "acme")).stdout.splitlines()
    assert len(lines) == 4
    assert rotated.split("_")[2] not in "".join(lines)

    admin = (await run("key", "create", "--admin", "--label", "second")).stdout.strip()
    assert (await gateway.client(admin).get("/admin/api/tenants")).status == 200
    assert "second" in (await run("key", "list", "--admin")).stdout


async def test_adapters_and_usage_of_a_period(run: Run, gateway: Gateway, tmp_path: Path):
    acme = await gateway.tenant("acme")
    folder = write(tmp_path / "adapter")
    for whose in (("--tenant", "acme"), ("--api-key", acme.key or "")):
        assert "pushed pirate version 1" in (await run("adapter", "push", "pirate", str(folder), *whose)).stdout
        assert "pirate" in (await run("adapter", "list", *whose)).stdout
        await run("adapter", "delete", "pirate", *whose)
        assert "pirate" not in (await run("adapter", "list", *whose)).stdout
        for period in ((), ("--since", "30d"), ("--since", "2026-01-01", "--until", "2026-02-01T00:00:00+01:00")):
            assert json.loads((await run("usage", *period, *whose)).stdout)["object"] == "usage"
    missing = await run("adapter", "delete", "../x", "--tenant", "acme", code=1)
    assert missing.stderr == "Error: There is no adapter of this name.\n"


async def test_prices_in_money_per_million_tokens(run: Run, gateway: Gateway):
    acme = await gateway.tenant("acme")
    await run("price", "set", "acme/pirate", "--input", "0.50", "--output", "1.5", "--cached", "0.05")
    await run("price", "set", "*", "--input", "1", "--output", "2")
    listed = (await gateway.admin.get("/admin/api/prices")).json["data"]
    assert {row["model"]: (row["input"], row["cached"], row["output"]) for row in listed} == {
        "*": (1_000_000, 1_000_000, 2_000_000),
        "acme/pirate": (500_000, 50_000, 1_500_000),
    }
    head, *rows = (await run("price", "list")).stdout.splitlines()
    assert head.split() == ["MODEL", "INPUT", "CACHED", "OUTPUT", "UPDATED_AT"]
    assert sorted(row.split()[:4] for row in rows) == [["*", "1", "1", "2"], ["acme/pirate", "0.5", "0.05", "1.5"]]
    await acme.complete()

    async def written() -> bool:
        rows = json.loads((await run("usage", "--by", "key,day", "--tenant", "acme")).stdout)["data"]
        return [row["key_id"] for row in rows] == [(acme.key or "").split("_")[1]]

    await until(written)
    await run("price", "delete", "acme/pirate")
    assert "acme/pirate" not in (await run("price", "list")).stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("tenant", "create", "x", "--priority", "10"), "priority: expected an integer of at most 9."),
        (("tenant", "create", "x", "--model-limits", '{"m": {"weight": 1}}'), "there is no such field"),
        (("tenant", "suspend", "nobody"), "There is no tenant of this name."),
        (("key", "create", "nobody"), "There is no tenant of this name."),
        (("key", "create", "--admin", "--models", "m"), "allowed_models: there is no such field."),
        (("key", "rotate", "0" * 16), "There is no key of this id."),
        (("price", "set", "m", "--input", "none", "--output", "1"), "input: expected an integer"),
        (("price", "delete", "m"), "m"),
        (("usage", "--tenant", "nobody"), "There is no tenant of this name."),
    ],
)
async def test_what_the_gateway_refuses_is_one_line(arguments: tuple[str, ...], says: str, run: Run):
    [line] = (await run(*arguments, code=1)).stderr.splitlines()
    assert line.startswith("Error: ")
    assert says in line
