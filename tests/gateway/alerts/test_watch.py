"""Detection of events over a real database, by two gateways at once."""

import time
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import delete, event, insert

from gateway.alerts.budgets import Budgets
from gateway.alerts.fleet_events import FleetEvents
from gateway.alerts.watch import DOWN_SECONDS, WRONG_KEYS, Watch
from gateway.errors import Unavailable
from gateway.fleet.engines.health import Condition, Health
from gateway.fleet.failures.quarantine import Quarantine
from gateway.metrics import Metrics
from gateway.records.caches.changes import Changes
from gateway.records.events.events import Event, Events
from gateway.records.events.tables import events
from gateway.records.maintenance.leadership import Leadership
from gateway.records.money.spending import Spending
from gateway.records.sql.database import Database
from gateway.records.sql.tables import api_keys, usage_daily
from gateway.records.tenants.budgeted import BudgetedTenants
from gateway.records.tenants.tenants import Tenant, Tenants


def this_month() -> dict[str, str]:
    return {"period": "month", "since": f"{datetime.now(UTC):%Y-%m}-01"}


class Gateway:
    """A process' watch, with its own metrics and its own view of the engines."""

    def __init__(self, database: Database, lease_seconds: float = 30.0) -> None:
        self.metrics = Metrics()
        self.engines: list[Any] = []
        fleet = FleetEvents(Events(database), Tenants(database), self.metrics, Quarantine(600.0, b"of the tests"))
        self.watch = Watch(
            Events(database),
            Budgets(BudgetedTenants(database), Spending(database), Changes(database)),
            Leadership(database, "watch", lease_seconds),
            self.metrics,
            lambda: self.engines,
            fleet,
        )

    def page(self) -> str:
        return self.metrics.render().decode()


async def spend(database: Database, tenant: Tenant, cost: int, day: datetime | None = None) -> None:
    """Add a row of sums. Each call needs another cost."""
    at = (day or datetime.now(UTC)).replace(hour=0, minute=0, second=0, microsecond=0)
    sums = {"requests": 1, "prompt_tokens": 1, "completion_tokens": 1, "cached_tokens": 0, "cost": cost}
    async with database.write() as connection:
        await connection.execute(
            insert(usage_daily).values(
                tenant_id=tenant.id, day=at, key_id=f"k{cost}", model="base", tenant=tenant.name, **sums
            )
        )


async def all_events(database: Database) -> list[Event]:
    found, _ = await Events(database).list()
    return found[::-1]


async def types(database: Database) -> list[str]:
    return [event.type for event in await all_events(database)]


async def test_thresholds_of_a_budget_are_one_event_each(database: Database):
    tenants = Tenants(database)
    acme = await tenants.create("acme", {"budget_per_month": 1000, "budget_warn_at": (0.5, 0.8, 1.0)}, "a")
    await tenants.create("free", {}, "a")
    # Both lead: the lease of the first has run out by the clock of the second.
    gateways = [Gateway(database, 0.0) for _ in range(2)]

    async def look() -> list[str]:
        for gateway in gateways * 2:
            await gateway.watch.look()
        return await types(database)

    # Spending of the previous month does not count.
    await spend(database, acme, 900, datetime.now(UTC).replace(day=1) - timedelta(days=1))
    assert await look() == []
    await spend(database, acme, 499)
    assert await look() == []
    await spend(database, acme, 301)
    assert await look() == ["budget.threshold"] * 2
    await spend(database, acme, 200)
    assert await look() == ["budget.threshold"] * 2 + ["budget.exhausted"]
    last = (await all_events(database))[-1]
    assert (last.tenant, last.data) == (
        "acme",
        {**this_month(), "threshold": 1, "budget": 1000, "spent": 1000},
    )
    # A raised budget has thresholds of its own.
    await tenants.update("acme", {"budget_per_month": 1250}, "a")
    assert (await look())[3:] == ["budget.threshold"] * 2


async def test_each_period_has_its_thresholds(database: Database):
    budgets = {"budget_per_day": 100, "budget_per_week": 10**6, "budget_per_month": 10**7, "budget_warn_at": (1.0,)}
    acme = await Tenants(database).create("acme", budgets, "a")
    gateway = Gateway(database)
    await spend(database, acme, 100)
    for _ in range(2):
        await gateway.watch.look()
    [event] = await all_events(database)
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    assert event.data == {"threshold": 1, "budget": 100, "spent": 100, "period": "day", "since": today}
    assert 'budget_used_ratio{tenant="acme"} 1.0' in gateway.page()


async def test_a_soft_budget_has_one_event_in_each_period(database: Database):
    soft = {"soft_budget_per_30_days": 100, "soft_budget_per_month": 10**6, "budget_warn_at": ()}
    acme = await Tenants(database).create("acme", soft, "a")
    gateways = [Gateway(database, 0.0) for _ in range(2)]
    today = datetime.now(UTC)
    await spend(database, acme, 99, today - timedelta(days=29))
    await spend(database, acme, 1000, today - timedelta(days=30))
    for gateway in gateways:
        await gateway.watch.look()
    assert await types(database) == []
    await spend(database, acme, 2)
    for gateway in gateways * 2:
        await gateway.watch.look()
    [event] = await all_events(database)
    since = f"{today - timedelta(days=29):%Y-%m-%d}"
    data = {"budget": 100, "spent": 101, "period": "30 days", "since": since}
    assert (event.type, event.tenant, event.data) == ("budget.soft", "acme", data)
    assert "budget_used_ratio{" not in gateways[0].page()


async def test_tenants_are_read_in_pages(database: Database, monkeypatch: pytest.MonkeyPatch):
    """The last tenant of a page, the first of the next and those without a budget are all seen."""
    monkeypatch.setattr("gateway.records.tenants.budgeted.AT_ONCE", 2)
    monkeypatch.setattr("gateway.records.money.spending.AT_ONCE", 2)
    tenants = Tenants(database)
    fields: list[dict[str, Any]] = [{"budget_per_month": 100}, {"budget_per_day": 100}, {"budget_per_week": 0}, {}]
    for number in range(12):
        tenant = await tenants.create(f"t{number}", fields[number % 4] | {"budget_warn_at": (1.0,)}, "a")
        await spend(database, tenant, 200 + number)
    gateway = Gateway(database, 0.0)
    for number in range(12):
        gateway.metrics.refused(f"t{number}", "budget")
    await gateway.watch.look()
    expected = {f"t{number}" for number in range(12) if number % 4 < 2}
    assert sorted(event.tenant or "" for event in await all_events(database)) == sorted(expected)
    assert {name for name in expected if f'budget_used_ratio{{tenant="{name}"}}' in gateway.page()} == expected
    async with database.write() as connection:
        await connection.execute(delete(events))
    # Without a refusal, by the spending alone, which another gateway has not seen yet.
    await Gateway(database, 0.0).watch.look()
    assert {event.tenant for event in await all_events(database)} == expected


async def test_only_tenants_that_spend_or_change_are_examined_again(
    database: Database, monkeypatch: pytest.MonkeyPatch
):
    """A look without any change reads no tenant, however many have budgets."""
    monkeypatch.setattr("gateway.records.tenants.budgeted.AT_ONCE", 2)
    tenants = Tenants(database)
    made = [await tenants.create(f"t{i}", {"budget_per_day": 100, "budget_warn_at": (1.0,)}, "a") for i in range(7)]
    gateway = Gateway(database)
    read: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        read.append(statement)

    event.listen(database._engine.sync_engine, "before_cursor_execute", note)

    async def look() -> int:
        """Return the number of readings of tenants' budgets."""
        read.clear()
        await gateway.watch.look()
        return sum("budget_warn_at" in each for each in read)

    # Pages of two: the last one is not full.
    assert await look() == 4
    assert await look() == 0
    await spend(database, made[3], 60)
    assert await look() == 1
    assert 'budget_used_ratio{tenant="t3"} 0.6' in gateway.page()
    assert await types(database) == []
    await tenants.update("t3", {"budget_per_day": 50}, "a")
    assert await look() == 1
    assert await types(database) == ["budget.exhausted"]
    await tenants.delete("t3", "a", ["base"])
    assert await look() == 1
    assert "t3" not in gateway.page()
    assert gateway.page().count("budget_used_ratio{") == 6


async def test_no_thresholds_no_events(database: Database):
    acme = await Tenants(database).create("acme", {"budget_per_month": 1000, "budget_warn_at": ()}, "a")
    await spend(database, acme, 1000)
    await Gateway(database).watch.look()
    assert await types(database) == []


async def test_a_budget_of_which_too_little_is_left_is_exhausted(database: Database):
    """Reservations refuse before the budget is spent to the last unit."""
    acme = await Tenants(database).create("acme", {"budget_per_month": 1000, "budget_warn_at": (1.0,)}, "a")
    holder, other = Gateway(database), Gateway(database)
    await spend(database, acme, 500)
    other.metrics.refused("acme", "budget")
    for gateway in (holder, other):
        await gateway.watch.look()
    assert await types(database) == []
    await spend(database, acme, 460)
    for _ in range(2):
        # The gateway that refused does not lead.
        other.metrics.refused("acme", "budget")
        other.metrics.refused("acme", "requests")
        for gateway in (holder, other):
            await gateway.watch.look()
    [event] = await all_events(database)
    assert (event.type, event.data["spent"]) == ("budget.exhausted", 960)


async def test_the_metric_of_used_budgets_is_one_gateways_and_bounded(database: Database):
    acme = await Tenants(database).create("acme", {"budget_per_month": 1000}, "a")
    await spend(database, acme, 250)
    holder, other = Gateway(database), Gateway(database)
    for gateway in (holder, other):
        await gateway.watch.look()
    assert 'loraplex_gateway_budget_used_ratio{tenant="acme"} 0.25' in holder.page()
    assert "budget_used_ratio{" not in other.page()
    holder.metrics.budgets_used({f"t{number}": number for number in range(500)})
    assert holder.page().count("budget_used_ratio{") == 100
    assert 'budget_used_ratio{tenant="t499"} 499.0' in holder.page()


async def test_a_key_that_expires_within_a_week(database: Database):
    acme = await Tenants(database).create("acme", {}, "a")
    now = datetime.now(UTC)
    first = {"tenant_id": acme.id, "label": "ci", "scopes": "inference", "secret_hash": "x", "created_at": now}
    rows = {
        "soon": {"expires_at": now + timedelta(days=6)},
        "later": {"expires_at": now + timedelta(days=8)},
        "never": {},
        "gone": {"expires_at": now - timedelta(days=1)},
        "revoked": {"expires_at": now + timedelta(days=6), "revoked_at": now},
        "rotated": {"expires_at": now + timedelta(hours=1)},
        "successor": {"family_id": "rotated", "expires_at": now + timedelta(days=90)},
        "operator": {"expires_at": now + timedelta(days=1), "tenant_id": None},
    }
    async with database.write() as connection:
        for name, row in rows.items():
            await connection.execute(insert(api_keys).values(**{**first, "id": name, **row}))
    gateway = Gateway(database)
    for _ in range(2):
        await gateway.watch.look()
    found = [(event.type, event.tenant, event.data["key"]) for event in await all_events(database)]
    assert sorted(found, key=str) == [("key.expiring", "acme", "soon"), ("key.expiring", None, "operator")]
    assert "x" not in [value for event in await all_events(database) for value in event.data.values()]


async def test_sums_that_take_too_long_delay_no_other_event(database: Database, monkeypatch: pytest.MonkeyPatch):
    async def too_slow(*_: object) -> None:
        raise Unavailable("The database is too slow.", code="database_unavailable")

    monkeypatch.setattr(Spending, "present", too_slow)
    acme = await Tenants(database).create("acme", {"budget_per_month": 1000, "budget_warn_at": (0.5,)}, "a")
    now = datetime.now(UTC)
    key = {"id": "soon", "tenant_id": acme.id, "label": "ci", "scopes": "inference", "secret_hash": "x"}
    async with database.write() as connection:
        await connection.execute(insert(api_keys).values(**key, created_at=now, expires_at=now + timedelta(days=6)))
    gateway = Gateway(database)
    gateway.engines = [engine(Health.DOWN, DOWN_SECONDS)]
    gateway.watch._was_up = {"http://e"}
    with pytest.raises(Unavailable):
        await gateway.watch.look()
    assert sorted(await types(database)) == ["engine.down", "key.expiring"]


def engine(health: Health, seconds: float = 0.0) -> Any:
    condition = Condition(health, "connection refused", time.monotonic() - seconds)
    is_up = health is Health.UP
    return SimpleNamespace(url="http://e", condition=condition, is_up=is_up, fault=None if is_up else "down: refused")


async def test_an_engine_goes_down_and_comes_back(database: Database):
    # The second takes over while the engine is down, and knows what the first has reported.
    first, second = Gateway(database, 0.0), Gateway(database, 0.0)
    states = [
        (first, engine(Health.UP), []),
        (first, engine(Health.DOWN, DOWN_SECONDS - 5), []),
        (first, engine(Health.DOWN, DOWN_SECONDS), ["engine.down"]),
        (first, engine(Health.DOWN, DOWN_SECONDS + 60), ["engine.down"]),
        (second, engine(Health.DOWN, 400), ["engine.down"]),
        (second, engine(Health.UP), ["engine.down", "engine.up"]),
        (second, engine(Health.DRAINING, 400), ["engine.down", "engine.up"]),
        (second, engine(Health.DOWN, DOWN_SECONDS), ["engine.down", "engine.up", "engine.down"]),
    ]
    for gateway, now, expected in states:
        gateway.engines = [now]
        await gateway.watch.look()
        assert await types(database) == expected
    down = (await all_events(database))[0]
    assert (down.tenant, down.data) == (None, {"engine": "http://e", "reason": "down: refused"})


async def test_an_engine_that_loads_its_model_is_not_down(database: Database):
    gateway = Gateway(database)
    gateway.engines = [engine(Health.UNKNOWN, 200)]
    await gateway.watch.look()
    assert await types(database) == []
    gateway.engines = [engine(Health.DOWN, 301)]
    await gateway.watch.look()
    assert await types(database) == ["engine.down"]


async def test_a_burst_of_wrong_keys_is_one_event(database: Database):
    gateway = Gateway(database)
    for _ in range(WRONG_KEYS - 1):
        gateway.metrics.count_wrong_key()
    await gateway.watch.look()
    # These came before the first look, when the process did not know since when.
    assert await types(database) == []
    for _ in range(3):
        for _ in range(WRONG_KEYS):
            gateway.metrics.count_wrong_key()
        await gateway.watch.look()
    # At the edge of two windows there are two.
    assert set(await types(database)) == {"keys.guessed"}
    assert len(await types(database)) <= 2
