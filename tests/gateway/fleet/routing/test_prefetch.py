"""Hints to engines while requests wait in the queue."""

import asyncio
import logging
from pathlib import Path

import pytest
from aiohttp import ClientError

from gateway.fleet.engines.engine import Address, EngineRecord
from gateway.fleet.engines.health import Condition, Health
from gateway.fleet.kinds.vllm import Vllm
from gateway.fleet.routing.choice import RoutedRequest, choose
from gateway.fleet.routing.prefetch import MAX_OF_TENANT, Prefetch
from testing.gateway.running import running, settings, until
from testing.gateway.upstream import Upstream
from tests.gateway.api.adapters.test_adapters import files, push


def up(url: str) -> EngineRecord:
    return EngineRecord(Address(url), condition=Condition(Health.UP))


def chosen(engines: list[EngineRecord]) -> EngineRecord:
    found = choose(engines, RoutedRequest("d"))
    assert found is not None
    return found.engine


class Hints:
    """Records hints. Each is answered after `answers`. broken: whether engines accept none."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, str, str]] = []
        self.answers = asyncio.Event()
        self.broken = self.refuses = False
        self.prefetch = Prefetch(self._send)

    async def _send(self, engine: EngineRecord, digest: str, tenant_id: str) -> bool:
        self.sent.append((engine.url, digest, tenant_id))
        await self.answers.wait()
        if self.broken:
            raise ClientError
        return not self.refuses

    async def settled(self) -> None:
        self.answers.set()
        for _ in range(5):
            await asyncio.sleep(0)


async def test_a_hint_is_sent_once_and_makes_its_engine_the_choice():
    hints, engines = Hints(), [up(f"http://{name}") for name in "abcd"]
    first = chosen(engines)
    other = next(engine for engine in engines if engine is not first)
    hints.prefetch.hint(other, ["d"], "acme")
    hints.prefetch.hint(other, ["d"], "globex")
    assert chosen(engines) is other
    await hints.settled()
    hints.prefetch.hint(other, ["d"], "acme")
    assert hints.sent == [(other.url, "d", "acme")]
    assert chosen(engines) is other


@pytest.mark.parametrize("fault", ["broken", "refuses"])
async def test_a_hint_that_is_not_followed_does_not_count(fault: str, caplog: pytest.LogCaptureFixture):
    hints, engines = Hints(), [up(f"http://{name}") for name in "abcd"]
    setattr(hints, fault, True)
    first = chosen(engines)
    other = next(engine for engine in engines if engine is not first)
    hints.prefetch.hint(other, ["d", "e"], "acme")
    await hints.settled()
    assert chosen(engines) is first
    assert [r.levelno for r in caplog.records] == ([logging.WARNING] if fault == "broken" else [])
    # It is not repeated at once either.
    hints.prefetch.hint(other, ["d"], "acme")
    assert len(hints.sent) == 2


async def test_hints_of_a_tenant_are_limited_and_foreign_servers_get_none():
    hints, engine = Hints(), up("http://a")
    hints.prefetch.hint(engine, [f"d{i}" for i in range(2 * MAX_OF_TENANT)], "hostile")
    hints.prefetch.hint(engine, ["mine"], "acme")
    hints.prefetch.hint(EngineRecord(Address("http://vllm", Vllm.traits)), ["mine"], "acme")
    await asyncio.sleep(0)
    assert [tenant for _, _, tenant in hints.sent] == ["hostile"] * MAX_OF_TENANT + ["acme"]
    await hints.settled()
    hints.prefetch.hint(engine, ["another"], "hostile")
    await asyncio.sleep(0)
    assert hints.sent[-1] == ("http://a", "another", "hostile")
    await hints.prefetch.close()


async def test_a_request_that_waits_at_the_gate_is_loaded_ahead(tmp_path: Path, model_dir: Path, redis_url: str):
    async with Upstream().serving() as engine:
        engine.seats = 1
        async with running(settings(tmp_path, model_dir, [engine.url], redis_url, redis_timeout=30.0)) as gateway:
            acme = await gateway.tenant("acme")
            for seed, name in enumerate(("a", "b")):
                assert (await push(acme, name, files(seed))).status == 201
            engine.holds = True
            # Two requests take the places: one batch, and another behind it.
            first = [asyncio.create_task(acme.complete(model="a", max_tokens=2)) for _ in range(2)]

            async def both_there() -> bool:
                return len(engine.requests) == 2

            await until(both_there)
            assert engine.hints == []
            waits = asyncio.create_task(acme.complete(model="b", max_tokens=2))

            async def hinted() -> bool:
                return bool(engine.hints)

            await until(hinted)
            assert len(engine.requests) == 2
            engine.holds = False
            assert [got.status for got in await asyncio.gather(*first, waits)] == [200] * 3
            digest = engine.requests[-1][1]["model"]
            [(adapter, tenant)] = engine.hints
            assert adapter == digest
            assert tenant == engine.requests[-1][0]["x-loraplex-tenant"]
