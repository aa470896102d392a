"""Queues of several base models: a full one holds up no other, and tenants have one share over all."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from gateway.api.golden.upgrades import idle_engines
from gateway.errors import Overloaded
from gateway.fleet.engines.engine import Address, EngineRecord
from gateway.fleet.engines.health import Condition, Health
from gateway.fleet.queueing.base_queues import BaseQueues
from gateway.fleet.queueing.queue import Capacity, Place
from gateway.fleet.queueing.service_counters import ServiceCounters
from gateway.fleet.queueing.service_meter import ServiceMeter


def place(tenant: str, tokens: int = 0) -> Place:
    return Place(tenant, 1.0, 5, ServiceMeter(tokens), tenant_name=tenant)


async def test_a_full_base_holds_up_no_other():
    rooms = {"": 1, "qwen": 2}
    queues = BaseQueues(lambda base: Capacity(rooms[base], 0), ServiceCounters(), max_waiting=1, max_seconds=100.0)
    waits: list[float] = []
    queues.observe_wait = waits.append
    async with AsyncExitStack() as held:
        await held.enter_async_context(queues.of("").enter(place("acme")))
        waiting = asyncio.create_task(held.enter_async_context(queues.of("").enter(place("acme"))))
        await asyncio.sleep(0)
        assert (queues.inside, queues.waiting) == (1, 1)
        for tenant in ("acme", "globex"):
            async with asyncio.timeout(30.0):
                await held.enter_async_context(queues.of("qwen").enter(place(tenant)))
        with pytest.raises(Overloaded):
            async with queues.of("").enter(place("globex", tokens=10**6)):
                pass
        acme = queues.tenants()["acme"]
        assert (acme.inside, acme.waiting, len(waits)) == (2, 1, 3)
        assert queues.longest_wait > 0.0
        rooms[""] = 2
        queues.admit()
        async with asyncio.timeout(30.0):
            await waiting
        assert (queues.inside, queues.waiting, queues.longest_wait) == (4, 0, 0.0)


async def test_service_of_one_base_counts_at_the_other():
    rooms = {"": 1, "qwen": 1}
    queues = BaseQueues(lambda base: Capacity(rooms[base], 0), ServiceCounters(), max_waiting=9, max_seconds=100.0)
    order: list[str] = []

    async def visit(tenant: str) -> None:
        async with queues.of("qwen").enter(place(tenant, tokens=1)):
            order.append(tenant)

    async with AsyncExitStack() as held:
        async with AsyncExitStack() as last:
            await last.enter_async_context(queues.of("qwen").enter(place("other")))
            await held.enter_async_context(queues.of("").enter(place("busy", tokens=1000)))
            visits = [asyncio.create_task(visit(tenant)) for tenant in ("busy", "other")]
            await asyncio.sleep(0)
        await asyncio.gather(*visits)
    assert order == ["other", "busy"], "the tenant with less service goes first, although it came later"


async def test_requests_that_wait_for_one_base_hold_up_no_golden_checks_of_the_other():
    queues = BaseQueues(lambda _: Capacity(0, 0), ServiceCounters(), max_waiting=9, max_seconds=100.0)
    engines = [
        EngineRecord(Address(f"http://{i}"), Condition(Health.UP), base=base) for i, base in enumerate(("", "b"))
    ]
    assert list(idle_engines(engines, queues).values()) == engines
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(AsyncExitStack().enter_async_context(queues.of("b").enter(place("acme"))))
        await asyncio.sleep(0)
        assert queues.waiting == 1
        assert list(idle_engines(engines, queues).values()) == engines[:1]
        waiting.cancel()
