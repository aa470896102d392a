"""Requests whose clients leave: they count as possible causes of an engine's death only if the engine may have them."""

import asyncio
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientRequest, TCPConnector

from gateway.fleet import own_requests
from gateway.fleet.engine import EngineRecord, EngineState
from gateway.fleet.health import Health
from gateway.fleet.prefetch import Prefetch
from gateway.fleet.quarantine import ONE_DEATH_SECONDS, Quarantine
from gateway.fleet.shared_deaths import Suspect
from testing.gateway.running import Gateway, running, settings, until
from testing.gateway.upstream import Upstream
from tests.gateway.fleet.test_quarantine import BODY, SECRET, Clock, die, engine, have_left, is_quarantined, leave


class Connections:
    """Connections for requests to engines; those to the first engine that is tried do not open.

    ports: of the engines. tried: those that got a request. is_open: lets all connections open.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *urls: str) -> None:
        self.ports = [int(url.rsplit(":", 1)[1]) for url in urls]
        self.tried: list[int] = []
        self.is_open = False
        connect = TCPConnector.connect

        async def hang(connector: TCPConnector, request: ClientRequest, **others: Any) -> Any:
            port = request.url.port
            if request.method == "POST" and port in self.ports and not self.is_open:
                self.tried.append(port)
                if port == self.tried[0]:
                    await asyncio.Event().wait()
            return await connect(connector, request, **others)

        monkeypatch.setattr(TCPConnector, "connect", hang)

    async def are_tried(self, number: int) -> bool:
        return len(self.tried) == number


async def test_a_client_that_leaves_while_the_gateway_connects_is_not_blamed(
    gateway: Gateway, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("gateway.fleet.quarantine.ONE_DEATH_SECONDS", 0.0)
    monkeypatch.setattr(own_requests, "LEFT_SECONDS", 60.0)
    acme = await gateway.tenant("acme")

    async def is_known() -> bool:
        [engine] = (await gateway.admin.get("/admin/api/engines")).json["data"]
        return bool(engine["state"]["instance"] == upstream.instance)

    connections = Connections(monkeypatch, upstream.url)
    for number in (1, 2):
        asked = asyncio.create_task(acme.complete(**BODY))
        await until(partial(connections.are_tried, number))
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await until(partial(have_left, gateway))
        upstream.instance = f"after {number}"
        await until(is_known)
    connections.is_open = True
    assert (await acme.complete(**BODY)).status == 200


async def test_a_request_that_waits_for_a_connection_to_a_silent_engine_is_not_blamed(
    tmp_path: Path, model_dir: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
):
    died = []
    monkeypatch.setattr(Quarantine, "died", lambda self, engine, *request: died.append(engine.url))
    async with Upstream().serving() as one, Upstream().serving() as two:
        of = settings(tmp_path, model_dir, [one.url, two.url], redis_url, engine_silence=2.0)
        async with running(of) as gateway:
            acme = await gateway.tenant("acme")

            async def listened_to() -> bool:
                return one.followers == two.followers == 1

            await until(listened_to)
            connections = Connections(monkeypatch, one.url, two.url)
            asking = asyncio.create_task(acme.complete())
            await until(partial(connections.are_tried, 1))
            silent = one if one.url.endswith(f":{connections.tried[0]}") else two
            silent.mute = True
            try:
                got = await asyncio.wait_for(asking, 60.0)
            finally:
                silent.mute = False
            assert got.status == 200
            assert len(one.requests) + len(two.requests) == 1
            assert died == []


async def test_the_name_of_a_left_request_is_computed_beside_the_event_loop(
    gateway: Gateway, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
):
    """The event loop stood for the HMAC of a large body."""
    threads = []
    suspects = Quarantine.suspects

    def named(self: Quarantine, *request: Any) -> list[Suspect]:
        threads.append(threading.current_thread())
        return suspects(self, *request)

    monkeypatch.setattr(Quarantine, "suspects", named)
    acme = await gateway.tenant("acme")
    asked = asyncio.create_task(acme.complete(max_tokens=8, x_engine={"delay": 60.0, "tokens": 8}))

    async def is_there() -> bool:
        return len(upstream.requests) == 1

    async def is_named() -> bool:
        return len(threads) == 1

    await until(is_there)
    asked.cancel()
    await until(is_named)
    assert threads[0] is not threading.current_thread()


async def test_no_body_is_hashed_for_other_tenants_quarantines(monkeypatch: pytest.MonkeyPatch):
    quarantine = Quarantine(100.0, SECRET, clock=(clock := Clock()))
    for _ in range(2):
        die(quarantine, clock, engine(a=1))
    assert is_quarantined(quarantine)
    monkeypatch.setattr(Quarantine, "suspects", lambda *_: pytest.fail("hashed"))
    quarantine.check("b", (), BODY)


@pytest.mark.parametrize("ends", ["drain", "break"])
def test_left_requests_may_be_the_cause_until_the_instance_has_ended(ends: str):
    """A drain, or a connection that broke without a death, forgot them: the other tenant then was there alone."""
    quarantine, records = Quarantine(100.0, SECRET, clock=(clock := Clock())), [engine(a=1), engine(a=1)]
    for record in records:
        leave(quarantine, record, "b")
        if ends == "drain":
            record.mark_down("it finishes its requests and stops", Health.DRAINING)
        else:
            clock.now += ONE_DEATH_SECONDS
            quarantine.died(record, "b", (), BODY | {"prompt": f"{clock.now}"})
        die(quarantine, clock, record)
        record.observe_state(EngineState(instance=f"{clock.now}"), 0)
        assert record.requests.tenants == {"a"}
    assert not is_quarantined(quarantine)


async def test_a_hint_may_be_the_cause_while_the_engine_loads_its_adapter():
    records, tenants = [engine(a=1)], list[set[str]]()

    async def send(record: EngineRecord, digest: str, tenant_id: str) -> bool:
        tenants.append({*record.requests.tenants})
        return True

    prefetch = Prefetch(send)
    prefetch.hint(records[0], ["d"], "b")
    await until(lambda: asyncio.sleep(0, len(tenants) == 1))
    assert tenants == [{"a", "b"}]
    await until(lambda: asyncio.sleep(0, records[0].requests.tenants == {"a"}))
