"""Events of mismatched receipts and of quarantines, over a real database."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gateway.alerts.fleet_events import FleetEvents
from gateway.alerts.messages import body, text
from gateway.alerts.watch import Watch
from gateway.errors import Unavailable
from gateway.fleet.failures.deaths import LIMITS, TENANT
from gateway.fleet.failures.quarantine import Quarantine
from gateway.fleet.failures.quarantine_log import MAX_BEGUN
from gateway.metrics import Metrics
from gateway.records.events.events import MAX_PER_HOUR, Event, Events
from gateway.records.sql.database import Database
from gateway.records.tenants.tenants import Tenants
from testing.gateway.running import running, settings, until
from testing.gateway.upstream import Upstream
from tests.gateway.fleet.failures.test_quarantine import SECRET, Clock, engine, note_death


class Process:
    """A process' part of these events."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self.clock = clock
        self.quarantine = Quarantine(600.0, SECRET, clock=clock)
        self.events = FleetEvents(Events(database), Tenants(database), Metrics(), self.quarantine)

    def answers_wrongly(self, instance: str) -> None:
        self.events.note_mismatch(engine("http://e:1"), instance)

    def dies(self, tenant_id: str, prompt: str = "a secret", digests: tuple[str, ...] = ()) -> None:
        self.clock.now += 10.0
        record = engine("http://one:1", **{tenant_id: 1})
        note_death(self.quarantine, record, tenant_id, digests, prompt=prompt)


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def all_events(database: Database) -> list[Event]:
    found, _ = await Events(database).list()
    return found[::-1]


async def test_a_mismatch_is_one_event_of_each_instance(database: Database, clock: Clock):
    first, second = (Process(database, clock) for _ in range(2))
    for instance in ("one", "one", "two"):
        for process in (first, second):
            process.answers_wrongly(instance)
            await process.events.look()
    assert [(each.type, each.tenant, each.data) for each in await all_events(database)] == [
        ("engine.mismatch", None, {"engine": "http://e:1", "instance": "one"}),
        ("engine.mismatch", None, {"engine": "http://e:1", "instance": "two"}),
    ]


async def test_quarantines_are_events_of_their_tenant(database: Database, clock: Clock):
    acme = await Tenants(database).create("acme", {}, "a")
    process, other = (Process(database, clock) for _ in range(2))
    for number in range(LIMITS[TENANT]):
        for each in (process, other):
            each.dies(acme.id, f"a secret {number // 2}", ("d" * 64,))
        clock.now -= 10.0
    for each in (process, other, process):
        await each.events.look()
    found = {each.type: each for each in await all_events(database)}
    assert sorted(found) == ["adapter.quarantined", "request.quarantined", "tenant.quarantined"]
    assert {each.tenant for each in found.values()} == {"acme"}
    assert found["adapter.quarantined"].data["adapter"] == f"sha256:{'d' * 64}"
    assert found["tenant.quarantined"].data["deaths"] == LIMITS[TENANT]
    for event in found.values():
        assert datetime.fromisoformat(event.data["ends_at"]) > datetime.now(UTC)
        # A tenant's own webhooks receive it.
        shown = text(event.type, "acme", event.data, event.created_at)
        shown += body(event.id, event.type, "acme", event.data, event.created_at).decode()
        assert "acme" in shown
        assert "secret" not in shown
        assert "http://one:1" not in shown


async def test_a_quarantine_that_begins_again_is_another_event(database: Database, clock: Clock):
    acme = await Tenants(database).create("acme", {}, "a")
    process = Process(database, clock)
    for number in (1, 2):
        for _ in range(LIMITS["request"]):
            process.dies(acme.id)
        # Another minute than that of the second one.
        clock.now += 100.0 if number == 1 else 0.0
        for _ in range(2):
            await process.events.look()
        assert [each.type for each in await all_events(database)] == number * ["request.quarantined"]
        await process.quarantine.clear_tenant(acme.id)


async def test_a_tenants_many_requests_hide_no_event_of_another_kind(database: Database, clock: Clock):
    acme = await Tenants(database).create("acme", {}, "a")
    process = Process(database, clock)
    for _ in range(LIMITS[TENANT]):
        process.clock.now += 10.0
        for number in range(MAX_BEGUN + 5):
            record = engine("http://one:1", **{acme.id: 1})
            note_death(process.quarantine, record, acme.id, prompt=f"{number}")
    assert len(process.quarantine._announcer._begun[acme.id, "request"]) == MAX_BEGUN
    await process.events.look()
    types = [each.type for each in await all_events(database)]
    assert types.count("request.quarantined") == MAX_PER_HOUR
    assert types.count("tenant.quarantined") == 1


@pytest.mark.parametrize("refused", ["engine.mismatch", "request.quarantined"])
async def test_events_that_the_database_did_not_take_are_recorded_later(
    refused: str, database: Database, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    acme = await Tenants(database).create("acme", {}, "a")
    process = Process(database, clock)
    process.answers_wrongly("one")
    for _ in range(LIMITS["request"]):
        process.dies(acme.id)

    record = Events.record

    async def fail(events: Events, kind: Any, data: Any, **of: Any) -> bool:
        if kind == refused:
            raise Unavailable("the database is away")
        return await record(events, kind, data, **of)

    with monkeypatch.context() as away:
        away.setattr(Events, "record", fail)
        for _ in range(2):
            with pytest.raises(Unavailable):
                await process.events.look()
    await process.events.look()
    assert sorted(each.type for each in await all_events(database)) == ["engine.mismatch", "request.quarantined"]


async def test_a_deleted_tenant_has_no_event(database: Database, clock: Clock):
    process = Process(database, clock)
    for _ in range(LIMITS["request"]):
        process.dies("of nobody")
    await process.events.look()
    assert await all_events(database) == []


async def test_a_gateway_records_both(tmp_path: Path, model_dir: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Watch.__init__, "__defaults__", (0.2,))
    async with Upstream().serving() as one, Upstream().serving() as two:
        of = settings(tmp_path, model_dir, [one.url, two.url], redis_url, redis_timeout=30.0)
        async with running(of) as gateway:
            acme = await gateway.tenant("acme")
            for each in (one, two):
                each.refuses = None
            assert (await acme.complete(prompt="a secret of acme")).status == 502
            for each in (one, two):
                each.refuses, each.receipt = False, "mixed"
            await gateway.engines_up(2)
            assert (await acme.complete(prompt="another")).error["code"] == "adapter_mismatch"

            async def are_recorded() -> bool:
                listed = (await gateway.admin.get("/admin/api/events")).json["data"]
                return {each["type"] for each in listed} >= {"engine.mismatch", "request.quarantined"}

            await until(are_recorded)
