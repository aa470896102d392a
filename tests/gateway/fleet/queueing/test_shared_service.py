"""A tenant has one share over all gateway processes: service, presence and weights, through a real Redis."""

import asyncio
import copy
import random
from collections import Counter

import pytest
from redis.asyncio import Redis

from gateway.fleet.queueing import shared_service
from gateway.fleet.queueing.service_counters import Change, ServiceCounters
from gateway.fleet.queueing.shared_service import SharedService


class Process:
    """A gateway process's counters and its exchange."""

    def __init__(self, redis: Redis, deployment: str) -> None:
        self.counters = ServiceCounters()
        self.exchange = SharedService(redis, deployment, self.counters).exchange
        self.present: Counter[str] = Counter()

    def enter(self, tenant: str, weight: float) -> None:
        self.counters.enter(tenant, weight)
        self.present[tenant] += 1

    def leave(self, tenant: str) -> None:
        self.counters.leave(tenant)
        self.present[tenant] -= 1

    def changes(self) -> list[Change]:
        """Return what the next exchange sends, without sending it."""
        return copy.deepcopy(self.counters).changes()

    async def serve(self, tenant: str, cost: float, weight: float = 1.0) -> None:
        """Serve a whole request between two exchanges."""
        self.counters.enter(tenant, weight)
        self.counters.add_service(tenant, cost)
        self.counters.leave(tenant)
        await self.exchange()


@pytest.fixture
async def redis(redis_url: str):
    client = Redis.from_url(redis_url)
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture
def pair(redis: Redis) -> tuple[Process, Process]:
    return Process(redis, "one"), Process(redis, "one")


async def test_service_of_one_process_counts_in_the_other(pair: tuple[Process, Process]):
    here, there = pair
    for process in pair:
        process.counters.enter("acme", 2.0)
        await process.exchange()
    here.counters.add_service("acme", 300.0)
    await here.exchange()
    await there.exchange()
    assert there.counters.counter("acme") == here.counters.counter("acme") == 150.0
    # Service since the last exchange counts at once in the process that gave it.
    there.counters.add_service("acme", 20.0)
    assert (there.counters.counter("acme"), here.counters.counter("acme")) == (160.0, 150.0)


async def test_a_tenants_share_is_divided_among_the_processes_where_it_is_active(pair: tuple[Process, Process]):
    here, there = pair
    here.counters.enter("spread", 3.0)
    there.counters.enter("spread", 3.0)
    there.counters.enter("single", 1.0)
    for _ in range(2):
        for process in pair:
            await process.exchange()
    assert here.counters.share("spread") == there.counters.share("spread") == pytest.approx(3 / 4 / 2)
    assert there.counters.share("single") == pytest.approx(1 / 4)


async def test_a_changed_weight_and_an_end_change_the_shares(pair: tuple[Process, Process]):
    here, there = pair
    here.counters.enter("a", 1.0)
    there.counters.enter("b", 1.0)
    for process in pair * 2:
        await process.exchange()
    assert here.counters.share("a") == pytest.approx(1 / 2)
    there.counters.enter("b", 3.0)
    for process in pair[::-1]:
        await process.exchange()
    assert here.counters.share("a") == pytest.approx(1 / 4)
    there.counters.leave("b")
    there.counters.leave("b")
    # The first exchange still sends b's last interval.
    for process in (there, there, here):
        await process.exchange()
    assert here.counters.share("a") == pytest.approx(1.0)


async def test_requests_that_come_and_go_between_two_exchanges_leave_their_debt(pair: tuple[Process, Process]):
    here, there = pair
    there.counters.enter("steady", 1.0)
    there.counters.add_service("steady", 100.0)
    await there.exchange()
    await here.serve("short", 500.0)
    await here.exchange()
    # It was raised to the least active counter, 100, then served 500. It is idle now and has not lost the debt.
    there.counters.enter("short", 1.0)
    await there.exchange()
    assert there.counters.counter("short") == 600.0


async def test_idling_earns_no_credit(pair: tuple[Process, Process]):
    here, there = pair
    await here.serve("idle", 10.0)
    there.counters.enter("busy", 1.0)
    await there.exchange()
    there.counters.add_service("busy", 1000.0)
    await there.exchange()
    await here.exchange()
    here.counters.enter("idle", 1.0)
    await here.exchange()
    assert here.counters.counter("idle") == there.counters.counter("busy") == 1010.0


async def test_a_process_that_died_keeps_no_tenant_active(
    pair: tuple[Process, Process], monkeypatch: pytest.MonkeyPatch
):
    dead, alive = pair
    dead.counters.enter("a", 1.0)
    alive.counters.enter("b", 1.0)
    await dead.exchange()
    await alive.exchange()
    assert alive.counters.share("b") == pytest.approx(1 / 2)
    monkeypatch.setattr(shared_service, "ALIVE_SECONDS", 0.3)
    async with asyncio.timeout(30):
        while alive.counters.share("b") < 1:
            await asyncio.sleep(0.05)
            await alive.exchange()


async def test_without_redis_each_process_counts_its_own_service():
    process = Process(Redis(port=1), "away")
    process.counters.enter("a", 1.0)
    process.counters.enter("b", 1.0)
    process.counters.add_service("a", 5.0)
    await process.exchange()
    assert process.counters.counter("a") == 5.0
    assert process.counters.share("a") == pytest.approx(1 / 2)
    # Nothing is kept of tenants without requests when none has any.
    process.counters.leave("a")
    process.counters.leave("b")
    await process.exchange()
    assert process.counters.changes() == []


async def test_expected_service_is_not_shared(pair: tuple[Process, Process]):
    """It may come from a cache, and would raise the counters of tenants that begin in the other process."""
    one, other = pair
    for process in pair:
        process.counters.enter("a", 1.0)
    one.counters.expect("a", 10.0)
    await one.exchange()
    await other.exchange()
    assert (one.counters.counter("a"), other.counters.counter("a")) == (10.0, 0.0)


async def test_in_an_outage_the_other_processes_tenants_take_no_share(redis: Redis):
    here, there = Process(redis, "one"), Process(redis, "one")
    there.enter("elsewhere", 3.0)
    await there.exchange()
    here.enter("a", 1.0)
    await here.exchange()
    assert here.counters.share("a") == pytest.approx(1 / 4)
    away = SharedService(Redis(port=1), "one", here.counters)
    await away.exchange()
    assert here.counters.share("a") == pytest.approx(1.0)
    await here.exchange()
    assert here.counters.share("a") == pytest.approx(1 / 4)


async def test_deployments_on_one_redis_do_not_share(redis: Redis):
    one, other = Process(redis, "one"), Process(redis, "other")
    for process in (one, other):
        process.counters.enter("a", 1.0)
    one.counters.add_service("a", 5.0)
    for process in (one, other):
        await process.exchange()
    assert other.counters.counter("a") == 0.0


class Reference:
    """The script's rules on plain dictionaries, over all processes; an exchange of one process at a time."""

    def __init__(self) -> None:
        self.counters: dict[str, float] = {}
        self.idle: dict[str, float] = {}
        self.where: dict[str, set[int]] = {}
        self.weights: dict[str, float] = {}

    def exchange(self, process: int, changes: list[Change]) -> None:
        if not self.counters:
            self.idle.clear()
        least = min(self.counters.values(), default=0.0)
        for tenant, weight, service, is_active in changes:
            if is_active:
                if tenant not in self.counters:
                    self.counters[tenant] = max(self.idle.pop(tenant, 0.0), least)
                self.where.setdefault(tenant, set()).add(process)
                self.weights[tenant] = weight
            counters = self.counters if tenant in self.counters else self.idle
            if service:
                counters[tenant] = counters.get(tenant, 0.0) + service
            if not is_active and process in self.where.get(tenant, ()):
                self.where[tenant].discard(process)
                if not self.where[tenant]:
                    del self.where[tenant]
                    self.idle[tenant] = self.counters.pop(tenant)
        for tenant in [tenant for tenant, counter in self.idle.items() if counter <= least]:
            del self.idle[tenant]

    def counter(self, tenant: str) -> float:
        return self.counters.get(tenant, self.idle.get(tenant, 0.0))


@pytest.mark.parametrize("seed", range(12))
async def test_the_script_equals_the_reference(redis: Redis, seed: int):
    draw = random.Random(seed)
    processes = [Process(redis, "compared") for _ in range(3)]
    weights, reference = {"a": 1.0, "b": 2.0, "c": 4.0}, Reference()

    async def exchange(number: int) -> None:
        process = processes[number]
        sent = process.changes()
        reference.exchange(number, sent)
        await process.exchange()
        for tenant in [change.tenant_id for change in sent if change.is_active]:
            assert process.counters.counter(tenant) == pytest.approx(reference.counter(tenant))

    for _ in range(200):
        number, tenant = draw.randrange(3), draw.choice("abc")
        process = processes[number]
        match draw.choice(["enter", "leave", "charge", "exchange", "exchange"]):
            case "enter":
                process.enter(tenant, weights[tenant])
            case "leave" if process.present[tenant]:
                process.leave(tenant)
            case "charge" if process.present[tenant]:
                process.counters.add_service(tenant, float(draw.randrange(64)))
            case "exchange":
                await exchange(number)
    for number in (0, 1, 2, 0, 1, 2):
        await exchange(number)
    total = sum(reference.weights[tenant] for tenant in reference.counters)
    for process in processes:
        for tenant in +process.present:
            share = weights[tenant] / total / len(reference.where[tenant])
            assert process.counters.share(tenant) == pytest.approx(share)
    keys = [key async for key in redis.scan_iter("loraplex:*")]
    assert keys
    assert all([await redis.pttl(key) > 0 for key in keys])
