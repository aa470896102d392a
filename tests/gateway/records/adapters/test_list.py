"""List of adapters of all tenants on SQLite and PostgreSQL: its columns, filters, sorts, pages, and use."""

import random
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import delete, update

from gateway.billing.writer import UsageWriter
from gateway.records.activity.tables import ACTIVITY
from gateway.records.adapters import list_uses
from gateway.records.adapters.catalog import Catalog
from gateway.records.adapters.list import BY_USE, SORTS, AdapterList, ListFilter, Sort
from gateway.records.adapters.rows import Reason
from gateway.records.sql.database import Database
from gateway.records.sql.tables import adapter_versions
from gateway.records.sql.tables import adapters as adapters_table
from gateway.records.tenants.tenants import Tenant, Tenants
from testing.gateway.rows import row
from testing.gateway.versions import add, digest


@pytest.fixture
async def globex(database: Database) -> Tenant:
    return await Tenants(database).create("globex", {}, "op")


async def names(adapters: AdapterList, criteria: ListFilter | None = None, **options: Any) -> list[str]:
    page = await adapters.page(criteria or ListFilter(), **options)
    return [f"{each.tenant}/{each.name}" for each in page.adapters]


def _by_name(listed: str) -> list[str]:
    return listed.split("/")[::-1]


async def test_each_adapter_has_its_present_and_its_newest_version(
    catalog: Catalog, acme: Tenant, globex: Tenant, database: Database
):
    adapters = AdapterList(database)
    await add(catalog, acme, "pirate", 1, 2)
    await catalog.versions.refuse(acme, "pirate", [Reason(message="wrong shape")])
    await catalog.versions.refuse(globex, "broken", [Reason(message="wrong shape")])
    await add(catalog, globex, "waiting", 3, state="validating")
    await add(catalog, globex, "over", 4)
    async with database.write() as connection:
        is_over = adapter_versions.c.digest == digest(4)
        past = datetime.now(UTC) - timedelta(seconds=1)
        await connection.execute(update(adapter_versions).where(is_over).values(expires_at=past))
    found = {each.name: each for each in (await adapters.page(ListFilter())).adapters}
    shown = {
        name: (each.tenant, each.version, each.state, each.newest, each.newest_state, each.versions)
        for name, each in found.items()
    }
    assert shown == {
        "pirate": ("acme", 2, "ready", 3, "rejected", 3),
        "broken": ("globex", 1, "rejected", 1, "rejected", 1),
        "waiting": ("globex", 1, "validating", 1, "validating", 1),
        "over": ("globex", 1, "retired", 1, "retired", 1),
    }
    assert (found["pirate"].digest, found["pirate"].rank, found["pirate"].num_bytes) == (digest(2), 8, 10)
    assert found["broken"].digest == ""


async def test_filters_sorts_and_pages(catalog: Catalog, acme: Tenant, globex: Tenant, database: Database):
    adapters = AdapterList(database)
    for tenant, name, number in ((acme, "a%b", 1), (acme, "pirate", 2), (globex, "json", 3), (globex, "pirate", 4)):
        if "%" not in name:
            await add(catalog, tenant, name, number)
    await catalog.versions.refuse(acme, "broken", [Reason(message="no")])
    every = ["acme/broken", "globex/json", "acme/pirate", "globex/pirate"]
    assert await names(adapters) == every
    assert await names(adapters, descending=True) == ["acme/pirate", "globex/pirate", "globex/json", "acme/broken"]
    assert [await names(adapters, limit=3, page=page) for page in (1, 2, 3)] == [every[:3], every[3:], []]
    assert [(await adapters.page(ListFilter(), limit=3, page=page)).total for page in (1, 2, 3)] == [4, 4, 4]
    for criteria, expected in (
        (ListFilter(tenant="globex"), ["globex/json", "globex/pirate"]),
        (ListFilter(tenant_id=acme.id), ["acme/broken", "acme/pirate"]),
        (ListFilter(search="PIR"), ["acme/pirate", "globex/pirate"]),
        (ListFilter(search="glob"), ["globex/json", "globex/pirate"]),
        (ListFilter(search=f"sha256:{digest(3)}"), ["globex/json"]),
        (ListFilter(search="%"), []),
        (ListFilter(state="rejected"), ["acme/broken"]),
        (ListFilter(rank=8), ["globex/json", "acme/pirate", "globex/pirate"]),
        (ListFilter(rank=9), []),
        (ListFilter(base=digest(9)), []),
    ):
        assert await names(adapters, criteria) == expected, criteria
    for sort in SORTS:
        for descending in (False, True):
            assert sorted(await names(adapters, sort=sort, descending=descending)) == sorted(every)


async def test_orders_and_searches_are_the_same_from_the_sums_for_charts(
    catalog: Catalog, acme: Tenant, globex: Tenant, database: Database
):
    """Adapters by use are found by the sums for charts; without them, and with versions' sorts, all are listed."""
    now, writer = datetime.now(UTC), UsageWriter(database)
    owned = [(tenant, name) for tenant in (acme, globex) for name in ("a", "b", "c", "d")]
    for number, (tenant, name) in enumerate(owned):
        await add(catalog, tenant, name, 2 * number, 2 * number + 1)
    uses = [(0, 1), (0, 30), (1, 1), (2, 3), (2, 3), (2, 3), (3, 90), (4, 0), (5, 3), (5, 3), (6, 800)]
    for i, (criteria, hours) in enumerate(uses):
        tenant, name = owned[criteria]
        own = {"tenant_id": tenant.id, "tenant": tenant.name, "model": name, "adapter_digest": "d"}
        await writer.write([row(f"r{i}", **own, created_at=now - timedelta(hours=hours))])

    async def ordered() -> list[Any]:
        adapters = AdapterList(database)
        pages = [
            await adapters.page(ListFilter(), sort=sort, descending=descending, page=page, limit=limit)
            for sort in BY_USE
            for descending in (True, False)
            for page, limit in ((1, 2), (2, 2), (1, 4), (2, 4), (1, 20), (3, 20))
        ]
        return [(page.total, [f"{each.tenant}/{each.name}" for each in page.adapters]) for page in pages]

    fast, adapters = await ordered(), AdapterList(database)
    assert fast[0] == (8, ["acme/c", "globex/b"])
    for text in ("a", "ACM", digest(3)[:64], f"sha256:{digest(3)}", digest(2), "sha256:", "0", "%", "zzz", "f" * 64):
        listed = [
            sorted(
                (each.tenant, each.name) for each in (await adapters.page(ListFilter(search=text), sort=sort)).adapters
            )
            for sort in ("name", "version")
        ]
        assert listed[0] == listed[1], text
    for tenant_id, found in ((None, ["acme/b"]), (acme.id, ["acme/b"]), (globex.id, [])):
        assert await names(adapters, ListFilter(search=digest(3), tenant_id=tenant_id)) == found
    assert await names(adapters, ListFilter(search=digest(2))) == []
    async with database.write() as connection:
        for sums in ACTIVITY.values():
            await connection.execute(delete(sums))
    assert await ordered() == fast


@pytest.mark.parametrize("candidates", [2, 4, 8])
async def test_pages_by_requests_are_those_of_all_rows(
    catalog: Catalog, acme: Tenant, globex: Tenant, database: Database, monkeypatch: pytest.MonkeyPatch, candidates: int
):
    """The hours of few adapters are read only if no other can be on the page: many used yesterday have no use since."""
    monkeypatch.setattr(list_uses, "CANDIDATES", candidates)
    chance, now, writer = random.Random(candidates), datetime.now(UTC), UsageWriter(database)
    hour = now.replace(minute=0, second=0, microsecond=0)
    owned = [(tenant, f"a{i:02}") for i in range(12) for tenant in (acme, globex)]
    recent: Counter[tuple[str, str]] = Counter()
    used = []
    for number, (tenant, name) in enumerate(owned):
        await add(catalog, tenant, name, number)
        own = {"tenant_id": tenant.id, "tenant": tenant.name, "model": name, "adapter_digest": "d"}
        for i in range(int(40 / (number + 1)) + chance.randrange(3)):
            # The last hours, or those that the day of the period's start has before it.
            hours = chance.choice((0, 5, 22, 24, 26, 30, 40, 47))
            used.append(row(f"r{number}-{i}", **own, created_at=hour - timedelta(hours=hours)))
            recent[tenant.name, name] += hour - timedelta(hours=hours) > now - timedelta(hours=24)
    await writer.write(used)
    answered: list[bool] = []
    busiest = list_uses._busiest

    async def watched(*given: Any) -> Any:
        found = await busiest(*given)
        answered.append(bool(found))
        return found

    monkeypatch.setattr(list_uses, "_busiest", watched)
    expected = sorted(((tenant.name, name) for tenant, name in owned), key=lambda each: (-recent[each], *each[::-1]))
    for limit in (1, 3, 5):
        found: list[tuple[str, str]] = []
        for page in range(1, 2 + len(owned) // limit):
            listed = await AdapterList(database).page(
                ListFilter(), sort="requests", descending=True, page=page, limit=limit
            )
            assert listed.total == len(owned)
            assert all(each.requests == recent[each.tenant, each.name] for each in listed.adapters)
            found += [(each.tenant, each.name) for each in listed.adapters]
        assert found == expected
    assert set(answered) == {True, False}


async def test_use_is_that_of_the_tenants_own_name(catalog: Catalog, acme: Tenant, globex: Tenant, database: Database):
    adapters, writer, now = AdapterList(database), UsageWriter(database), datetime.now(UTC)
    for tenant in (acme, globex):
        await add(catalog, tenant, "pirate", 1)
        await add(catalog, tenant, "old", 2)
    ages = {"pirate": (0, 1, 30), "old": (24 * 29,)}
    for name, hours in ages.items():
        for age in hours:
            at = now - timedelta(hours=age)
            own = {"tenant_id": acme.id, "tenant": "acme", "model": name, "adapter_digest": "d"}
            await writer.write([row(f"r-{name}-{age}", **own, created_at=at)])
    gone = {"tenant_id": globex.id, "model": "old", "adapter_digest": "d", "created_at": now - timedelta(days=40)}
    await writer.write([row("gone", **gone)])
    for page in (
        await adapters.page(ListFilter()),
        await adapters.page(ListFilter(), sort="requests", descending=True),
        await adapters.page(ListFilter(), sort="last_used"),
    ):
        uses = {f"{each.tenant}/{each.name}": each for each in page.adapters}
        assert {name: each.requests for name, each in uses.items()} == {
            "acme/pirate": 2,
            "acme/old": 0,
            "globex/pirate": 0,
            "globex/old": 0,
        }
        assert uses["acme/pirate"].last_used == now.replace(minute=0, second=0, microsecond=0)
        assert uses["acme/old"].last_used is not None
        assert uses["globex/old"].last_used is None
    by_use = await names(adapters, sort="requests", descending=True)
    assert by_use[0] == "acme/pirate"
    assert await names(adapters, sort="last_used", descending=True, limit=2) == ["acme/pirate", "acme/old"]


@pytest.mark.parametrize("sort", ["name", "requests"])
# The second filter also reads versions.
@pytest.mark.parametrize("filtered", [{}, {"rank": 8}])
async def test_an_idle_adapter_and_its_last_use_are_as_old_as_the_days(
    catalog: Catalog, acme: Tenant, database: Database, filtered: dict[str, Any], sort: Sort
):
    adapters, writer, now, hour = AdapterList(database), UsageWriter(database), datetime.now(UTC), timedelta(hours=1)
    # Hours since the creation, and since the last use.
    ages = {"new": (1, None), "week": (7 * 24 + 1, None), "busy": (40 * 24, 23), "old": (40 * 24, 29 * 24)}
    for number, (name, (created, used)) in enumerate(ages.items(), 1):
        await add(catalog, acme, name, number)
        async with database.write() as connection:
            criteria = adapters_table.c.name == name
            await connection.execute(update(adapters_table).where(criteria).values(created_at=now - created * hour))
        if used is not None:
            own = {"tenant_id": acme.id, "tenant": "acme", "model": name, "adapter_digest": "d"}
            await writer.write([row(f"r-{name}", **own, created_at=now - used * hour)])
    for days, idle in ((1, ["old", "week"]), (7, ["old", "week"]), (8, ["old"]), (28, ["old"]), (30, []), (41, [])):
        page = await adapters.page(ListFilter(idle_days=days, **filtered), sort=sort)
        assert sorted(each.name for each in page.adapters) == idle, days
        assert page.total == len(idle)
