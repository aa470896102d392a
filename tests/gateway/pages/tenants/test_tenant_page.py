"""A tenant's page at a glance, its files, and the orders of the list of tenants."""

import csv
import io
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from gateway.billing.writer import UsageWriter
from gateway.fleet.queueing import fairness
from gateway.records.sql.database import Database
from gateway.records.sql.tables import tenants
from gateway.records.tenants.list import Sort, TenantFilter, TenantLists
from gateway.records.tenants.tenants import Tenants
from testing.gateway.rows import row
from testing.gateway.running import Answer, change_database, until
from tests.gateway.api.adapters.test_adapters import files, push


def text(answer: Answer) -> str:
    assert answer.status == 200, answer.body
    return answer.body.decode()


async def test_the_page_shows_the_tenant_at_a_glance(serve: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fairness, "SAMPLE_SECONDS", 0.1)
    async with serve() as gateway, gateway.browser() as browser:
        assert "It has no adapter yet" in text(await _page(gateway, browser, "idle"))
        acme = await gateway.tenant("acme", budget_per_month=1_000_000)
        await gateway.admin.call("PUT", "/admin/api/prices/base", json={"input": 100_000_000, "output": 100_000_000})
        assert (await push(acme, "pirate", files(1))).status == 201
        assert (await acme.complete(max_tokens=4, stream=True)).status == 200
        shown = {
            "share": r"Share, 1 h</span>\s*<span class=\"tile-value\">\d+ %.*?of \d+ % due",
            "wait": r"Wait p95</span>\s*<span class=\"tile-value\">[\d.]+ m?s",
            "first token": r"TTFT p50, 1 h</span>\s*<span class=\"tile-value\">[\d.]+ m?s.*?p95 [\d.]+ m?s",
            "fairness": r'href="/admin/fairness\?q=acme"',
            "budget": r'class="budget">.*? of .*?this month.*?/admin/tenants/acme/budget',
            "chart": r"data-chart=\"[^\"]*base[^\"]*USD",
            "request": r'<a href="/admin/requests/req_\w+">.*?completed',
            "adapter": r'href="/admin/tenants/acme/adapters/pirate">pirate</a>.*?ready',
        }

        async def is_complete() -> bool:
            page = text(await browser.get("/admin/tenants/acme"))
            return all(re.search(pattern, page, re.DOTALL) for pattern in shown.values())

        await until(is_complete)


async def test_only_an_adapter_of_more_than_30_days_is_not_used_for_30_days(serve: Any, tmp_path: Path):
    """An adapter that was pushed a minute ago was shown as not used for 30 days."""
    async with serve() as gateway, gateway.browser() as browser:
        acme = await gateway.tenant("acme")
        for name in ("new", "old"):
            assert (await push(acme, name, files(1))).status == 201
        long_ago = datetime.now(UTC) - timedelta(days=31)
        await change_database(
            tmp_path, "UPDATE adapters SET created_at = ? WHERE name = 'old'", long_ago.strftime("%F %T.%f")
        )
        for path in ("/admin/tenants/acme", "/admin/adapters"):
            rows = text(await browser.get(path)).split("<tr>")
            [old], [new] = ([each for each in rows if f"/adapters/{name}" in each] for name in ("old", "new"))
            assert "not for 30 days" in old
            assert "never used" not in old
            assert re.search(r"never used</span><small[^>]*>created <time[^>]*>(now|\d+ s ago)<", new), new
            assert "Requests to mixtures count for none of their adapters." in new
            assert "not for 30 days" not in new


async def _page(gateway: Any, browser: Any, name: str) -> Answer:
    await gateway.tenant(name)
    return await browser.get(f"/admin/tenants/{name}")


async def test_each_table_has_a_file(serve: Any):
    async with serve() as gateway, gateway.browser() as browser:
        acme = await gateway.tenant("acme", requests_per_minute=100)
        assert (await push(acme, "pirate", files(1))).status == 201
        assert (await acme.complete()).status == 200
        adapter = "/admin/tenants/acme/adapters/pirate"
        expected = {
            "/admin/tenants/acme": ("model", "base"),
            "/admin/tenants/acme?tab=limits": ("title", "Requests per minute"),
            "/admin/tenants/acme?tab=keys": ("tenant", "acme"),
            "/admin/tenants/acme?tab=audit": ("action", "key.create"),
            "/admin/refusals?table=reserved": ("tenant", "acme"),
            adapter: ("version", "1"),
            f"{adapter}?table=aliases": ("targets", "version 1 (100 %)"),
        }
        for path, (column, value) in expected.items():

            async def has_row(path: str = path, column: str = column, value: str = value) -> bool:
                found = csv.DictReader(
                    io.StringIO(text(await browser.get(f"{path}{'&' if '?' in path else '?'}format=csv")))
                )
                return value in [row[column] for row in found]

            await until(has_row)
        assert text(await browser.get("/admin/fairness?table=preemptions&format=csv")) == "tenant,by,number,engine\r\n"
        assert (await browser.get(f"{adapter}?format=csv&table=secrets")).status == 400


async def test_tenants_in_the_order_of_plan_forecast_and_last_use(database: Database):
    """The forecast in SQL orders as the one that is shown."""
    made, now = Tenants(database), datetime.now(UTC)
    ages = {"a": 90, "b": 3, "c": 0.01, "d": 40, "e": 1.5}
    names = {}
    for name, days in ages.items():
        names[(await made.create(name, {}, "admin")).id] = name
        async with database.write() as connection:
            created = {"created_at": now - timedelta(days=days)}
            await connection.execute(update(tenants).where(tenants.c.name == name).values(**created))
    today = now.replace(hour=0, minute=0, second=0, microsecond=0)
    rows = [
        row(f"req_{name}{i}", tenant_id=tenant_id, tenant=name, cost=1000 * (ord(name) - 90) ** 2, created_at=at)
        for tenant_id, name in names.items()
        for i, at in enumerate((today + (now - today) / 2, today - timedelta(hours=5), today - timedelta(days=3)))
        if at >= now - timedelta(days=ages[name]) or not i
    ]
    await UsageWriter(database).write(rows)
    lists = TenantLists(database)

    async def ordered(sort: Sort) -> list[Any]:
        found = await lists.page(TenantFilter(), sort=sort, descending=True)
        assert found.next is None
        return found.rows

    forecasts = [month.forecast for _, month in await ordered("forecast")]
    assert len(set(forecasts)) == 5
    assert forecasts == sorted(forecasts, reverse=True)
    spends = [month.spend for _, month in (await lists.page(TenantFilter(), sort="spend", descending=True)).rows]
    assert len(set(spends)) == 5
    assert spends == sorted(spends, reverse=True)
    async with database.write() as connection:
        await connection.execute(update(tenants).where(tenants.c.name.in_(("a", "d"))).values(plan="pro"))
    assert [tenant.name for tenant, _ in await ordered("plan")][:2] == ["a", "d"]
    assert {tenant.name for tenant, _ in await ordered("last_used_at")} == set(ages)


async def test_a_place_in_the_audit_that_databases_refuse(serve: Any, migrated_url: str):
    async with serve(database_url=migrated_url) as gateway, gateway.browser() as browser:
        await gateway.tenant("acme")
        assert (await browser.get("/admin/tenants/acme?tab=audit&after=%00")).status == 400
