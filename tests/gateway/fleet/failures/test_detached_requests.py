"""Requests whose clients leave: they count as possible causes of an engine's death only if the engine may have them."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import ClientRequest, ServerDisconnectedError, TCPConnector

from gateway.fleet.engines import own_requests
from gateway.fleet.engines.engine import EngineRecord, EngineState
from gateway.fleet.engines.health import Health
from gateway.fleet.engines.own_requests import NamedBody
from gateway.fleet.engines.suspects import Suspect
from gateway.fleet.failures.deaths import ONE_DEATH_SECONDS
from gateway.fleet.failures.quarantine import Quarantine, Quarantined
from gateway.fleet.failures.request_names import _THREAD, INLINE_CHARS, VALUE_CHARS, RequestNames
from gateway.fleet.routing.prefetch import Prefetch
from testing.gateway.running import Gateway, running, settings, until
from testing.gateway.upstream import Upstream
from tests.gateway.fleet.failures.test_quarantine import (
    BODY,
    SECRET,
    Clock,
    die,
    engine,
    have_detached,
    is_quarantined,
    leave,
    note_death,
    restart,
)


class Connections:
    """Connections for requests to engines; those to the first engine that is tried do not open.

    ports: the engines' ports. tried: those that got a request. is_open: lets all connections open.
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


async def end_with_detached(gateway: Gateway, upstream: Upstream, asked: "asyncio.Task[Any]", instance: str) -> None:
    """Let the client of a request leave, and then another instance be at the engine's address."""
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await until(partial(have_detached, gateway))
    upstream.instance = instance

    async def is_known() -> bool:
        [engine] = (await gateway.admin.get("/admin/api/engines")).json["data"]
        return bool(engine["state"]["instance"] == instance)

    await until(is_known)


async def test_a_client_that_leaves_before_the_engine_dies_cannot_repeat_that(
    gateway: Gateway, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
):
    # Broken connections of one death would count as two then, but no connection breaks here.
    monkeypatch.setattr("gateway.fleet.failures.deaths.ONE_DEATH_SECONDS", 0.0)
    monkeypatch.setattr(own_requests, "SURVIVED_SECONDS", 60.0)
    acme = await gateway.tenant("acme")
    body = {"prompt": "what ends engines", "max_tokens": 8, "x_engine": {"delay": 60.0, "tokens": 8}}

    async def is_there() -> bool:
        return len(upstream.requests) == number

    for number in (1, 2):
        asked = asyncio.create_task(acme.complete(**body))
        await until(is_there)
        await end_with_detached(gateway, upstream, asked, f"after {number}")
    got = await acme.complete(**body)
    assert (got.status, got.error["code"]) == (422, "request_quarantined")
    assert (await acme.complete(prompt="another")).status == 200


async def test_a_client_that_leaves_while_the_gateway_connects_is_not_blamed(
    gateway: Gateway, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("gateway.fleet.failures.deaths.ONE_DEATH_SECONDS", 0.0)
    monkeypatch.setattr(own_requests, "SURVIVED_SECONDS", 60.0)
    acme = await gateway.tenant("acme")

    connections = Connections(monkeypatch, upstream.url)
    for number in (1, 2):
        asked = asyncio.create_task(acme.complete(**BODY))
        await until(partial(connections.are_tried, number))
        await end_with_detached(gateway, upstream, asked, f"after {number}")
    connections.is_open = True
    assert (await acme.complete(**BODY)).status == 200


async def test_a_request_that_waits_for_a_connection_to_a_silent_engine_is_not_blamed(
    tmp_path: Path, model_dir: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
):
    died = []
    monkeypatch.setattr(Quarantine, "died", lambda self, engine, *request: died.append(engine.url))
    async with Upstream().serving() as one, Upstream().serving() as two:
        of = settings(tmp_path, model_dir, [one.url, two.url], redis_url, engine_heartbeat_timeout=2.0)
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


async def test_the_name_of_a_detached_request_is_computed_beside_the_event_loop(
    gateway: Gateway, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
):
    """The event loop stood for the HMAC of a large body."""
    threads = note_threads(monkeypatch)
    monkeypatch.setattr("gateway.fleet.failures.request_names.INLINE_CHARS", 0)
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


def note_threads(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """Return the threads that compute names from now on."""
    threads, compute = list[threading.Thread](), RequestNames._name

    def name(self: Quarantine, *request: Any) -> list[Suspect]:
        threads.append(threading.current_thread())
        return compute(self, *request)

    monkeypatch.setattr(RequestNames, "_name", name)
    return threads


@pytest.mark.parametrize(
    "large",
    [
        {"prompt": "x" * INLINE_CHARS},
        {"prompt": [1] * (INLINE_CHARS // VALUE_CHARS)},
        {"messages": [{"role": "user", "content": "x" * (INLINE_CHARS // 8)}] * 8},
        {"guided": msgspec.Raw(b'"' + b"x" * INLINE_CHARS + b'"')},
        {"response_format": {"x" * INLINE_CHARS: 1}},
    ],
)
async def test_a_large_body_is_checked_beside_the_event_loop(large: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    quarantine = Quarantine(100.0, SECRET, clock=(clock := Clock()))
    for _ in range(2):
        die(quarantine, clock, engine(a=1))
        quarantine.died(engine(a=1), "a", quarantine.suspects("a", (), NamedBody(large)))
        await quarantine.wait_until_reported()
    threads = note_threads(monkeypatch)
    assert is_quarantined(quarantine)
    assert threads == [threading.current_thread()]
    with pytest.raises(Quarantined):
        await quarantine.check("a", (), NamedBody(large))
    assert threads[1] is not threading.current_thread()


class Bodies:
    """Left requests with large bodies, whose names wait until `go` is set. named: the prompts of those with names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.named = threading.Event(), list[str]()
        self._compute = RequestNames._name
        monkeypatch.setattr("gateway.fleet.failures.request_names.INLINE_CHARS", 1000)
        monkeypatch.setattr(RequestNames, "_name", self._name)
        self.quarantine = Quarantine(100.0, SECRET, clock=Clock())

    def _name(self, tenant_id: str, digests: Sequence[str], body: NamedBody) -> list[Suspect]:
        if threading.current_thread() is not threading.main_thread():
            assert self.go.wait(60.0)
            prompt = body.body["prompt"]
            self.named.append(prompt[0])
            if prompt.startswith("!"):
                raise ValueError(prompt)
        return self._compute(self.quarantine._names, tenant_id, digests, body)

    def leave(self, record: EngineRecord, tenant: str, prompt: str) -> None:
        body = NamedBody({"prompt": prompt * 1001})
        with record.requests.count(None, tenant, suspects=partial(self.quarantine.suspects, tenant, (), body)):
            pass

    async def settle(self) -> None:
        self.go.set()
        await asyncio.get_running_loop().run_in_executor(_THREAD, int)
        await self.quarantine.wait_until_reported()


@pytest.fixture
def bodies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bodies]:
    made = Bodies(monkeypatch)
    yield made
    made.go.set()


async def test_a_death_does_not_wait_for_the_names_of_large_bodies(bodies: Bodies, caplog: pytest.LogCaptureFixture):
    """It waited for all of them, and one that failed lost the death of all."""
    record = engine(c=1)
    leave(bodies.quarantine, record, "b")
    for prompt in ("1", "!", "2"):
        bodies.leave(record, "a", prompt)
    bodies.quarantine.note_instance_death(record)
    record.requests.forget_detached()
    [death] = bodies.quarantine._deaths.recent()
    assert death.tenants == {"a", "b", "c"}
    assert [suspect.tenant_id for suspect in bodies.quarantine._deaths._of] == ["b"]
    await bodies.settle()
    assert [(suspect.tenant_id, deaths) for suspect, deaths in bodies.quarantine._deaths._of.items()] == [
        ("b", [death]),
        ("a", [death]),
        ("a", [death]),
    ]
    assert "has no name: ValueError" in caplog.text
    assert "!!" not in caplog.text


async def test_a_retry_waits_for_the_name_of_its_death(bodies: Bodies, monkeypatch: pytest.MonkeyPatch):
    """Otherwise a request that ends engines would get a further one while other bodies are hashed."""
    monkeypatch.setattr("gateway.fleet.failures.quarantine.REPORT_SECONDS", 60.0)
    large = {"prompt": "x" * 1001}
    for url in ("http://one:1", "http://two:1"):
        bodies.quarantine.died(engine(url, a=1), "a", bodies.quarantine.suspects("a", (), NamedBody(large)))
    waits = asyncio.create_task(bodies.quarantine.wait_until_reported())
    await asyncio.sleep(0.05)
    assert not waits.done()
    bodies.go.set()
    await waits
    with pytest.raises(Quarantined):
        await bodies.quarantine.check("a", (), NamedBody(large))


async def test_large_bodies_that_wait_for_names_are_bounded(bodies: Bodies, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gateway.fleet.failures.request_names.MAX_UNNAMED", 4)
    record = engine()
    bodies.leave(record, "c", "0")
    await until(lambda: asyncio.sleep(0, not bodies.quarantine._names._unnamed._waiting))
    for tenant, prompt in ("b1", "a2", "a3", "a4", "a5", "b6"):
        bodies.leave(record, tenant, prompt)
    assert record.requests.tenants == {"a", "b", "c"}, "a tenant counts also without a name"
    bodies.quarantine.note_instance_death(record)
    await bodies.settle()
    assert bodies.named == ["0", "1", "4", "5", "6"]


@pytest.mark.parametrize("how", ["survived", "drained"])
async def test_no_name_is_computed_for_a_request_that_the_engine_survived(
    how: str, bodies: Bodies, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(own_requests, "SURVIVED_SECONDS", 0.0)
    record = engine()
    bodies.leave(record, "c", "0")
    await until(lambda: asyncio.sleep(0, not bodies.quarantine._names._unnamed._waiting))
    bodies.leave(record, "a", "1")
    if how == "survived":
        record.observe_state(EngineState(), 0)
    else:
        record.mark_down("it finishes its requests and stops", Health.DRAINING)
        record.note_end()
    await bodies.settle()
    assert bodies.named == ["0"]


async def test_no_body_is_hashed_for_other_tenants_quarantines(monkeypatch: pytest.MonkeyPatch):
    quarantine = Quarantine(100.0, SECRET, clock=(clock := Clock()))
    for _ in range(2):
        die(quarantine, clock, engine(a=1))
    assert is_quarantined(quarantine)
    monkeypatch.setattr(RequestNames, "_name", lambda *_: pytest.fail("hashed"))
    await quarantine.check("b", (), NamedBody(BODY))


@pytest.mark.parametrize("ends", ["drain", "break"])
def test_detached_requests_may_be_the_cause_until_the_instance_has_ended(ends: str):
    """A drain, or a connection that broke without a death, forgot them: the other tenant then was there alone."""
    quarantine, records = Quarantine(100.0, SECRET, clock=(clock := Clock())), [engine(a=1), engine(a=1)]
    for record in records:
        leave(quarantine, record, "b")
        if ends == "drain":
            record.mark_down("it finishes its requests and stops", Health.DRAINING)
        else:
            clock.now += ONE_DEATH_SECONDS
            note_death(quarantine, record, "b", prompt=f"{clock.now}")
        die(quarantine, clock, record)
        record.observe_state(EngineState(instance=f"{clock.now}"), 0)
        assert record.requests.tenants == {"a"}
    assert not is_quarantined(quarantine)


def test_a_tenants_detached_request_counts_at_each_death_until_the_instance_has_ended():
    """After a report of it, a later death was noted without its tenant, so that another one was there alone."""
    quarantine, record = Quarantine(100.0, SECRET, clock=(clock := Clock())), engine()
    leave(quarantine, record, "b")
    die(quarantine, clock, record)
    assert quarantine._deaths.recent()[-1].tenants == {"a", "b"}
    restart(quarantine, record, clock)
    assert quarantine._deaths.recent()[-1].tenants == {"b"}
    assert [len(deaths) for deaths in quarantine._deaths._of.values()] == [1, 1], "its request counts at one death"


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


@pytest.mark.parametrize("error", [ServerDisconnectedError, TimeoutError])
async def test_a_hint_that_breaks_may_be_the_cause_of_the_death(error: type[Exception]):
    """It counted no more when the other tenant's request broke just after it, and that tenant alone was blamed."""
    quarantine = Quarantine(100.0, SECRET, clock=(clock := Clock()))
    records = [engine(a=1), engine("http://two:1", a=1)]

    async def send(record: EngineRecord, digest: str, tenant_id: str) -> bool:
        raise error

    prefetch = Prefetch(send)
    for record in records:
        prefetch.hint(record, ["d"], "b")
        await until(lambda: asyncio.sleep(0, not prefetch._tasks))
        die(quarantine, clock, record)
        assert [death.tenants for death in quarantine._deaths.recent()][-1] == {"a", "b"}
        record.observe_state(EngineState(instance="next"), 0)
        assert record.requests.tenants == {"a"}
    assert not is_quarantined(quarantine)
