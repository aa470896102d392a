"""Pages of alerts and settings, in a real gateway."""

import csv
import re
from collections.abc import AsyncIterator
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape
from sqlalchemy import insert

from gateway.alerts.signing import signed_headers
from gateway.api.shown_settings import SET, shown_settings
from gateway.records.sql.database import Database
from gateway.records.sql.schema_version import migrations
from gateway.records.sql.tables import usage_rejected
from gateway.settings import Settings
from testing.gateway.running import ADMIN_KEY, PEPPER, Answer, Browser, Gateway, until
from testing.gateway.webhooks import Target, webhook_target
from tests.gateway.pages.records import HOSTILE, unsafe

SECRET = r"whsec_[A-Za-z0-9+/=]{44}"


@pytest.fixture
async def target(starts_servers: None) -> AsyncIterator[Target]:
    async with webhook_target(HOSTILE) as target:
        yield target


@pytest.fixture
async def gateway(serve: Any) -> AsyncIterator[Gateway]:
    async with serve(webhook_http_hosts=("127.0.0.1",)) as gateway:
        yield gateway


@pytest.fixture
async def browser(gateway: Gateway) -> AsyncIterator[Browser]:
    async with gateway.browser() as browser:
        yield browser


def text(answer: Answer, status: int = 200) -> str:
    assert answer.status == status, answer.body
    page = answer.body.decode()
    assert not unsafe(page)
    return page


async def role(gateway: Gateway, name: str) -> str:
    return (await gateway.admin.post("/admin/api/keys", {"role": name, "label": name})).json["key"]


async def test_a_target_from_its_form_to_its_end(gateway: Gateway, browser: Browser, target: Target):
    assert "No target is set up" in text(await browser.get("/admin/alerts"))
    assert "There are no targets yet" in text(await browser.get("/admin/alerts?tab=targets"))
    assert 'name="url"' in text(await browser.get("/admin/alerts/-/new"))
    for given, place in (
        ({"name": "pager", "url": "http://elsewhere.example"}, "url"),
        ({"name": "pager", "url": "ops@example.com"}, "url"),
        ({"name": HOSTILE, "url": target.url}, "name"),
        ({"name": "pager", "url": target.url, "tenant": "nobody"}, "tenant"),
        ({"name": "pager", "url": target.url, "types": "no.such"}, "types"),
    ):
        page = text(await browser.submit("/admin/alerts/-/new", **given), 400)
        assert f'id="e-{place}"' in page or place == "types", given
    made = await browser.submit("/admin/alerts/-/new", name="pager", url=target.url)
    secret = re.findall(SECRET, text(made))[0]
    assert made.headers["Cache-Control"] == "no-store"
    again = text(await browser.submit("/admin/alerts/-/new", name="pager", url=target.url), 400)
    assert "Another target has this name" in again

    for path in ("?tab=targets", "/pager", "/pager/edit", "/pager/delete"):
        page = text(await browser.get(f"/admin/alerts{path}"))
        assert "127.0.0.1" in page, path
        assert "secret-" not in page, path
        assert secret not in page, path

    assert "took the test event" in text(await browser.submit("/admin/alerts/pager/test"))
    headers, body = target.received[0]
    signed = signed_headers([secret], headers["webhook-id"], int(headers["webhook-timestamp"]), body)
    assert headers["webhook-signature"] == signed["webhook-signature"]
    target.status = 500
    assert "The test failed: the target answered 500." in text(await browser.submit("/admin/alerts/pager/test"))

    # An empty address stays as it is.
    changed = await browser.submit("/admin/alerts/pager/edit", types="tenant.suspended", url="")
    assert changed.headers["Location"] == "/admin/alerts/pager?done=saved"
    await gateway.tenant("acme")
    await gateway.admin.call("PATCH", "/admin/api/tenants/acme", json={"suspended": True})

    async def fails() -> bool:
        return "the target answered 500" in text(await browser.get("/admin/alerts?tab=targets&state=failing"))

    await until(fails)
    assert "1 of 1 targets fails" in re.sub(r"\s+", " ", text(await browser.get("/admin/alerts")))
    assert "No target matches" in text(await browser.get("/admin/alerts?tab=targets&state=works"))
    target.status = 204
    # A saved target is tried again at once.
    await browser.submit("/admin/alerts/pager/edit", url="")

    async def works() -> bool:
        return 'href="/admin/alerts/pager"' in text(await browser.get("/admin/alerts?tab=targets&state=works"))

    await until(works)
    rows = list(csv.DictReader(text(await browser.get("/admin/alerts?tab=targets&format=csv")).splitlines()))
    assert (rows[0]["name"], rows[0]["state"], rows[0]["waiting"], rows[0]["failures"]) == ("pager", "works", "0", "0")
    assert "secret-" not in str(rows)

    assert "Type pager to confirm" in text(await browser.submit("/admin/alerts/pager/delete", typed="page"), 400)
    assert (await browser.submit("/admin/alerts/pager/delete", typed="pager")).status == 303
    assert (await browser.get("/admin/alerts/pager")).status == 404
    assert (await gateway.admin.get("/admin/api/webhooks")).json["data"] == []


async def test_events_by_filter_and_as_csv(gateway: Gateway, browser: Browser):
    assert "Nothing has happened yet" in text(await browser.get("/admin/alerts"))
    for name in ("acme", "globex"):
        await gateway.tenant(name)
        for suspended in (True, False) * 30 if name == "acme" else (True,):
            await gateway.admin.call("PATCH", f"/admin/api/tenants/{name}", json={"suspended": suspended})
    page = text(await browser.get("/admin/alerts"))
    assert "acme is suspended" in page
    assert "no target" in page
    for query, found in (
        ("type=tenant.suspended", True),
        ("type=engine.down", False),
        ("tenant=acme", True),
        ("tenant=nobody", False),
        ("since=2999-01-01T00:00", False),
        ("until=2999-01-01T00:00", True),
    ):
        assert ("acme is suspended" in text(await browser.get(f"/admin/alerts?{query}"))) is found, query
    assert "globex is suspended" not in text(await browser.get("/admin/alerts?tenant=acme"))
    for query in ("type=nothing", "since=yesterday", "after=nothing", "tab=nothing", f"tenant={'x' * 257}"):
        assert (await browser.get(f"/admin/alerts?{query}")).status == 400, query
    rows = list(csv.DictReader(text(await browser.get("/admin/alerts?tenant=acme&format=csv")).splitlines()))
    # A tenant has at most 20 events of a type in an hour.
    assert len(rows) == 20
    assert {row["title"] for row in rows} == {"acme is suspended"}


async def test_thresholds_of_tenants(gateway: Gateway, browser: Browser):
    await gateway.tenant("plain")
    await gateway.tenant("default", budget_per_month=10_000_000)
    await gateway.tenant("own", budget_per_day=1_500_000, budget_per_week=7_000_000, budget_warn_at=[0.5])
    rows = list(csv.DictReader(text(await browser.get("/admin/alerts?tab=thresholds&format=csv")).splitlines()))
    values = [(row["name"], row["budget_per_day"], row["budget_per_month"], row["warn_at"]) for row in rows]
    assert values == [("default", "", "10.00", "80 %, 100 %"), ("own", "1.50", "", "50 %")]
    page = text(await browser.get("/admin/alerts?tab=thresholds&own=true"))
    assert "/admin/tenants/own" in page
    assert "/admin/tenants/default" not in page
    assert "/admin/tenants/own" not in text(await browser.get("/admin/alerts?tab=thresholds&q=def"))


def secrets_of(settings: Settings) -> dict[str, str]:
    values = {field.name: getattr(settings, field.name) for field in fields(Settings) if not field.repr}
    return {name: value for name, value in values.items() if value is not None}


async def test_no_secret_is_shown(serve: Any):
    given = {"smtp_url": "smtp://mailer:mail-password-1@mail.example:587"}
    given |= {"import_hub": "https://someone:hub-password-1@hub.example/?key=hub-key-1"}
    given |= {"announce_token": "announce-5f0c9a1e7b3d4826", "oidc_client_secret": "client-secret-83a1b2c3"}
    async with serve(**given) as other, other.browser() as browser:
        pages = [f"/admin/settings?tab={tab}" for tab in ("state", "settings", "migrations", "keys", "sessions")]
        found = "".join([text(await browser.get(page)) for page in pages])
        found += text(await browser.get("/admin/settings?tab=settings&q=smtp"))
        found += text(await browser.get("/admin/settings?tab=settings&changed=true"))
        found += text(await browser.get("/admin/settings?tab=settings&format=csv"))
        answer = await other.admin.get("/admin/api/settings")
        found += answer.body.decode()
        values = {row["name"]: row for row in answer.json["settings"]}
    assert SET in found
    secrets = [ADMIN_KEY, PEPPER, *given.values(), "mail-password-1", "hub-password-1", "hub-key-1"]
    for secret in secrets:
        assert secret not in found
    assert values["LORAPLEX_SMTP_URL"] == {
        "name": "LORAPLEX_SMTP_URL", "value": SET, "default": "not set", "is_set": True, "is_secret": True,
    }  # fmt: skip
    assert values["LORAPLEX_IMPORT_HUB"]["value"] == "https://...@hub.example/?..."
    assert {name for name, row in values.items() if row["is_secret"]} == {
        f"LORAPLEX_{field.name.upper()}" for field in fields(Settings) if not field.repr
    }


def test_every_secret_of_the_settings_is_masked(tmp_path: Any, model_dir: Any):
    given = {
        "database_url": "postgresql://app:database-secret-1@db/loraplex",
        "redis_url": "redis://:redis-secret-1@cache:6379",
        "engines": "announced",
        "internal_token": "internal-5f0c9a1e7b3d4826",
        "key_pepper": PEPPER,
        "admin_key": ADMIN_KEY,
        "adapter_store": str(tmp_path),
        "model_dir": model_dir,
        "base_model": "base",
        "import_hub": "https://app:p@secret-1@hub.example",
    }
    settings = Settings.load({}, **given)
    shown = str(shown_settings(settings))
    assert len(secrets_of(settings)) >= 5
    for name, value in secrets_of(settings).items():
        assert value not in shown, name
    assert "secret-1" not in shown


async def test_the_state_of_the_gateway(gateway: Gateway, browser: Browser):
    answer = (await gateway.admin.get("/admin/api/settings")).json
    assert answer["revision"] == answer["expected_revision"] == migrations()[0].revision
    assert len(answer["migrations"]) == len(migrations())
    assert 0 < answer["database"]["latency"] < 2
    assert 0 < answer["redis"]["latency"] < 2
    assert answer["database"]["num_bytes"] > 10_000
    assert answer["stored"] == {"versions": 0, "contents": 0, "num_bytes": 0}
    assert answer["retention"]["usage rows"] is None
    assert answer["retention"]["events"] == 90 * 86_400
    assert set(answer["disks"]) == {"adapter_store", "journal"}
    assert answer["version"] in text(await browser.get("/admin/settings"))
    assert "The schema is up to date" in text(await browser.get("/admin/settings?tab=migrations"))
    assert "LORAPLEX_BASE_MODEL" in text(await browser.get("/admin/settings?tab=settings&q=base_m"))
    assert "No setting matches" in text(await browser.get("/admin/settings?tab=settings&q=zzz"))
    assert (await browser.get("/admin/settings?tab=nothing")).status == 400


async def test_a_session_is_ended(gateway: Gateway, browser: Browser):
    key = (await gateway.admin.post("/admin/api/keys", {"role": "viewer", "label": HOSTILE})).json["key"]
    acme = await gateway.tenant("acme")
    async with gateway.browser(key) as viewer, gateway.browser(acme.key, "/console"):
        page = text(await browser.get("/admin/settings?tab=sessions"))
        assert "this session" in page
        assert "acme" in page
        assert "acme" not in text(await browser.get("/admin/settings?tab=sessions&q=alert"))
        assert "alert(1)" not in text(await browser.get("/admin/settings?tab=sessions&tenant=acme"))
        assert HOSTILE in next(
            row["label"] for row in csv.DictReader(
                text_of_csv(await browser.get("/admin/settings?tab=sessions&format=csv")).splitlines()
            ) if row["role"] == "viewer"
        )  # fmt: skip
        [session] = [
            row for row in (await gateway.admin.get("/admin/api/sessions")).json["data"] if row["role"] == "viewer"
        ]
        assert (await viewer.get("/admin/settings")).status == 200
        asked = text(await browser.get(f"/admin/settings/sessions/{session['id']}/end"))
        assert "End the session" in asked
        for typed in ("", "viewer"):
            refused = await browser.submit(f"/admin/settings/sessions/{session['id']}/end", typed=typed)
            assert f"Type {escape(HOSTILE)} to confirm." in text(refused, 400)
        assert (await viewer.get("/admin/settings")).status == 200
        ended = await browser.submit(f"/admin/settings/sessions/{session['id']}/end", typed=HOSTILE)
        assert ended.headers["Location"] == "/admin/settings?tab=sessions&done=ended"
        assert (await viewer.get("/admin/settings")).status == 303
    assert (await browser.submit("/admin/settings/sessions/0123456789abcdef/end")).status == 404
    assert "alert(1)" in text(await browser.get("/admin/settings?tab=keys"))


async def test_rejected_usage_is_listed_without_running_its_texts(gateway: Gateway, tmp_path: Path):
    database = Database(f"sqlite:///{tmp_path}/gateway.db")
    event = {"id": "0" * 64, "event": f'{{"tenant": "{HOSTILE}"', "reason": f"not a row {HOSTILE}"}
    async with database.write() as connection:
        await connection.execute(insert(usage_rejected).values(**event, rejected_at=datetime.now(UTC)))
    await database.close()
    async with gateway.browser() as browser:
        page = text(await browser.get("/admin/settings?tab=rejected"))
        assert "not a row" in page
        assert HOSTILE not in page
        [row] = csv.DictReader(text_of_csv(await browser.get("/admin/settings?tab=rejected&format=csv")).splitlines())
        assert row["reason"] == f"not a row {HOSTILE}"


REFERENCE = Path("docs/reference.md").read_text()


async def test_the_reference_names_every_tab(gateway: Gateway):
    """The tab of rejected usage was missing."""
    async with gateway.browser() as browser:
        for path in ("settings", "alerts"):
            tabs = set(re.findall(rf"/admin/{path}\?tab=(\w+)", text(await browser.get(f"/admin/{path}"))))
            [row] = re.findall(rf"^\| `GET /admin/{path}` .*$", REFERENCE, re.MULTILINE)
            assert len(tabs) >= 3
            assert {tab for tab in tabs if f"`{tab}`" not in row and f"tab={tab}`" not in row} == set()


def text_of_csv(answer: Answer) -> str:
    assert answer.status == 200
    return answer.body.decode()


async def test_viewers_read_and_tenants_see_nothing(gateway: Gateway, target: Target):
    await gateway.admin.call("PUT", "/admin/api/webhooks/pager", json={"url": target.url})
    acme = await gateway.tenant("acme", budget_per_month=1_000_000)
    pages = [f"alerts?tab={tab}" for tab in ("events", "targets", "thresholds")] + ["alerts/pager"]
    pages += [f"settings?tab={tab}" for tab in ("state", "settings", "migrations", "keys", "sessions", "rejected")]
    viewer_key = await role(gateway, "viewer")
    async with gateway.browser(viewer_key) as viewer, gateway.browser(await role(gateway, "billing")) as billing:
        for page in pages:
            main = text(await viewer.get(f"/admin/{page}")).split("<main")[1]
            assert 'method="post"' not in main, page
            assert not re.search(r"/(edit|delete|new|test|revoke|rotate|budget|end)\"", main), page
        for path in ("alerts/-/new", "alerts/pager/edit", "alerts/pager/test", "alerts/pager/delete",
                     "settings/sessions/0123456789abcdef/end"):  # fmt: skip
            for person in (viewer, billing):
                assert (await person.submit(f"/admin/{path}", typed="pager", name="x", url="")).status == 403, path
    assert target.received == []
    assert (await gateway.client(viewer_key).get("/admin/api/settings")).status == 200
    assert (await acme.get("/admin/api/settings")).status == 403
    async with gateway.browser(acme.key, "/console") as tenant:
        for page in pages:
            answer = await tenant.get(f"/admin/{page}")
            assert (answer.status, answer.headers["Location"].split("?")[0]) == (303, "/admin/login"), page
    async with gateway.browser() as operator:
        forged = await operator.call("POST", "/admin/alerts/pager/delete", data={"typed": "pager"})
        assert (forged.status, forged.error["code"]) == (403, "csrf_mismatch")
