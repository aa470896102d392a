"""Overview: numbers that a person can read, and what needs attention, in a real gateway."""

import html
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import update

from gateway.api.health import State
from gateway.fleet.engines.health import Health as EngineHealth
from gateway.pages.frame.strip import TITLES
from gateway.pages.overview import attention
from gateway.records.attention import Budget, Concerns, FailingTarget, More, RejectedVersion
from gateway.records.events.deaths import EngineDeaths
from gateway.records.events.tables import webhooks
from gateway.records.keys.expiring import ExpiringKey
from gateway.records.requests.refusal_report import Refused
from gateway.records.sql.database import Database
from testing.gateway.running import Browser, Gateway, change_database, until
from tests.gateway.api.adapters.test_adapters import CONFIG, files, push
from tests.gateway.pages.conftest import SINCE, World

API = "/admin/api/attention"


async def words(browser: Browser, path: str = "/admin/") -> str:
    """Return the text of the page, with single spaces."""
    answer = await browser.get(path)
    assert answer.status == 200, answer.body
    text = html.unescape(re.sub(r"<[^>]*>", " ", answer.body.decode().split("<main")[1]))
    return " ".join(text.split())


async def test_a_few_requests_are_a_number_and_many_are_a_rate_too(gateway: Gateway):
    acme = await gateway.tenant("acme")
    since = datetime.now(UTC) - timedelta(seconds=1)
    for _ in range(30):
        assert (await acme.complete()).status == 200
    async with gateway.browser() as browser:

        async def are_counted() -> bool:
            return "Requests 30 Tokens in" in re.sub(
                r" [^ ]+ %[^%]*? than the period before| –", "", await words(browser)
            )

        await until(are_counted)
        # The period is of whole minutes, two at most.
        assert re.search(r"Requests 30 · 0\.(25|5) per s ", await words(browser, f"/admin/?since={since:%FT%T}"))
        text = await words(browser)
        assert re.search(r"Tokens in [1-9]\d* .*Cached \d+ .*Tokens out [1-9]\d* ", text), text


class Away:
    """Ledger with rows that wait, and rows that the database refused."""

    waiting, rejected = 2000, 3


class Records:
    """Reader of one record of each kind."""

    async def read(self) -> Concerns:
        at = datetime(2026, 11, 1, tzinfo=UTC)
        keys = [ExpiringKey("k1", "ci", at, "t1", "acme", more=3), ExpiringKey("k2", "ops", at, None, None)]
        return Concerns(
            budgets=[Budget("acme", 9, 10, "month")],
            keys=keys,
            rejected=[RejectedVersion("acme", "pirate", 2, at)],
            refused=[Refused("requests_per_minute", 3, ["acme"])],
            targets=[FailingTarget("pager", None, 5, "answered 500")],
            deaths=[EngineDeaths("http://gone:1", 3, at)],
            more=More(budgets=1, keys=2, rejected=3, refused=4, targets=1000, deaths=5),
        )


async def test_every_entry_links_to_a_page_that_helps(world: World, gateway: Gateway):
    world.states = {name: State("away", SINCE) for name in (*TITLES, "unheard_of")}
    for i in range(attention.MAX_ENGINES + 2):
        world.engine(f"http://e{i}").condition.health = EngineHealth.DOWN
    world.queues.waiting, world.queues.longest_wait = 9, 60.0
    needs = attention.Needs(Records(), Away(), str)  # type: ignore[arg-type]
    entries = await needs.entries(world.strip.read())
    # Parts; engines and their others; queue, two of the ledger, death, budget, limit, two keys, version, target; six.
    assert len(entries) == len(TITLES) + 1 + attention.MAX_ENGINES + 1 + 10 + 6
    assert [entry.text for entry in entries if "more " in entry.text and "this tenant" not in entry.text] == [
        "2 more engines cannot be used, or not fully.",
        "1 more tenant spent at least 80 % of a budget.",
        "4 more limits refused requests in the last hour.",
        "Keys of 2 more owners expire in the next 7 days.",
        "3 more tenants had uploads rejected in the last day.",
        "5 more engines died in the last hour.",
        "Events do not reach 1,000 more targets.",
    ]
    async with gateway.browser() as browser:
        await gateway.tenant("acme")
        await gateway.admin.call("PUT", "/admin/api/webhooks/pager", json={"url": "https://pager.example/in"})
        for entry in entries:
            assert entry.act is not None, entry
            title, url = entry.act
            assert title
            status = (await browser.get(url)).status
            assert status == (404 if "/engines/one" in url else 200), url
    assert [entry.text for entry in entries if "expires" in entry.text] == [
        "Key ci of acme expires on 2026-11-01 00:00 UTC, and 3 more of this tenant in the next 7 days.",
        "Key ops of an operator expires on 2026-11-01 00:00 UTC.",
    ]
    [budget] = [entry.act[1] for entry in entries if "acme spent" in entry.text]
    assert budget == "/admin/tenants/acme/budget"
    seen = await needs.entries(world.strip.read(), may_bill=False)
    assert [entry.act[1] for entry in seen if "acme spent" in entry.text] == ["/admin/tenants/acme?tab=limits"]


async def test_refusals_of_the_last_hour_need_attention(gateway: Gateway, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention, "FRESH_SECONDS", 0.0)
    acme, globex = [await gateway.tenant(name, requests_per_minute=1) for name in ("acme", "globex")]
    async with gateway.browser() as browser:
        assert "no tenant's limit refused a request in the last hour" in await words(browser)
        assert (await gateway.client("lpx_0000000000000000_").complete()).status == 401
        assert [(await acme.complete()).status for _ in range(3)] == [200, 429, 429]
        assert [(await globex.complete()).status for _ in range(2)] == [200, 429]
        text = "The limit requests per minute refused 3 requests of acme, globex in the last hour."

        async def is_listed() -> bool:
            return text in await words(browser)

        await until(is_listed)
        assert "Nothing needs your attention" not in await words(browser)
        [entry] = (await gateway.admin.get("/admin/api/attention")).json["data"]
        assert entry["act"] == {"title": "Why 429", "url": "/admin/refusals?period=1h&limit_name=requests_per_minute"}
        assert "3 requests were refused" not in (page := await words(browser, entry["act"]["url"]))
        assert "2 requests were refused by the limit requests per minute" in page


async def test_a_target_that_fails_needs_attention(gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(attention, "FRESH_SECONDS", 0.0)
    await gateway.tenant("acme")
    database = Database(f"sqlite:///{tmp_path}/gateway.db")
    for name, tenant, failures in (("acmes", "acme", 9), ("once", None, 1), ("pager", None, 5)):
        body = {"url": "https://pager.example/secret-path", "tenant": tenant}
        assert (await gateway.admin.call("PUT", f"/admin/api/webhooks/{name}", json=body)).status == 201
        async with database.write() as connection:
            values = {"failures": failures, "error": "the target answered 500"}
            await connection.execute(update(webhooks).where(webhooks.c.name == name).values(**values))
    await database.close()
    answer = await gateway.admin.get("/admin/api/attention")
    assert [(need["text"], need["act"]["url"]) for need in answer.json["data"]] == [
        (
            "Events do not reach the target pager: 5 attempts failed, the last with: the target answered 500.",
            "/admin/alerts/pager",
        ),
        (
            "Events do not reach the target acmes of acme: 9 attempts failed, the last with: the target answered 500.",
            "/admin/alerts/acmes",
        ),
    ]
    assert b"secret-path" not in answer.body


async def test_the_page_says_how_many_it_does_not_list(gateway: Gateway, tmp_path: Path):
    """The list stopped at six of a kind, with neither a number of the others nor a link to them."""
    for number in range(9):
        body = {"url": "https://pager.example/in"}
        assert (await gateway.admin.call("PUT", f"/admin/api/webhooks/pager-{number}", json=body)).status == 201
        name = f"t{number}-{'x' * 61}"
        tenant = await gateway.tenant(name)
        assert (await push(tenant, "wrong", files(1) | {CONFIG: b"{}"})).status == 400
    await change_database(tmp_path, "UPDATE webhooks SET failures = 5, error = 'the target answered 500'")
    async with gateway.browser() as browser:
        text = await words(browser)
        assert text.count("Events do not reach the target pager") == 6
        assert "Events do not reach 3 more targets. Show the targets" in text
        assert "3 more tenants had uploads rejected in the last day. Show the adapters" in text
        # Eight entries are in view, and six more are folded.
        assert "Show 6 more" in text
        needs = {need["text"]: need["act"]["url"] for need in (await gateway.admin.get(API)).json["data"]}
        targets = await words(browser, needs["Events do not reach 3 more targets."])
        assert all(f"pager-{number}" in targets for number in range(9))
        rejected = await words(browser, needs["3 more tenants had uploads rejected in the last day."])
        assert all(f"t{number}-" in rejected for number in range(9))
