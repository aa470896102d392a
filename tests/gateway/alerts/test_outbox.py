"""Events and their delivery over a real database: once in the table, at least once at each target, none held up."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import event, update

from gateway.alerts.messages import title
from gateway.alerts.outbox import Outbox
from gateway.records.events.events import Events
from gateway.records.events.tables import events, webhooks
from gateway.records.maintenance.leadership import Leadership
from gateway.records.sql.database import Database
from gateway.records.tenants.tenants import Tenant, Tenants
from gateway.records.webhooks.targets import MAX_OF_TENANT, Webhook, Webhooks
from testing.gateway.running import until
from tests.gateway.records.events.test_events import record, states

Take = Callable[[str, str], Awaitable[str | None]]


class Targets:
    """Sender that keeps what it is given. take: returns the error of a delivery, None if it succeeds."""

    def __init__(self, take: Take | None = None) -> None:
        self.sent: list[tuple[str, str]] = []
        self._take = take

    async def send(
        self, webhook: Webhook, event_id: str, kind: str, tenant: str | None, data: Any, at: datetime
    ) -> str | None:
        self.sent.append((webhook.name, event_id))
        return None if self._take is None else await self._take(webhook.name, event_id)

    async def close(self) -> None:
        pass


def outbox(database: Database, targets: Targets, seconds: float = 30.0) -> Outbox:
    sender: Any = targets
    return Outbox(Webhooks(database), Leadership(database, "outbox", seconds), sender, look_seconds=0.05)


class Running:
    """An outbox that runs during the block."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    async def __aenter__(self) -> None:
        self._context = self._outbox.running(None)
        await anext(self._context)

    async def __aexit__(self, *_: object) -> None:
        with pytest.raises(StopAsyncIteration):
            await anext(self._context)


async def add(database: Database, *names: str, tenant: Tenant | None = None, types: list[str] | None = None) -> None:
    for name in names:
        await Webhooks(database).put(name, "https://a.example/", types, tenant, "admin")


async def test_each_webhook_gets_its_types_and_its_tenant(database: Database):
    tenants = Tenants(database)
    acme, globex = await tenants.create("acme", {}, "a"), await tenants.create("globex", {}, "a")
    await add(database, "all")
    await add(database, "engines", types=["engine.down", "engine.up"])
    await add(database, "acme-only", tenant=acme)
    await record(database, "of acme", acme)
    await record(database, "of globex", globex)
    await Events(database).record("engine.down", {"engine": "http://e"}, once="engine")
    found, _ = await Events(database).list()
    assert {(event.type, event.tenant): set(event.deliveries) for event in found} == {
        ("budget.threshold", "acme"): {"all", "acme-only"},
        ("budget.threshold", "globex"): {"all"},
        ("engine.down", None): {"all", "engines"},
    }


async def test_a_tenant_has_few_webhooks_and_loses_them_with_its_name(database: Database):
    tenants = Tenants(database)
    acme = await tenants.create("acme", {}, "a")
    await add(database, *(f"w{number}" for number in range(MAX_OF_TENANT)), tenant=acme)
    with pytest.raises(Exception, match="at most 5"):
        await add(database, "further", tenant=acme)
    with pytest.raises(Exception, match="cannot change its tenant"):
        await add(database, "w0")
    await record(database, "of acme", acme)
    await tenants.delete("acme", "a", ["base"])
    assert await Webhooks(database).all() == []
    assert await states(database) == []


async def test_every_event_is_delivered_once_by_one_of_two_gateways(database: Database):
    await add(database, "one", "two")
    targets = Targets()
    async with AsyncExitStack() as stack:
        for _ in range(2):
            await stack.enter_async_context(Running(outbox(database, targets)))
        for number in range(5):
            await record(database, f"event {number}")

        async def all_delivered() -> bool:
            return await states(database) == ["delivered"] * 10

        await until(all_delivered)
        await asyncio.sleep(0.3)
    assert len(targets.sent) == len(set(targets.sent)) == 10


async def test_a_failed_delivery_is_tried_again_until_it_succeeds(database: Database, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gateway.records.webhooks.targets.BACKOFF", (0.05, 0.1))
    await add(database, "one")
    errors = ["first", "second", None]

    async def take(name: str, event_id: str) -> str | None:
        return errors.pop(0)

    targets = Targets(take)
    await record(database, "event")
    async with Running(outbox(database, targets)):

        async def delivered() -> bool:
            return await states(database) == ["delivered"]

        await until(delivered)
    assert len(targets.sent) == 3
    [found] = await Webhooks(database).all()
    assert (found.failures, found.error, found.retry_at) == (0, None, None)


async def test_pauses_grow_and_end_after_a_day(database: Database):
    await add(database, "one")
    await record(database, "event")
    table = Webhooks(database)
    [pending] = await table.due()
    before = datetime.now(UTC)
    await table.attempted(pending, "it fails")
    [failed] = await table.all()
    assert failed.error == "it fails"
    assert failed.retry_at is not None
    assert before + timedelta(seconds=5) <= failed.retry_at <= datetime.now(UTC) + timedelta(seconds=5)
    assert await table.due() == []
    async with database.write() as connection:
        await connection.execute(update(webhooks).values(retry_at=datetime.now(UTC) - timedelta(seconds=1)))
        await connection.execute(update(events).values(created_at=datetime.now(UTC) - timedelta(hours=25)))
    [pending] = await table.due()
    before = datetime.now(UTC)
    await table.attempted(pending, "it fails")
    [failed] = await table.all()
    assert failed.retry_at is not None
    assert before + timedelta(seconds=15) <= failed.retry_at <= datetime.now(UTC) + timedelta(seconds=15)
    assert await states(database) == ["failed"]


@pytest.mark.parametrize("url", ["https://a.example/", "https://b.example/"])
async def test_a_webhook_that_changes_during_an_attempt_is_tried_at_once(database: Database, url: str):
    await add(database, "one")
    await record(database, "event")
    table = Webhooks(database)
    async with database.write() as connection:
        await connection.execute(update(webhooks).values(failures=9))
    [pending] = await table.due()
    await table.put("one", url, None, None, "admin")
    await table.attempted(pending, "the former address fails")
    [changed] = await table.all()
    assert (changed.url, changed.failures, changed.retry_at, changed.error) == (url, 0, None, None)
    [again] = await table.due()
    assert again.webhook.url == url
    await table.attempted(again, "it fails")
    [failed] = await table.all()
    assert (failed.failures, failed.error) == (1, "it fails")


async def test_an_event_that_a_target_refuses_does_not_hold_up_its_others(
    database: Database, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("gateway.records.webhooks.targets.BACKOFF", (0.02,))
    await add(database, "one")
    for number in range(3):
        await record(database, f"event {number}")
    found, _ = await Events(database).list()
    refused = found[-1].id

    async def take(name: str, event_id: str) -> str | None:
        return "refused" if event_id == refused else None

    async with Running(outbox(database, Targets(take))):

        async def others_delivered() -> bool:
            return await states(database) == ["delivered", "delivered", "pending"]

        await until(others_delivered)


async def test_an_event_that_cannot_be_sent_counts_as_an_attempt(database: Database):
    """A title that was unknown stopped all e-mails to a target, and the outbox tried it without a pause."""
    await add(database, "one")
    for number in range(2):
        await record(database, f"event {number}")
    found, _ = await Events(database).list()
    bad = found[-1].id

    async def take(name: str, event_id: str) -> str | None:
        if event_id == bad:
            raise KeyError("a bug")
        return None

    targets = Targets(take)
    async with Running(outbox(database, targets)):

        async def has_failed() -> bool:
            [webhook] = await Webhooks(database).all()
            return webhook.error == "it could not be sent: KeyError" and webhook.retry_at is not None

        await until(has_failed)
    assert [event_id for _, event_id in targets.sent].count(bad) == 1


def test_an_event_of_a_later_release_has_its_type_as_its_title():
    assert title("engine.on_fire", "acme", {}) == "engine.on_fire"


async def test_a_slow_target_delays_no_other(database: Database):
    await add(database, "slow", "quick")
    release = asyncio.Event()

    async def take(name: str, event_id: str) -> str | None:
        if name == "slow":
            await release.wait()
        return None

    targets = Targets(take)
    async with Running(outbox(database, targets)):
        for number in range(4):
            await record(database, f"event {number}")

        async def quick_ones_delivered() -> bool:
            return (await states(database)).count("delivered") == 4

        started = time.monotonic()
        await until(quick_ones_delivered, seconds=20)
        assert time.monotonic() - started < 10
        # The slow target has one at a time.
        assert [name for name, _ in targets.sent].count("slow") == 1
        release.set()

        async def all_delivered() -> bool:
            return (await states(database)).count("delivered") == 8

        await until(all_delivered)


async def test_a_dead_gateways_deliveries_are_taken_over(database: Database):
    await add(database, "one")
    dead = Leadership(database, "outbox", 0.5)
    assert await dead.take()
    await record(database, "event")
    targets = Targets()
    async with Running(outbox(database, targets)):

        async def delivered() -> bool:
            return await states(database) == ["delivered"]

        await until(delivered)
    assert len(targets.sent) == 1


async def test_only_one_process_leads(database: Database):
    candidates = [Leadership(database, "work", 30.0) for _ in range(5)]
    taken = await asyncio.gather(*(one.take() for one in candidates))
    assert sum(taken) == 1
    leader = candidates[taken.index(True)]
    assert await leader.take()
    await leader.leave()
    assert sum(await asyncio.gather(*(one.take() for one in candidates))) == 1


async def test_a_leader_prolongs_its_lease_seldom_but_in_time(database: Database):
    writes = 0

    def count(*_: Any) -> None:
        nonlocal writes
        writes += 1

    event.listen(database._engine.sync_engine, "commit", count)
    leader, other = Leadership(database, "work", 30.0), Leadership(database, "work", 30.0)
    assert await leader.take()
    made = writes
    assert all([await leader.take() for _ in range(5)])
    assert writes == made
    brief = Leadership(database, "brief", 0.9)
    assert await brief.take()
    await asyncio.sleep(0.35)
    made = writes
    assert await brief.take()
    assert writes == made + 1
    assert not await other.take()
