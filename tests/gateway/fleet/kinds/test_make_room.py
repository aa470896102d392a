"""Adapters that a foreign server unloads to make room, beside requests that arrive and leave meanwhile."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.fleet.engines.engine import Address, EngineRecord
from gateway.fleet.kinds.last_uses import LastUses
from gateway.fleet.kinds.runtime_adapters import RuntimeAdapters
from gateway.fleet.kinds.vllm import Vllm


class Server(RuntimeAdapters):
    """The adapters of a server for two, which finds them by itself. unloads: digests, in order.

    held: the answer to an unload, once one waits; arrivals: adapters that other requests load, one during each unload,
    which then does not wait.
    """

    def __init__(self, *resident: str) -> None:
        uses = LastUses(None, 1.0)
        super().__init__(cast(Any, SimpleNamespace(session=None, store=None, uses=uses)), Vllm.adapter_api)
        self.engine = EngineRecord(Address("http://vllm", Vllm.traits, adapters=2))
        self.engine.state.finds_adapters = True
        self.engine.resident |= {*resident}
        self.unloads: list[str] = []
        self.held: asyncio.Future[None] | None = None
        self.arrivals: list[str] | None = None

    async def _post(self, engine: EngineRecord, path: str, body: dict[str, str]) -> tuple[int, bytes]:
        assert path == self._api.unload
        self.unloads.append(body["lora_name"])
        if self.arrivals is None:
            self.held = asyncio.get_running_loop().create_future()
            await self.held
        elif self.arrivals:
            engine.resident |= {self.arrivals.pop()}
            await asyncio.sleep(0)
        return 200, b""

    async def waits(self) -> "asyncio.Future[None]":
        """Return the answer to the unload that waits next."""
        for _ in range(100):
            if self.held is not None and not self.held.done():
                return self.held
            await asyncio.sleep(0)
        raise AssertionError("no unload waits")


@pytest.mark.timeout(60)
async def test_a_request_in_the_moment_in_which_an_unload_ends_does_not_stop_the_event_loop():
    server = Server("a", "b")
    first = asyncio.create_task(server.ensure(server.engine, "c"))
    (await server.waits()).set_result(None)
    second = asyncio.create_task(server.ensure(server.engine, "d"))
    await first
    (await server.waits()).set_result(None)
    await second
    assert len(server.engine.resident) == len(server.unloads) == 2


async def test_a_request_does_not_wait_for_the_loads_of_others():
    server = Server("a", "b")
    server.arrivals = [f"{number}" for number in range(1000)]
    await server.ensure(server.engine, "c")
    assert len(server.unloads) < 5


async def test_a_client_that_leaves_during_an_unload_does_not_fill_the_server():
    server = Server("a", "b")
    first = asyncio.create_task(server.ensure(server.engine, "c"))
    held = await server.waits()
    second = asyncio.create_task(server.ensure(server.engine, "d"))
    await asyncio.sleep(0)
    for leaving in (first, second):
        leaving.cancel()
    await asyncio.wait({first, second})
    held.set_result(None)
    (await server.waits()).set_result(None)
    await asyncio.sleep(0)
    assert len(server.engine.resident) == len(server.unloads) == 2
