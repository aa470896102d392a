"""`loraplex tenant apply`, `bulk` and `list` against a real gateway."""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from loraplex.cli import main
from testing.gateway.running import ADMIN_KEY, Gateway

Run = Callable[..., Awaitable[Result]]
FILE = """
plans:
  pro:
    tokens_per_minute: 60000
    budget_warn_at: [0.9, 0.5]
    soft_budget_per_week: 3
    prices: {"*": {input: 0.20, output: 0.60}}
tenants:
  acme:
    plan: pro
    budget_per_month: 12.50
    budget_per_30_days: 9.99
    soft_budget_per_month: 10
    tokens_per_day: none
    external_id: 0042
    tags: [trial, eu]
    model_limits: {base: {budget_per_month: 1.10}}
  globex:
    budget_warn_at: none
"""


@pytest.fixture
def run(gateway: Gateway) -> Run:
    clean = {name: None for name in os.environ if name.startswith("LORAPLEX_")}
    env = clean | {"LORAPLEX_GATEWAY": gateway.url, "LORAPLEX_ADMIN_KEY": ADMIN_KEY}

    async def run(*arguments: str, code: int = 0) -> Result:
        result = await asyncio.to_thread(CliRunner().invoke, main, ("tenant", *arguments), env=env)
        assert result.exit_code == code, result.output
        return result

    return run


async def test_a_file_is_applied_once_and_its_differences_are_shown(run: Run, tmp_path: Path):
    file = tmp_path / "tenants.yaml"
    file.write_text(FILE)
    await run("create", "stays")
    shown = await run("apply", "-f", str(file), "--dry-run")
    assert shown.stdout == "plan pro: create\ntenant acme: create\ntenant globex: create\n3 differences\n"
    assert "acme" not in (await run("list")).stdout
    assert (await run("apply", "-f", str(file))).stdout.endswith("applied 3 differences\n")
    acme = json.loads((await run("show", "acme", "--json")).stdout)
    expected = {"budget_per_month": 12_500_000, "tokens_per_day": None, "tokens_per_minute": 60_000, "plan": "pro"}
    expected |= {"external_id": "0042", "tags": ["eu", "trial"], "budget_per_30_days": 9_990_000}
    expected |= {"soft_budget_per_month": 10_000_000, "soft_budget_per_week": 3_000_000, "budget_warn_at": [0.5, 0.9]}
    assert acme | expected == acme
    assert acme["model_limits"] == {"base": {"budget_per_month": 1_100_000}}
    assert (await run("apply", "-f", str(file))).stdout == "0 differences\n"

    changed = (
        FILE.replace("12.50", "inherit").replace("60000", "70000").replace("day: none", "day: 5").replace(", eu", "")
    )
    file.write_text(changed)
    shown = await run("apply", "-f", str(file), "--dry-run")
    assert shown.stdout.splitlines() == [
        "plan pro: tokens_per_minute 60000 -> 70000",
        "tenant acme: tokens_per_day none -> 5, tags eu,trial -> trial, budget_per_month 12.50 -> inherited",
        "2 differences",
    ]
    await run("apply", "-f", str(file))
    assert (await run("apply", "-f", str(file), "--dry-run")).stdout == "0 differences\n"
    assert "stays" in (await run("list")).stdout
    refused = await run("apply", "-f", str(file), "--prune", code=2)
    assert "--yes" in refused.stderr
    pruned = await run("apply", "-f", str(file), "--prune", "--yes")
    assert pruned.stdout == "tenant stays: delete\napplied 1 difference\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tenants:\n  acme:\n    wieght: 2\n", "line 3: unknown key 'wieght' in tenants.acme"),
        ("tenant:\n  acme:\n", "line 1: unknown key 'tenant'"),
        ("plans:\n  pro:\n    suspended: true\n", "line 3: unknown key 'suspended' in plans.pro"),
        ("tenants:\n  acme:\n  acme:\n", "line 3: 'acme' appears twice in tenants"),
        ("tenants:\n  acme: 5\n", "line 2: expected a mapping in tenants.acme"),
        ("tenants:\n  acme: {budget_per_month: 1.2.3}\n", "line 2: '1.2.3' is not an amount"),
        ("tenants:\n  acme:\n    weight: .nan\n", "line 3: weight: expected a finite number, got nan"),
        ("tenants:\n  acme:\n    weight: 2026-01-01\n", "line 3: weight: expected a text or a number, got 2026-01-01"),
        ("tenants:\n  acme:\n    tags: [eu, 5]\n", "line 3: tags: expected texts or numbers, not both"),
        ("tenants:\n  acme:\n    plan: [pro]\n", "line 3: plan: expected a single value"),
        (
            "tenants:\n  acme:\n    weight: !!python/name:os.system x\n",
            "line 3: weight: could not determine a constructor",
        ),
        ("tenants: {a: [}\n", "line 1: not YAML"),
        ("tenants:\n  acme:\n    weight: heavy\n", "line 2: tenant acme: weight: expected"),
    ],
)
async def test_mistakes_are_named_with_their_line(run: Run, tmp_path: Path, text: str, message: str):
    file = tmp_path / "tenants.yaml"
    file.write_text(text)
    refused = await run("apply", "-f", str(file), code=1)
    assert message in refused.stderr


async def test_a_dry_run_refuses_an_unknown_plan(run: Run, tmp_path: Path):
    await run("create", "acme")
    result = await run("bulk", "--search", "acme", "--set-plan", "nope", "--dry-run", code=1)
    assert "there is no plan 'nope'" in result.stderr
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants:\n  acme:\n    plan: nope\n")
    result = await run("apply", "-f", str(file), "--dry-run", code=1)
    assert f"{file}, line 2: tenant acme: there is no plan 'nope'" in result.stderr


async def test_a_change_of_many_is_shown_first(run: Run):
    for name in ("acme", "globex"):
        await run("create", name, "--tags", "trial")
    await run("create", "other")
    shown = await run("bulk", "--tag", "trial", "--add-tags", "eu", "--suspend", "--dry-run")
    assert shown.stdout.splitlines() == [
        "tenant acme: suspended no -> yes, tags trial -> eu,trial",
        "tenant globex: suspended no -> yes, tags trial -> eu,trial",
        "2 tenants would change",
    ]
    assert "--yes" in (await run("bulk", "--tag", "trial", "--suspend", code=2)).stderr
    assert (await run("bulk", "--tag", "trial", "--suspend", "--yes")).stdout.endswith("changed 2 tenants\n")
    assert len((await run("list", "--suspended")).stdout.splitlines()) == 3
    assert "--everyone" in (await run("bulk", "--resume", code=2)).stderr
    assert (await run("bulk", "--everyone", "--resume", "--yes")).stdout.endswith("changed 2 tenants\n")
    _, row = (await run("list", "--tag", "trial", "--search", "GLOB", "--sort", "spend")).stdout.splitlines()
    assert row.split()[:5] == ["globex", "-", "no", "0.00", "0.00"]
    assert (await run("list", "--over-budget", "80%", "--idle", "30d", "--plan", "none")).stdout.splitlines()[1:] == []
