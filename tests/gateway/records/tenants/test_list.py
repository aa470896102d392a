"""Lists of tenants and changes of many: filters, order, pages, the month's spend and its forecast."""

import json
import random
from base64 import urlsafe_b64encode
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from sqlalchemy import delete, insert, update

from gateway.billing.writer import UsageWriter
from gateway.errors import BadRequest, Conflict
from gateway.records.activity.tables import ACTIVITY
from gateway.records.audit import Audit
from gateway.records.money.plans import Plans
from gateway.records.sql.database import Database
from gateway.records.sql.tables import api_keys, usage_daily
from gateway.records.sql.tables import tenants as table
from gateway.records.tenants.bulk import AT_ONCE, BulkChange, TenantBulk
from gateway.records.tenants.list import BudgetUse, CursorSort, TenantFilter, TenantLists
from gateway.records.tenants.tenants import Tenants
from gateway.records.tenants.terms import NO_TERMS, Terms
from gateway.records.usage.tenant_sums import TenantSums
from testing.gateway.rows import row
from testing.gateway.running import Gateway

DAY = timedelta(days=1)


async def spend(database: Database, tenant_id: str, day: datetime, cost: int, requests: int = 1) -> None:
    midnight = day.replace(hour=0, minute=0, second=0, microsecond=0)
    sums = dict.fromkeys(("prompt_tokens", "completion_tokens", "cached_tokens"), 0)
    row = {"tenant_id": tenant_id, "day": midnight, "key_id": "k", "model": "base", "tenant": "x"}
    async with database.write() as connection:
        await connection.execute(insert(usage_daily).values(row | sums | {"requests": requests, "cost": cost}))


async def names(lists: TenantLists, criteria: TenantFilter | None = None, **options: Any) -> list[str]:
    page = await lists.page(criteria or TenantFilter(), **options)
    return [tenant.name for tenant, _ in page.rows]


async def test_filters_order_and_pages(database: Database):
    tenants, plans, lists = Tenants(database), Plans(database), TenantLists(database)
    await plans.put("pro", Terms(budget_per_month=100), {}, "op")
    texts = {"display_name": "Ärger 100% GmbH", "external_id": "cus_9", "tags": ("eu", "a_b")}
    made = {
        "acme": await tenants.create("acme", {"plan": "pro"} | texts, "op"),
        "globex": await tenants.create("globex", {"budget_per_30_days": 1000, "tags": ("axb", "europe")}, "op"),
        "hooli": await tenants.create("hooli", {"suspended": True, "plan": "pro"}, "op"),
        "initech": await tenants.create("initech", {}, "op"),
    }
    now = datetime.now(UTC)
    for name, cost in (("acme", 80), ("globex", 500), ("initech", 10_000)):
        await spend(database, made[name].id, now, cost, requests=cost % 7)
    assert await names(lists) == ["acme", "globex", "hooli", "initech"]
    assert await names(lists, sort="spend", descending=True) == ["initech", "globex", "acme", "hooli"]
    nearly = [("acme", BudgetUse("month", 80, 100)), ("globex", BudgetUse("30 days", 500, 1000))]
    assert await lists.over_budget(0.5, 6) == nearly
    for criteria, expected in (
        (TenantFilter(plan="pro"), ["acme", "hooli"]),
        (TenantFilter(plan=""), ["globex", "initech"]),
        (TenantFilter(tag="eu"), ["acme"]),
        (TenantFilter(tag="a_b"), ["acme"]),
        (TenantFilter(suspended=True), ["hooli"]),
        (TenantFilter(suspended=False, plan="pro"), ["acme"]),
        (TenantFilter(over_budget=0.8), ["acme"]),
        (TenantFilter(over_budget=0.5), ["acme", "globex"]),
        (TenantFilter(q="CUS_9"), ["acme"]),
        (TenantFilter(q="100%"), ["acme"]),
        (TenantFilter(q="%"), ["acme"]),
        (TenantFilter(q="i"), ["hooli", "initech"]),
    ):
        assert await names(lists, criteria) == expected, criteria
        assert (await lists.page(criteria, limit=1)).total == len(expected)
    for sort in ("name", "spend", "requests", "created"):
        for descending in (False, True):
            walked, after = [], None
            for _ in range(4):
                page = await lists.page(TenantFilter(), sort=sort, descending=descending, limit=1, after=after)
                walked += [tenant.name for tenant, _ in page.rows]
                after = page.next
            assert after is None
            assert walked == await names(lists, sort=sort, descending=descending)
            assert await names(lists, sort=sort, descending=descending, limit=2, offset=2) == walked[2:]
    page = await lists.page(TenantFilter(), limit=1)
    for wrong in ("x", "!", "", "bnVs"):
        with pytest.raises(BadRequest):
            await lists.page(TenantFilter(), after=wrong)
    with pytest.raises(BadRequest):
        await lists.page(TenantFilter(), sort="spend", after=page.next)
    altered: dict[CursorSort, Any] = {"created": "0001-01-01T00:00:00+23:00", "spend": 2**70, "requests": -(2**70)}
    for sort, value in altered.items():
        cursor = urlsafe_b64encode(json.dumps([sort, False, value, "a"]).encode()).decode().rstrip("=")
        with pytest.raises(BadRequest):
            await lists.page(TenantFilter(), sort=sort, after=cursor)


async def test_idle_tenants_are_those_whose_keys_nobody_uses(database: Database):
    tenants, lists = Tenants(database), TenantLists(database)
    now = datetime.now(UTC)
    for name, age in (("fresh", 1), ("stale", 40), ("never", None)):
        tenant = await tenants.create(name, {}, "op")
        row = {"id": name, "tenant_id": tenant.id, "label": "", "scopes": "usage", "secret_hash": "", "created_at": now}
        async with database.write() as connection:
            used = None if age is None else now - age * DAY
            await connection.execute(insert(api_keys).values(row | {"last_used_at": used}))
    assert await names(lists, TenantFilter(idle_days=30)) == []
    async with database.write() as connection:
        await connection.execute(update(table).values(created_at=now - 31 * DAY))
    await tenants.create("new", {}, "op")
    assert await names(lists, TenantFilter(idle_days=30)) == ["never", "stale"]
    months = [month for _, month in (await lists.page(TenantFilter())).rows]
    assert [month.last_used_at is None for month in months] == [False, True, True, False]


async def test_the_forecast_goes_on_as_the_last_days(database: Database):
    tenants, lists = Tenants(database), TenantLists(database)
    now = datetime(2026, 11, 21, 12, tzinfo=UTC)
    acme = await tenants.create("acme", {}, "op")
    async with database.write() as connection:
        await connection.execute(update(table).values(created_at=now - 300 * DAY))
    acme = await tenants.get("acme")
    for ago in range(25):
        await spend(database, acme.id, now - ago * DAY, 700 if ago > 7 else 70)
    month = (await lists.months([acme], now))[acme.id]
    # 13 days of this month at 700, 8 at 70; 9.5 more days at 70.
    assert (month.spend, month.requests) == (13 * 700 + 8 * 70, 21)
    assert month.forecast == month.spend + round(9.5 * 70)


async def test_the_forecast_of_a_first_day_is_todays_spend_for_each_day(database: Database):
    """Half an hour after midnight it was 744 times the spend."""
    tenants, lists, now = Tenants(database), TenantLists(database), datetime(2026, 12, 1, 0, 30, tzinfo=UTC)
    acme = await tenants.create("acme", {}, "op")
    async with database.write() as connection:
        await connection.execute(update(table).values(created_at=now - timedelta(minutes=30)))
    acme = await tenants.get("acme")
    await spend(database, acme.id, now - timedelta(minutes=5), 100)
    month = (await lists.months([acme], now))[acme.id]
    assert month.forecast == 100 + round(100 * (31 - 0.5 / 24))


async def test_lists_are_the_same_from_the_sums_for_charts(database: Database):
    """The sums for charts are missing after an update until they are rebuilt; the sums by key are read instead."""
    tenants, now = Tenants(database), datetime.now(UTC)
    month = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    made = [
        await tenants.create(f"n{i}", {"budget_per_month": 900, "budget_per_day": 90} if i % 2 else {}, "op")
        for i in range(6)
    ]
    async with database.write() as connection:
        await connection.execute(update(table).values(created_at=now - 300 * DAY))
    chance = random.Random(4)
    used = [
        row(
            f"r{i}",
            tenant_id=owner.id,
            tenant=owner.name,
            model=f"m{i % 3}",
            adapter_digest="d",
            created_at=month - 40 * DAY * chance.random() if i % 2 else month + (now - month) * chance.random(),
            cost=chance.randrange(100),
        )
        for i, owner in enumerate(chance.choices(made[:5], weights=range(1, 6), k=200))
    ]
    await UsageWriter(database).write(used)
    in_month = [each for each in used if each.created_at >= month]
    spent = {tenant.name: sum(each.cost for each in in_month if each.tenant_id == tenant.id) for tenant in made}

    async def everything() -> list[Any]:
        lists = TenantLists(database)
        pages = [
            await lists.page(criteria, sort=sort, descending=True, limit=4)
            for criteria in (TenantFilter(), TenantFilter(over_budget=0.2))
            for sort in ("name", "spend", "requests", "forecast")
        ]
        # Forecasts change with the time of day.
        found = [[(each.name, msgspec.structs.replace(sums, forecast=0)) for each, sums in page.rows] for page in pages]
        shown = [(rows, page.total) for rows, page in zip(found, pages, strict=True)]
        return [*shown, await lists.over_budget(0.1, 6)]

    assert await TenantSums(database).complete()
    fast = await everything()
    assert [(name, sums.spend) for name, sums in fast[1][0]] == sorted(spent.items(), key=lambda each: -each[1])[:4]
    async with database.write() as connection:
        for sums in ACTIVITY.values():
            await connection.execute(delete(sums))
    assert not await TenantSums(database).complete()
    slow = await everything()
    assert fast == slow
    assert len(fast[-1]) == 2


async def test_many_tenants_change_after_their_count_is_confirmed(database: Database):
    tenants, plans, lists = Tenants(database), Plans(database), TenantLists(database)
    bulk, audit = TenantBulk(database, lists), Audit(database)
    await plans.put("pro", Terms(weight=2.0), {}, "op")
    await plans.put("free", NO_TERMS, {}, "op")
    for i in range(AT_ONCE + 5):
        await tenants.create(f"t{i:02}", {"plan": "free", "weight": 5.0, "tags": ("old",)}, "op")
    await tenants.create("other", {}, "op")
    await tenants.update("t00", {"plan": "pro", "tags": (), "inherit": ("weight",)}, "op")
    change = BulkChange(fields={"plan": "pro"}, inherit=("weight",), add_tags=("new",), remove_tags=("old",))
    planned = await bulk.plan(TenantFilter(plan="free"), change)
    assert len(planned) == AT_ONCE + 4
    assert (planned[0].tenant, planned[0].before) == ("t01", {"plan": "free", "tags": ("old",), "weight": 5.0})
    assert planned[0].after == {"plan": "pro", "tags": ("new",), "weight": "inherited"}
    with pytest.raises(Conflict, match=f"{AT_ONCE + 4} tenants would change, not 3"):
        await bulk.apply(TenantFilter(plan="free"), change, 3, "op")
    assert (await tenants.get("t01")).plan == "free"
    changed = await bulk.apply(TenantFilter(plan="free"), change, AT_ONCE + 4, "op")
    assert (len(changed), changed[0]) == (AT_ONCE + 4, "t01")
    tenant = await tenants.get("t54")
    assert (tenant.plan, tenant.weight, tenant.tags) == ("pro", 2.0, ("new",))
    assert (await tenants.get("other")).tags == ()
    entries, _ = await audit.list(action="tenant.update", limit=100)
    assert {entry.target for entry in entries} == {f"t{i:02}" for i in range(AT_ONCE + 5)}
    # A tenant that is as wanted already does not change.
    assert await bulk.plan(TenantFilter(), BulkChange(fields={"suspended": False})) == []


async def test_a_change_of_many_loses_no_other_change_of_the_same_moment(
    database: Database, monkeypatch: pytest.MonkeyPatch
):
    tenants, lists = Tenants(database), TenantLists(database)
    for name in ("acme", "globex", "hooli"):
        await tenants.create(name, {"tags": ("eu",)}, "op")
    read = lists.all

    async def read_then_others_change(criteria: TenantFilter) -> Any:
        found = await read(criteria)
        await tenants.update("acme", {"tags": ("eu", "vip")}, "another")
        await tenants.delete("globex", "another", [])
        await tenants.create("globex", {}, "another")
        return found

    monkeypatch.setattr(lists, "all", read_then_others_change)
    change = BulkChange(add_tags=("new",))
    changed = await TenantBulk(database, lists).apply(TenantFilter(tag="eu"), change, 3, "op")
    assert (await tenants.get("acme")).tags == ("eu", "new", "vip")
    # Another tenant has the name now.
    assert (await tenants.get("globex")).tags == ()
    assert changed == ["acme", "hooli"]


async def test_the_routes(gateway: Gateway):
    acme = await gateway.tenant("acme", tags=["eu"], budget_per_month=10)
    await gateway.tenant("globex")
    answer = (await gateway.admin.get("/admin/api/tenants?limit=1&sort=name")).json
    assert (answer["total"], [row["name"] for row in answer["data"]]) == (2, ["acme"])
    assert answer["data"][0]["month"] | {"last_used_at": None} == {
        "requests": 0, "spend": 0, "forecast": 0, "last_used_at": None,
        "spent": {"day": 0, "week": 0, "month": 0, "30 days": 0},
    }  # fmt: skip
    following = (await gateway.admin.get("/admin/api/tenants", params={"after": answer["next"], "limit": "1"})).json
    assert ([row["name"] for row in following["data"]], following["next"]) == (["globex"], None)
    assert (await gateway.admin.get("/admin/api/tenants?tag=eu&suspended=false")).json["total"] == 1
    for query, param in (
        ("sort=x", "sort"),
        ("order=x", "order"),
        ("suspended=yes", "suspended"),
        ("over_budget=80%25", "over_budget"),
        ("idle_days=0", "idle_days"),
        ("q=%00", "q"),
        ("plan=%00", "plan"),
        ("after=%00", "after"),
        ("limit=1001", "limit"),
        ("nope=1", "nope"),
    ):
        refused = await gateway.admin.get(f"/admin/api/tenants?{query}")
        assert (refused.status, refused.error["param"]) == (400, param), query
    body = {"filter": {"tag": "eu"}, "suspended": True}
    path = "/admin/api/tenants/bulk"
    planned = (await gateway.admin.post(f"{path}?dry_run=true", body)).json
    assert planned["count"] == 1
    assert planned["data"] == [{"tenant": "acme", "before": {"suspended": False}, "after": {"suspended": True}}]
    assert (await acme.chat()).status == 200
    assert (await gateway.admin.post(path, body)).error["param"] == "expect"
    refused = await gateway.admin.post(path, body | {"expect": 2})
    assert (refused.status, refused.error["code"]) == (409, "count_differs")
    assert (await gateway.admin.post(path, body | {"expect": 1})).json["tenants"] == ["acme"]
    assert (await acme.chat()).error["code"] == "tenant_suspended"
    for wrong in (
        {"filter": {}},
        {"filter": {"nope": 1}, "suspended": True},
        {"suspended": True},
        {"filter": {}, "plan": "x", "expect": 2},
    ):
        assert (await gateway.admin.post(path, wrong)).status == 400, wrong
    assert (await acme.post(path, body)).status == 403
    for criteria in ({}, {"tag": "nobody's"}):
        refused = await gateway.admin.post(f"{path}?dry_run=true", {"filter": criteria, "plan": "nope"})
        assert (refused.status, refused.error["code"], refused.error["param"]) == (400, "unknown_plan", "plan")
