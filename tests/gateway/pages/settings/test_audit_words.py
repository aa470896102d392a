"""The audit page says every change in words: after each kind of change through the API, no Python or JSON is left."""

import csv
import html
import re
from typing import Any

from gateway.pages.widgets.audit_rows import ACTIONS
from gateway.pages.widgets.audit_values import MAX_CHARS
from testing.gateway.running import Browser, Gateway
from testing.gateway.upstream import Upstream
from tests.gateway.api import test_answers as acts
from tests.gateway.api.adapters.test_adapters import files, push

# Text of a Python value or of JSON.
CODE = re.compile(r"[{}\[\]]|\b(None|True|False|null|true|false)\b|\d{4}-\d\d-\d\dT")


async def rows_of(browser: Browser, path: str = "/admin/audit") -> list[list[str]]:
    """Return the texts of the table's cells."""
    answer = await browser.get(path)
    assert answer.status == 200, answer.body
    body = answer.body.decode().split("<main")[1].split("<tbody>")[1].split("</tbody>")[0]
    cells = [re.split(r"<t[hd]\b[^>]*>", row)[1:] for row in body.split("<tr>")[1:]]
    return [[" ".join(html.unescape(re.sub("<[^>]*>", " ", cell)).split()) for cell in row] for row in cells]


async def make_changes(gateway: Gateway, upstream: Upstream) -> None:
    """Make changes of every kind that the audit has, except the removal of usage and playgrounds."""
    await gateway.tenant("acme")
    admin = acts.Operator(gateway)
    await acts.of_tenants(admin)
    await acts.of_keys(admin, gateway)
    await acts.of_adapters(admin, upstream)
    await push(admin, "house", files(3), f"{acts.TENANT}/adapters")
    await acts.of_mixtures(admin)
    await admin.change("PUT", f"{acts.TENANT}/mixtures/both", {"model": "pirate*0.7+house*0.3"})
    await acts.of_the_fleet(admin, upstream.url)
    await acts.of_events(admin, f"{upstream.url}/hook")
    await acts.of_removed_adapters(admin)
    await acts.of_removals(admin)


async def test_each_kind_of_change_is_in_words(serve: Any, upstream: Upstream):
    upstream.probe_status, upstream.host = 200, []
    upstream.version, upstream.base_digest = "1.0", "b" * 64
    async with serve(webhook_http_hosts=("127.0.0.1",)) as gateway, gateway.browser() as browser:
        await make_changes(gateway, upstream)
        file = (await browser.get("/admin/audit?format=csv")).body.decode()
        rows = list(csv.DictReader(file.splitlines()))
        assert {row["action"] for row in rows} >= set(ACTIONS) - {
            *("usage.prune", "playground.request", "tenant.resume", "login.failed", "quarantine.end", "session.close"),
        }
        assert {row["action"] for row in rows} <= set(ACTIONS)
        assert [row for row in rows if CODE.search(row["changes"])] == []
        texts = [(row["action"], row["changes"]) for row in rows]
        assert ("adapter.alias_delete", "Versions: 1 (100 %) -> none") in texts
        assert ("mixture.delete", "Model: pirate*0.7+house*0.3 -> none") in texts
        assert ("key.create", "Label: viewer; Scopes: viewer; Expires: never; Models: all; Limits: none") in texts
        moved = "Versions: 1 (100 %) → 1 (90 %), 2 (10 %, until 2099-01-01 00:00:00 UTC)"
        assert moved in [row[-1] for row in await rows_of(browser, "/admin/audit?action=adapter.alias")]
        page = (await browser.get("/admin/tenants/acme/adapters/house?tab=changes")).body.decode().split("<main")[1]
        assert "State: ready" in page
        assert not CODE.search(re.sub("<[^>]*>", "", page.split("<tbody>")[1].split("</tbody>")[0]))


async def test_a_tenant_fills_no_operators_page(serve: Any):
    """A key for a hundred models of the longest names is a few lines, and markup in a label is text."""
    label = "<img src=x onerror=alert(1)>"
    async with serve() as gateway, gateway.browser() as browser:
        await gateway.tenant("acme")
        body = {"label": label, "allowed_models": [f"{i:02}{'m' * 62}" for i in range(100)], "scopes": ["inference"]}
        made = await gateway.admin.post("/admin/api/tenants/acme/keys?force=true", body)
        assert made.status == 201, made.body
        assert label not in (await browser.get("/admin/audit")).body.decode()
        [changes] = [row[-1] for row in await rows_of(browser, "/admin/audit?action=key.create") if label in row[-1]]
        assert len(changes) < 2 * MAX_CHARS
        assert "… (6,598 characters)" in changes
        file = (await browser.get("/admin/audit?format=csv")).body.decode()
        assert body["allowed_models"][-1] in file
