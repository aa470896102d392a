"""The tenant's console: each page for a tenant's admin and for members, by what their keys may do."""

import csv
import io
import json
import re
from datetime import UTC, datetime, timedelta
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from gateway.billing.writer import UsageWriter
from gateway.pages.console.help import fill_names, render
from gateway.records.maintenance.retention import Retention
from gateway.records.sql.database import Database
from testing.gateway.rows import row
from testing.gateway.running import Answer, Client, Gateway, until
from tests.gateway.api.adapters.test_adapters import files, push

ROOT = Path(__file__).resolve().parents[4]
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"
PAGES = ("", "requests", "usage", "keys", "audit", "help")


def text(answer: Answer, status: int = 200) -> str:
    assert answer.status == status, answer.body
    return answer.body.decode()


async def key_of(gateway: Gateway, tenant: str, **fields: Any) -> str:
    made = await gateway.admin.post(f"/admin/api/tenants/{tenant}/keys", fields)
    assert made.status == 201, made.body
    return made.json["key"]


async def all_scopes(gateway: Gateway, tenant: str, **fields: Any) -> str:
    return await key_of(gateway, tenant, scopes=["inference", "adapters", "usage", "keys"], label="admin", **fields)


async def settled(client: Client, number: int) -> None:
    """Wait until the ledger has this number of requests."""

    async def written() -> bool:
        return sum(row["requests"] for row in await client.usage()) == number

    await until(written)


async def test_home_shows_spend_limits_and_how_to_call(gateway: Gateway):
    acme = await gateway.tenant("acme", budget_per_month=50_000_000, tokens_per_day=1000, display_name="Acme Ltd")
    await gateway.admin.call("PUT", "/admin/api/prices/base", json={"input": 1_000_000, "output": 1_000_000})
    assert (await push(acme, "pirate", files(1))).status == 201
    for _ in range(2):
        assert (await acme.complete(max_tokens=2)).status == 200
    await settled(acme, 2)
    async with gateway.browser(acme.key, "/console") as browser:
        assert (await browser.get("/console")).headers["Location"] == "/console/"
        page = text(await browser.get("/console/"))
        assert "The service works." in page
        assert re.search(r"Spend this month.*?0\.0000\d+ ", page, re.DOTALL)
        assert re.search(r"Prompt and output tokens per day.*?[1-9]\d* of 1,000", page, re.DOTALL)
        assert re.search(r"Requests today</span>\s*<span class=\"tile-value\">2<", page)
        assert re.search(r"of <span class=\"money\"[^>]*>50\.00", page)
        assert f"{gateway.url}/v1" in page
        assert "model=&#34;pirate&#34;" in page
        # Neither an engine's address nor the log-in key is on the page.
        assert acme.key not in page
        assert "engine" not in page.lower().replace("all engines", "")


async def test_a_member_sees_what_its_scopes_allow(gateway: Gateway):
    await gateway.tenant("acme")
    allowed = {"inference": set(), "usage": {"requests", "usage"}, "keys": {"keys", "audit"}}
    for scope, pages in allowed.items():
        key = await key_of(gateway, "acme", scopes=[scope], label=scope)
        async with gateway.browser(key, "/console") as browser:
            home = text(await browser.get("/console/"))
            for page in PAGES[1:-1]:
                answer = await browser.get(f"/console/{page}", headers={"Accept": "text/html"})
                assert answer.status == (200 if page in pages else 403), (scope, page)
                assert (f'href="/console/{page}"' in home.partition("<main")[0]) is (page in pages)
                if answer.status == 403:
                    needed = "keys" if page in ("keys", "audit") else "usage"
                    assert f"needs the scope &#39;{needed}&#39;" in answer.body.decode()
            assert text(await browser.get("/console/help"))
            assert ("Requests today" in home) is (scope == "usage")


async def test_a_limited_key_sees_its_models_only(gateway: Gateway):
    acme = await gateway.tenant("acme")
    for name in ("pirate", "secret"):
        assert (await push(acme, name, files(1))).status == 201
        assert (await acme.complete(model=name)).status == 200
    await settled(acme, 2)
    key = await all_scopes(gateway, "acme", allowed_models=["pirate"])
    async with gateway.browser(key, "/console") as browser:
        for path in ("", "requests", "usage?by=model", "help", "requests?format=json", "usage?by=model&format=csv"):
            page = text(await browser.get(f"/console/{path}"))
            assert "secret" not in page.replace("secret manager", ""), path
            assert "pirate" in page, path
        assert re.search(r"Requests today</span>\s*<span class=\"tile-value\">1<", text(await browser.get("/console/")))


async def test_the_own_log_has_refusals_and_no_engine(gateway: Gateway):
    acme = await gateway.tenant("acme", requests_per_minute=1)
    done = await acme.complete(user=HOSTILE)
    assert done.status == 200
    refused = await acme.complete()
    assert refused.status == 429
    await settled(acme, 1)
    async with gateway.browser(acme.key, "/console") as browser:

        async def logged() -> bool:
            return "refused 429" in text(await browser.get("/console/requests"))

        await until(logged)
        log = text(await browser.get("/console/requests"))
        ids = re.findall(r'href="/console/requests/(req_\w+)"', log)
        assert len(ids) == 2
        assert "requests per minute" in log
        only = text(await browser.get("/console/requests?status=ok"))
        assert re.findall(r'href="/console/requests/(req_\w+)"', only) == ids[1:]
        one = text(await browser.get(f"/console/requests/{ids[0]}"))
        assert "The limit requests per minute of the tenant is 1." in one
        for page in (log, one, text(await browser.get(f"/console/requests/{ids[1]}"))):
            assert "127.0.0.1:" not in page.replace(gateway.url, "")
            assert "/admin/" not in page
            assert "<img src=x" not in page
        rows = list(csv.DictReader(io.StringIO(text(await browser.get("/console/requests?format=csv")))))
        assert [row["status"] for row in rows] == ["not_admitted", "ok"]
        assert not {"engine", "tenant", "tenant_id"} & set(rows[0])
        for query in ("tenant=globex", "engine=x"):
            assert (await browser.get(f"/console/requests?{query}")).error["param"] == query.partition("=")[0], query
        assert "no request" in text(await browser.get("/console/requests/req_none"), 404)


async def test_usage_by_each_group_and_as_each_file(gateway: Gateway):
    acme = await gateway.tenant("acme")
    await gateway.admin.call("PUT", "/admin/api/prices/base", json={"input": 1_000_000, "output": 1_000_000})
    assert (await acme.complete(max_tokens=2, user="ann")).status == 200
    await settled(acme, 1)
    [cost] = [row["cost"] for row in await acme.usage()]
    groups = {"day": r"20\d\d-\d\d-\d\d", "hour": r"20\d\d-\d\d-\d\d \d\d:00", "month": r"[A-Z][a-z]+ 20\d\d"}
    groups |= {"model": "base", "key": "without a label", "end_user": "ann"}
    async with gateway.browser(acme.key, "/console") as browser:
        for by, shown in groups.items():
            path = f"/console/usage?by={by}"
            page = text(await browser.get(path))
            assert re.search(rf'<th scope="row" class="wrap">{shown}', page), by
            assert all(f"format={form}" in page for form in ("csv", "json", "parquet"))
            [row] = csv.DictReader(io.StringIO(text(await browser.get(f"{path}&format=csv"))))
            assert (row["requests"], row["cost"], row["currency"]) == ("1", cost, "USD")
            [row] = json.loads(text(await browser.get(f"{path}&format=json")))
            assert (row["tenant"], row["requests"], row["cost"], row["currency"]) == ("acme", 1, cost, "USD")
            file = await browser.get(f"{path}&format=parquet")
            assert (file.status, file.body[:4], file.body[-4:]) == (200, b"PAR1", b"PAR1")
        assert "format: expected one of" in text(await browser.get("/console/usage?format=xls"), 400)
        too_long = text(await browser.get("/console/usage?by=end_user&since=2020-01-01"), 400)
        assert "31 days" in too_long
        assert "No requests in this period" in text(await browser.get("/console/usage?period=last_month"))
        assert "by: expected one of" in text(await browser.get("/console/usage?by=engine"), 400)


async def test_usage_is_compared_with_the_period_before(gateway: Gateway, tmp_path: Path):
    acme = await gateway.tenant("acme")
    tenant_id = (await gateway.admin.get("/admin/api/tenants/acme")).json["id"]
    database, now = Database(f"sqlite:///{tmp_path}/gateway.db"), datetime.now(UTC)
    own = {"tenant_id": tenant_id, "prompt_tokens": 10}
    await UsageWriter(database).write(
        [
            row("req_1", created_at=now - timedelta(hours=30), cost=1_000_000, model="old", **own),
            row("req_2", created_at=now - timedelta(hours=2), cost=2_000_000, model="old", **own),
            row("req_3", created_at=now - timedelta(hours=1), cost=1_000_000, model="fresh", **own),
        ]
    )
    await database.close()
    async with gateway.browser(acme.key, "/console") as browser:
        page = text(await browser.get("/console/usage?period=24h&by=model"))
        tiles, table = page.split("</thead>")
        assert re.search(
            r'Cost</span>.*?3\.00.*?</span> 200 %<span class="sr"> more than the period before', tiles, re.S
        )
        assert re.search(r">fresh</th>.*?>new</span>", table.replace("\n", ""))
        assert re.search(r">old</th>.*? 100 %", table.replace("\n", ""))


async def test_end_users_are_ranked_page_by_page(gateway: Gateway, tmp_path: Path):
    acme = await gateway.tenant("acme")
    tenant_id = (await gateway.admin.get("/admin/api/tenants/acme")).json["id"]
    database, now = Database(f"sqlite:///{tmp_path}/gateway.db"), datetime.now(UTC)
    own = {"tenant_id": tenant_id, "created_at": now - timedelta(hours=2)}
    used = [row(f"req_{i}", end_user=f"user-{i:02}", cost=1_000_000 * (i + 1), **own) for i in range(60)]
    # The period begins with the whole of yesterday.
    yesterday = now.replace(hour=0, minute=0, second=0, microsecond=0) - timedelta(days=1)
    before = own | {"created_at": yesterday - timedelta(hours=1)}
    await UsageWriter(database).write([*used, row("req_before", end_user="user-59", cost=30_000_000, **before)])
    await database.close()
    async with gateway.browser(acme.key, "/console") as browser:
        found: list[str] = []
        for number, rows in ((1, 50), (2, 10)):
            page = text(await browser.get(f"/console/usage?period=24h&by=end_user&page={number}"))
            shown = re.findall(r'<th scope="row" class="wrap">(user-\d\d)</th>.*?</tr>', page, re.S)
            assert len(shown) == rows
            found += shown
            assert page.count(">new</span>") == (rows if number == 2 else rows - 1)
            assert ("100 %" in page.split("</thead>")[1]) == (number == 1)
        assert found == [f"user-{i:02}" for i in reversed(range(60))]
        named = text(await browser.get("/console/usage?period=24h&by=end_user&sort=end_user"))
        assert named.index("user-00") < named.index("user-01")


async def test_removed_usage_is_noted_beside_end_users(gateway: Gateway, tmp_path: Path):
    acme = await gateway.tenant("acme")
    own = {"tenant_id": (await gateway.admin.get("/admin/api/tenants/acme")).json["id"], "end_user": "ann"}
    database, now = Database(f"sqlite:///{tmp_path}/gateway.db"), datetime.now(UTC)
    await UsageWriter(database).write(
        [row("a", **own, created_at=now - timedelta(days=9)), row("b", **own, created_at=now)]
    )
    await Retention(database).prune_usage(timedelta(days=7))
    await database.close()
    async with gateway.browser(acme.key, "/console") as browser:
        for by, is_noted in (("end_user", True), ("model", False)):
            page = text(await browser.get(f"/console/usage?period=30d&by={by}"))
            assert ("end users may be missing" in page) == is_noted


@pytest.fixture
async def admin_key(gateway: Gateway) -> str:
    await gateway.tenant("acme")
    return await all_scopes(gateway, "acme")


def shown_key(page: str) -> str:
    [key] = set(re.findall(r"lpx_[0-9a-f]{16}_[0-9a-f]{48}", page))
    return key


async def test_own_keys_are_made_rotated_and_revoked(gateway: Gateway, admin_key: str):
    async with gateway.browser(admin_key, "/console") as browser:
        form = text(await browser.get("/console/keys/new"))
        assert all(f'value="{scope}"' in form for scope in ("inference", "adapters", "usage", "keys"))
        fields = {"label": HOSTILE, "scopes": "inference", "expires": "7"}
        made = text(await browser.submit("/console/keys/new", **fields))
        key = shown_key(made)
        assert "data-copy" in made
        assert (await gateway.client(key).complete()).status == 200
        assert (await gateway.client(key).get("/v1/usage")).status == 403
        listed = text(await browser.get("/console/keys"))
        assert key.split("_")[1] in listed
        assert key.split("_")[2] not in listed
        assert "<img src=x" not in listed
        key_id = key.split("_")[1]
        new = shown_key(text(await browser.submit(f"/console/keys/{key_id}/rotate", grace="0")))
        assert (await gateway.client(key).complete()).status == 401
        assert (await gateway.client(new).complete()).status == 200
        new_id = new.split("_")[1]
        assert (await browser.submit(f"/console/keys/{new_id}/revoke", typed="wrong")).status == 400
        assert (await browser.submit(f"/console/keys/{new_id}/revoke", typed=HOSTILE)).status == 303
        assert (await gateway.client(new).complete()).status == 401
        entries = text(await browser.get("/console/audit?action=key"))
        assert all(action in entries for action in ("key.create", "key.rotate", "key.revoke"))
        assert "<img src=x" not in entries
        assert (await browser.submit("/console/keys/new", scopes="admin", expires="")).status == 400


async def test_a_key_gives_no_more_than_it_has(gateway: Gateway):
    await gateway.tenant("acme")
    stronger = await key_of(gateway, "acme", scopes=["inference", "usage"], label="stronger")
    key = await key_of(gateway, "acme", scopes=["keys", "inference"], allowed_models=["base"])
    async with gateway.browser(key, "/console") as browser:
        assert 'value="usage"' not in text(await browser.get("/console/keys/new"))
        refused = text(await browser.submit("/console/keys/new", scopes="usage", expires=""), 400)
        assert "cannot give" in refused
        rotated = await browser.submit(f"/console/keys/{stronger.split('_')[1]}/rotate", grace="0")
        assert "cannot give" in text(rotated, 400)


async def test_the_audit_hides_what_is_the_operators(gateway: Gateway, admin_key: str):
    changes = {"note": "pays late", "tags": ["risky"], "requests_per_minute": 7}
    assert (await gateway.admin.call("PATCH", "/admin/api/tenants/acme", json=changes)).status == 200
    hook = {"url": "http://127.0.0.1:9/hook", "events": ["budget.reached"], "tenant": "acme"}
    await gateway.admin.call("PUT", "/admin/api/webhooks/internal-hook", json=hook)
    async with gateway.browser(admin_key, "/console") as browser:
        for query in ("", "?format=csv"):
            shown = text(await browser.get(f"/console/audit{query}"))
            assert "Requests per minute" in shown
            assert "tenant.update" in shown
            assert "operator" in shown
            for hidden in ("pays late", "risky", "bootstrap", "internal-hook", "127.0.0.1:9"):
                assert hidden not in shown, hidden


async def test_a_new_tenant_does_not_inherit_the_audit_of_its_name(gateway: Gateway):
    first = await gateway.tenant("acme")
    assert (await push(first, "pirate", files(1))).status == 201
    assert (await gateway.admin.call("DELETE", "/admin/api/tenants/acme")).status == 200
    await gateway.tenant("acme")
    async with gateway.browser(await all_scopes(gateway, "acme"), "/console") as browser:
        for query in ("", "?since=2020-01-01", "?format=csv"):
            shown = text(await browser.get(f"/console/audit{query}"))
            assert "pirate" not in shown
            assert "key.create" in shown


async def test_help_has_the_tenants_names(gateway: Gateway):
    acme = await gateway.tenant("acme")
    async with gateway.browser(acme.key, "/console") as browser:
        assert "pirate" in text(await browser.get("/console/help"))
        assert (await push(acme, "summaries", files(1))).status == 201
        page = text(await browser.get("/console/help"))
        assert "summaries@3" in page
        assert "pirate" not in page
        assert f"{gateway.url}/v1" in page
        assert "api.example.com" not in page


def test_the_help_is_the_page_in_the_documentation():
    source = resources.files("gateway.pages").joinpath("templates/console/using-your-key.md")
    assert Path(str(source)).resolve() == ROOT / "docs/using-your-key.md"
    # The images are built from the copied folders only.
    assert "COPY docs/using-your-key.md docs/using-your-key.md" in (ROOT / "deploy/Dockerfile").read_text()


def test_names_in_the_help_are_escaped():
    html, sections = render("# Title\n\nIntroduction.\n\n## A part\n\n`pirate` at <https://api.example.com/v1>\n")
    assert sections == [("A part", "#a-part")]
    filled = fill_names(html, 'http://"><b>', ["<i>"])
    assert "<i>" not in filled
    assert "<b>" not in filled
    assert "&lt;i&gt;" in filled
    assert "Introduction" not in filled
