"""Commands that show what the dashboard shows, against a real gateway: refusals, shares, sessions, settings, use."""

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gateway.fleet.queueing import fairness
from loraplex.commands.reports.refusals import At
from testing.adapter_files import tensors, write
from testing.gateway.commands import Run, runner
from testing.gateway.running import Gateway, change_database, until
from testing.gateway.upstream import Upstream
from tests.gateway.api.adapters.test_adapters import files, push


@pytest.fixture
def run(gateway: Gateway) -> Run:
    return runner(gateway)


def cells(text: str) -> list[dict[str, str]]:
    """Return the rows of a printed table without empty cells."""
    head, *rows = (line.split() for line in text.splitlines())
    return [dict(zip(head, row, strict=False)) for row in rows]


async def refuse(gateway: Gateway) -> None:
    """Let a tenant exceed two limits, once each, and wait for the records."""
    acme = await gateway.tenant("acme", requests_per_minute=1)
    globex = await gateway.tenant("globex", budget_per_month=0)
    price = {"input": 10**9, "output": 10**9}
    assert (await gateway.admin.call("PUT", "/admin/api/prices/base", json=price)).status == 200
    assert [(await acme.chat()).status for _ in range(2)] == [200, 429]
    assert (await globex.chat()).status == 429

    async def recorded() -> bool:
        found = (await gateway.admin.get("/admin/api/refusals")).json
        # The rows of single refusals are written after the sums.
        return bool(found["total"] == 2 and all(cause["evidence"] for cause in found["causes"]))

    await until(recorded)


async def test_refusals_by_tenant_time_and_limit(run: Run, gateway: Gateway):
    await refuse(gateway)
    shown = await run("refusals", "--tenant", "acme")
    assert shown.stderr.startswith("1 refusals from 2")
    [row] = cells(shown.stdout)
    expected = {"TENANT": "acme", "LIMIT": "requests_per_minute", "CODE": "rate_limit_exceeded", "STATUS": "429"}
    assert row | expected | {"REFUSED": "1"} == row
    assert re.search(r" 1 in \d+ min from 20\d\d-", shown.stdout)
    [budget] = (await run("refusals", "--limit-name", "budget_per_month")).stdout.splitlines()[1:]
    assert budget.split()[-6:][:3] == ["tenant", "0.00", "1"]
    now = datetime.now(UTC)
    at = json.loads((await run("refusals", "--at", now.isoformat(), "--json")).stdout)
    assert at["total"] == 2
    before = json.loads((await run("refusals", "--at", (now - timedelta(hours=3)).isoformat(), "--json")).stdout)
    assert before["total"] == 0
    refused = await run("refusals", "--at", "10:40", "--since", "1d", code=2)
    assert refused.stderr == "Error: give either --at, or --since and --until\n"


def test_a_time_of_day_is_its_last_occurrence():
    now = datetime.now(UTC)
    for minutes in (-1, 1):
        given = (now + timedelta(minutes=minutes)).strftime("%H:%M")
        found = datetime.fromisoformat(At(ahead=False).convert(given, None, None))
        assert (found.strftime("%H:%M"), found.second) == (given, 0)
        assert now - timedelta(days=1, minutes=1) < found <= now


async def test_sessions_are_listed_and_ended(run: Run, gateway: Gateway):
    async with gateway.browser() as operator:
        [row] = json.loads((await run("session", "list", "--json")).stdout)
        assert cells((await run("session", "list")).stdout)[0]["ID"] == row["id"]
        await gateway.tenant("acme")
        assert json.loads((await run("session", "list", "--tenant", "acme", "--json")).stdout) == []
        assert (await operator.get("/admin/")).status == 200
        assert (await run("session", "end", row["id"])).stdout == f"ended session {row['id']}\n"
        assert (await operator.get("/admin/")).status == 303


async def test_an_operator_sees_an_adapter_whose_uploads_were_all_rejected(run: Run, gateway: Gateway):
    acme, globex = await gateway.tenant("acme"), await gateway.tenant("globex")
    wrong = {**files(2), "adapter_config.json": b"{}"}
    for tenant, name, upload, status in (
        (acme, "pirate", files(1), 201),
        (acme, "pirate", wrong, 400),
        (acme, "broken", wrong, 400),
        (globex, "other", wrong, 400),
    ):
        assert (await push(tenant, name, upload)).status == status
    rows = cells((await run("adapter", "list", "--tenant", "acme")).stdout)
    assert [(row["NAME"], row["VERSION"], row["STATE"]) for row in rows] == [
        ("broken", "1", "rejected"),
        ("pirate", "1", "ready"),
    ]


async def test_adapters_of_all_tenants_their_use_and_a_prefetch(
    run: Run, gateway: Gateway, upstream: Upstream, tmp_path: Path
):
    acme = await gateway.tenant("acme")
    await gateway.tenant("globex")
    for seed, (tenant, name) in enumerate((("acme", "pirate"), ("globex", "brief"))):
        await run("adapter", "push", name, str(write(tmp_path / name, tensors(seed=seed))), "--tenant", tenant)
    rows = cells((await run("adapter", "list")).stdout)
    listed = sorted((row["TENANT"], row["NAME"], row["NEWEST_STATE"]) for row in rows)
    assert listed == [("acme", "pirate", "ready"), ("globex", "brief", "ready")]
    assert len(json.loads((await run("adapter", "list", "--json", "--api-key", acme.key or "")).stdout)) == 1
    await change_database(tmp_path, "UPDATE adapters SET created_at = datetime('now', '-8 days') WHERE name = 'brief'")
    idle = cells((await run("adapter", "list", "--idle", "7d")).stdout)
    assert [row["NAME"] for row in idle] == ["brief"]
    assert (await acme.chat(model="pirate", user="ann")).status == 200

    async def is_used() -> bool:
        used = json.loads((await run("adapter", "use", "pirate", "--tenant", "acme", "--json")).stdout)
        return bool(used["users"])

    await until(is_used)
    used = cells((await run("adapter", "use", "pirate", "--api-key", acme.key or "")).stdout)
    assert [row["KIND"] for row in used] == ["key", "end_user", "version"]
    where = ("--tenant", "acme", "--engine", upstream.url)
    done = await run("adapter", "prefetch", "pirate@1", *where)
    assert done.stdout == f"pirate@1 is in the host memory of {upstream.url}\n"
    assert "no version of this number" in (await run("adapter", "prefetch", "pirate@2", *where, code=1)).stderr


async def test_a_tenants_limits_with_what_is_left(run: Run, gateway: Gateway):
    # The first of two requests is regained after half a minute, which is longer than the test.
    acme = await gateway.tenant("acme", requests_per_minute=2, max_concurrent=3, budget_per_month=5_000_000)
    assert (await acme.chat()).status == 200
    left = json.loads((await run("tenant", "show", "acme", "--json")).stdout)["left"]
    assert (left["requests_per_minute"]["limit"], left["requests_per_minute"]["remaining"]) == (2, 1)
    budget = left["budget_per_month"]
    assert (budget["limit"], budget["remaining"], budget["currency"]) == ("5.00", "5.00", "USD")
    table = (await run("tenant", "show", "acme")).stdout.split("\n\n")[1]
    rows = {row["LIMIT"]: row for row in cells(table)}
    assert (rows["max_concurrent"]["ALLOWED"], rows["max_concurrent"]["LEFT"]) == ("3", "3")
    models = cells((await run("tenant", "models", "acme")).stdout)
    assert models == [{"ID": "base", "KIND": "base", "MEANS": "-"}]


async def test_a_search_finds_names_keys_and_requests(run: Run, gateway: Gateway):
    acme = await gateway.tenant("acme")
    await gateway.tenant("acme-test")
    rows = cells((await run("search", "cme")).stdout)
    assert [(row["KIND"], row["NAME"]) for row in rows] == [("tenant", "acme"), ("tenant", "acme-test")]
    key_id = (acme.key or "").split("_")[1]
    # The gateway would find it by the whole key too; only its id is sent.
    found = json.loads((await run("search", acme.key or "", "--json")).stdout)
    assert [(key["id"], key["tenant"]) for key in found["keys"]] == [(key_id, "acme")]
    assert (await run("search", "req_abc")).stdout.splitlines()[1].split() == ["request", "-", "-", "req_abc"]
    assert (await run("search", "nobody")).stderr == "nothing matches\n"
    assert (await run("search", " ", code=1)).stderr.startswith("Error: q: is required")


async def test_the_state_of_the_service(run: Run, gateway: Gateway):
    await refuse(gateway)
    levels = (await run("attention")).stdout
    assert "refused 1 request of acme in the last hour" in levels
    activity = cells((await run("activity", "--by", "tenant")).stdout)
    assert activity[0]["NAME"] == "acme"
    assert {row["NAME"]: row["REQUESTS"] for row in activity} | {"TOTAL": "1", "PERIOD_BEFORE": "0"} == {
        row["NAME"]: row["REQUESTS"] for row in activity
    }
    settings = (await run("settings", "--changed")).stdout
    assert "set, not shown" in settings
    assert gateway.admin.key not in settings
    assert "\nversion " in settings
    below = settings.split("\n\n")[1].splitlines()
    assert {line.partition("  ")[0] for line in below} >= {"version", "disk adapter_store", "keeps sums by minute"}
    assert len({len(line) - len(line.partition("  ")[2].lstrip()) for line in below}) == 1
    assert len((await run("settings")).stdout) > len(settings)


async def test_shares_places_and_histories(
    run: Run, gateway: Gateway, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fairness, "SAMPLE_SECONDS", 0.1)
    acme = await gateway.tenant("acme", weight=2)

    async def has_share() -> bool:
        assert (await acme.chat()).status == 200
        jain, _, *table = (await run("fairness")).stdout.splitlines()
        assert jain.startswith("Jain's index: none")
        rows = [(row["TENANT"], row["WEIGHT"], row["ON_ENGINES"]) for row in cells("\n".join(table))]
        return rows == [("acme", "2.0", "0")]

    await until(has_share)
    upstream.resident = [f"sha256:{'d' * 64}"]

    assert (await run("residency", "--search", "pirate")).stdout == "no engine holds an adapter that matches 'pirate'\n"

    async def is_resident() -> bool:
        rows = cells((await run("residency")).stdout)
        return [(row["ENGINE"], row["PLACE"]) for row in rows] == [(upstream.url, "device")]

    await until(is_resident)

    async def has_history(*url: str) -> Any:
        return json.loads((await run("engine", "history", *url, "--last", "1", "--json")).stdout)["samples"]

    await until(lambda: has_history(upstream.url))
    table = (await run("engine", "history", upstream.url)).stdout
    assert cells(table.split("\n\n")[0])[0]["RUNNING"] == "0"
    assert "CHANGED_AT" in table
    assert cells((await run("engine", "history")).stdout)[0]["ON_ENGINES"] == "0"


async def test_a_webhook_shows_its_last_delivery(run: Run):
    await run("webhook", "set", "pager", "https://alerts.example.com/secret-path", "--types", "engine.down")
    shown = (await run("webhook", "show", "pager")).stdout
    assert "types:         engine.down" in shown
    assert "secret-path" not in shown
