"""Plans: terms and prices that tenants inherit field by field, everywhere at once."""

import asyncio
import json
from typing import Any

import pytest
from msgspec.structs import replace
from sqlalchemy import update

from gateway.errors import BadRequest, Conflict, NameTaken, RecordNotFound
from gateway.records.adapters.catalog import Model
from gateway.records.audit import Audit
from gateway.records.caches.changes import PRICES, Changes
from gateway.records.money.plans import Plans
from gateway.records.money.prices import FREE, Price, PriceList, Prices
from gateway.records.sql.database import Database
from gateway.records.sql.tables import tenants as table
from gateway.records.tenants.limits import Limits
from gateway.records.tenants.tenants import Tenants
from gateway.records.tenants.terms import NO_TERMS, Terms, resolve, sources
from testing.gateway.bases import only
from testing.gateway.running import Gateway, until


@pytest.fixture
def plans(database: Database) -> Plans:
    return Plans(database)


PRO = Terms(
    tokens_per_minute=60_000,
    tokens_per_day=None,
    weight=2.0,
    max_adapters=5,
    model_limits={"base": Limits(max_concurrent=1), "*": Limits(max_concurrent=2)},
    budget_warn_at=(0.5,),
    soft_budget_per_day=7,
)


def test_a_tenants_own_term_comes_before_its_plans_and_that_before_the_default():
    own = Terms(tokens_per_minute=None, priority=1, model_limits={"base": Limits(max_concurrent=9)})
    values = resolve(PRO, own)
    assert (values["tokens_per_minute"], values["weight"], values["priority"]) == (None, 2.0, 1)
    assert (values["requests_per_minute"], values["max_adapters"]) == (600, 5)
    assert values["model_limits"] == {"base": Limits(max_concurrent=9), "*": Limits(max_concurrent=2)}
    found = sources(PRO, own)
    named = ("tokens_per_minute", "weight", "requests_per_minute")
    assert [found[name] for name in named] == ["tenant", "plan", "default"]


async def test_tenants_follow_their_plan(database: Database, plans: Plans):
    tenants = Tenants(database)
    await plans.put("pro", PRO, {}, "op")
    acme = await tenants.create("acme", {"plan": "pro", "requests_per_minute": 7, "priority": 5}, "op")
    other = await tenants.create("other", {}, "op")
    assert (acme.limits.tokens_per_minute, acme.weight, acme.limits.requests_per_minute) == (60_000, 2.0, 7)
    assert acme.adapter_limits.max_adapters == 5
    assert (acme.budget_warn_at, acme.soft_budgets.soft_budget_per_day) == ((0.5,), 7)
    assert (other.budget_warn_at, other.soft_budgets.soft_budget_per_day) == ((0.8, 1.0), None)

    here = Changes(database, 3600.0)
    await here.read()
    mark = here.mark
    changed = replace(PRO, tokens_per_minute=5, priority=8, weight=4.0, requests_per_minute=1)
    assert (await plans.put("pro", changed, {}, "op")).num_tenants == 1
    await here.read()
    assert [here.holds(mark, scope) for scope in (acme.id, PRICES, other.id)] == [False, False, True]
    acme = await tenants.get("acme")
    assert (acme.limits.tokens_per_minute, acme.weight) == (5, 4.0)
    # Its own terms stay, also the one that is equal to the default.
    assert (acme.limits.requests_per_minute, acme.priority) == (7, 5)
    assert await tenants.get("other") == other

    acme = await tenants.update("acme", {"inherit": ("requests_per_minute",), "tokens_per_minute": None}, "op")
    assert (acme.limits.requests_per_minute, acme.limits.tokens_per_minute, acme.weight) == (1, None, 4.0)
    acme = await tenants.update("acme", {"plan": None}, "op")
    assert (acme.limits.requests_per_minute, acme.limits.tokens_per_minute, acme.weight) == (600, None, 1.0)
    assert (acme.plan, acme.adapter_limits.max_adapters, acme.model_limits) == (None, 1000, {})


async def test_values_that_a_gateway_of_the_previous_release_sets_count_as_the_tenants_own(
    database: Database, plans: Plans
):
    """It knows no plans: it adds rows without own terms, and changes the columns of others."""
    tenants = Tenants(database)
    await plans.put("pro", PRO, {}, "op")
    for name in ("old", "planned"):
        await tenants.create(name, {"plan": "pro"} if name == "planned" else {}, "op")
    async with database.write() as connection:
        of = update(table).where(table.c.name == "old")
        await connection.execute(of.values(own_terms=None, weight=3.0, tokens_per_day=11))
        await connection.execute(update(table).where(table.c.name == "planned").values(max_concurrent=4))
    old = await tenants.update("old", {"plan": "pro"}, "op")
    assert (old.weight, old.limits.tokens_per_day, old.limits.tokens_per_minute) == (3.0, 11, 60_000)
    await plans.put("pro", Terms(max_concurrent=99, tokens_per_minute=1), {}, "op")
    planned = await tenants.get("planned")
    assert (planned.limits.max_concurrent, planned.limits.tokens_per_minute) == (4, 1)


async def test_changes_of_a_plan_and_of_its_tenants_at_once_leave_no_old_value(database: Database, plans: Plans):
    tenants = Tenants(database)
    await plans.put("pro", NO_TERMS, {}, "op")
    names = [f"t{i}" for i in range(6)]
    for name in names:
        await tenants.create(name, {}, "op")

    async def change(i: int) -> None:
        if i % 4 == 0:
            await plans.put("pro", Terms(tokens_per_minute=1000 + i, weight=2.0), {}, "op")
        else:
            name = names[i % len(names)]
            await tenants.update(name, {"plan": "pro", "priority": i % 10} if i % 3 else {"weight": 3.0}, "op")

    await asyncio.gather(*(change(i) for i in range(40)))
    of_plan = (await plans.get("pro")).terms
    for name in names:
        tenant = await tenants.get(name)
        assert tenant.terms() == resolve(of_plan if tenant.plan else NO_TERMS, tenant.own)


async def test_a_plan_with_tenants_stays(database: Database, plans: Plans):
    tenants = Tenants(database)
    await plans.put("pro", PRO, {}, "op")
    for name in ("acme", "globex"):
        await tenants.create(name, {"plan": "pro"}, "op")
    with pytest.raises(Conflict, match="2 tenants have it"):
        await plans.delete("pro", "op")
    await tenants.update("acme", {"plan": None}, "op")
    with pytest.raises(Conflict, match="1 tenant has it"):
        await plans.delete("pro", "op")
    await tenants.delete("globex", "op", ["base"])
    await plans.delete("pro", "op")
    for gone in (plans.get("pro"), plans.delete("pro", "op"), plans.put_prices("pro", {}, "op"), plans.get("N\0")):
        with pytest.raises(RecordNotFound):
            await gone
    for wrong in ({"plan": "pro"}, {"plan": "nul\0"}):
        with pytest.raises(BadRequest) as refused:
            await tenants.update("acme", wrong, "op")
        assert refused.value.param == "plan"


async def test_the_plans_price_comes_between_the_tenants_and_everybodys(database: Database, plans: Plans):
    prices = Prices(database)
    known = PriceList(prices, only())
    base, adapter = Model(name="base", digest=None), Model(name="pirate", digest="a" * 64, names=("pirate",))

    async def found(plan: str | None = "pro") -> list[int]:
        await known.refresh()
        return [known.price("acme", model, plan).output for model in (base, adapter)]

    await prices.put("base", Price(output=1), "op")
    await plans.put("pro", NO_TERMS, {"*": Price(output=2)}, "op")
    assert (await found(), await found(None), await found("gone")) == ([2, 2], [1, 1], [1, 1])
    await plans.put_prices("pro", {"*/*": Price(output=3), "base": FREE}, "op")
    assert await found() == [0, 3]
    await prices.put("acme/*", Price(output=4), "op")
    assert await found() == [0, 4]
    await prices.put("acme/pirate", Price(output=5), "op")
    assert await found() == [0, 5]


async def test_external_ids_are_unique_and_texts_can_be_removed(database: Database):
    tenants = Tenants(database)
    texts = {"display_name": "Acme Inc.", "contact": "ops@acme.test", "note": "late payer", "tags": ("eu", "a")}
    acme = await tenants.create("acme", texts | {"external_id": "cus_1"}, "op")
    assert (acme.display_name, acme.external_id, acme.tags) == ("Acme Inc.", "cus_1", ("a", "eu"))
    with pytest.raises(NameTaken) as refused:
        await tenants.create("other", {"external_id": "cus_1"}, "op")
    assert refused.value.param == "external_id"
    await tenants.create("other", {}, "op")
    with pytest.raises(NameTaken) as refused:
        await tenants.update("other", {"external_id": "cus_1"}, "op")
    assert refused.value.param == "external_id"
    acme = await tenants.update("acme", {"external_id": "", "note": None, "tags": ()}, "op")
    assert (acme.external_id, acme.note, acme.tags, acme.contact) == (None, None, (), "ops@acme.test")


async def test_the_audit_has_earlier_values_and_the_actors_label(database: Database, plans: Plans):
    tenants, audit = Tenants(database), Audit(database)
    await plans.put("pro", PRO, {"*": Price(output=2)}, "op")
    await plans.put("pro", replace(PRO, weight=3.0), {}, "op")
    await tenants.create("acme", {"budget_per_month": 50_000_000}, "op")
    await tenants.update("acme", {"budget_per_month": None, "suspended": True, "plan": "pro"}, "op")
    await tenants.update("acme", {"suspended": True}, "op")
    await tenants.update("acme", {"suspended": False}, "op")
    entries = list(reversed((await audit.list())[0]))
    assert [entry.action for entry in entries] == [
        "plan.put", "plan.put", "tenant.create", "tenant.suspend", "tenant.update", "tenant.update", "tenant.resume",
    ]  # fmt: skip
    assert (entries[0].before, (entries[1].before or {})["weight"], entries[1].detail["weight"]) == (None, 2.0, 3.0)
    assert (entries[1].before or {})["prices"] == {"*": {"input": 0, "cached": 0, "output": 2}}
    assert entries[4].before == {"budget_per_month": 50_000_000, "plan": None}
    assert entries[4].detail == {"budget_per_month": None, "plan": "pro"}


async def plan(gateway: Gateway, name: str, **fields: Any) -> Any:
    return await gateway.admin.call("PUT", f"/admin/api/plans/{name}", json=fields)


async def test_a_plan_limits_and_prices_running_tenants(gateway: Gateway):
    made = await plan(gateway, "tiny", requests_per_minute=1, prices={"*": {"input": 10**6, "output": 10**6}})
    assert (made.status, made.json["requests_per_minute"], made.json["sources"]["weight"]) == (200, 1, "default")
    acme = await gateway.tenant("acme", plan="tiny")
    assert (await acme.chat()).status == 200
    assert (await acme.chat()).status == 429

    async def charged() -> bool:
        return any(float(row["cost"]) > 0 for row in await acme.usage())

    await until(charged)
    assert (await plan(gateway, "tiny", requests_per_minute=None)).json["requests_per_minute"] is None
    assert [(await acme.chat()).status for _ in range(3)] == [200, 200, 200]
    shown = (await gateway.admin.get("/admin/api/tenants/acme")).json
    assert (shown["plan"], shown["requests_per_minute"], shown["sources"]["requests_per_minute"]) == (
        "tiny",
        None,
        "plan",
    )
    refused = await gateway.admin.call("DELETE", "/admin/api/plans/tiny")
    assert (refused.status, refused.error["code"]) == (409, "plan_in_use")
    assert "1 tenant" in refused.error["message"]
    prices = {"prices": {"base": {"input": 1, "output": 1}}}
    changed = await gateway.admin.call("PUT", "/admin/api/plans/tiny/prices", json=prices)
    assert changed.json["prices"] == {"base": {"input": 1, "cached": 1, "output": 1}}
    assert changed.json["requests_per_minute"] is None
    assert len((await gateway.admin.get("/admin/api/plans")).json["data"]) == 1
    for method, path in (
        ("GET", "/admin/api/plans"),
        ("PUT", "/admin/api/plans/own"),
        ("DELETE", "/admin/api/plans/tiny"),
    ):
        assert (await acme.call(method, path, json={})).status == 403


async def test_wrong_fields_are_named(gateway: Gateway):
    for body, param in (
        ({"requests_per_minute": 0}, "requests_per_minute"),
        ({"suspended": True}, "suspended"),
        ({"model_limits": {"pirate": {"max_concurrent": -1}}}, "model_limits.pirate.max_concurrent"),
        ({"prices": {"pirate": {"input": 1, "output": 1}}}, "prices"),
        ({"prices": {"*": {"input": 1}}}, "prices[...].output"),
    ):
        refused = await plan(gateway, "pro", **body)
        assert (refused.status, refused.error["param"]) == (400, param), body
    assert (await plan(gateway, "Bad Name")).error["param"] == "name"
    for body, param in (
        ({"plan": "nope"}, "plan"),
        ({"inherit": ["nope"]}, "inherit[0]"),
        ({"inherit": ["weight"], "weight": 1}, "inherit"),
        ({"tags": ["a,b"]}, "tags[0]"),
        ({"tags": ["<b>"]}, "tags[0]"),
        ({"note": "a\nb"}, "note"),
        ({"contact": "x" * 201}, "contact"),
    ):
        refused = await gateway.admin.post("/admin/api/tenants", {"name": "acme"} | body)
        assert (refused.status, refused.error["param"]) == (400, param), (body, json.loads(refused.body))
