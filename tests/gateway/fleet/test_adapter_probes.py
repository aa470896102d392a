"""Engines that die during probes of an adapter: who is blamed, and where the next probe goes."""

from collections.abc import Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import ClientOSError, ServerDisconnectedError

from gateway.fleet.adapter_probes import AdapterProber, AdapterRefused, NotProbed
from gateway.fleet.discovery.addresses import parse_address
from gateway.fleet.discovery.registry import Registry
from gateway.fleet.engines.engine import Address, EngineRecord, EngineState
from gateway.fleet.engines.own_requests import named
from gateway.fleet.engines.suspects import Suspect
from gateway.fleet.failures.deaths import ONE_DEATH_SECONDS
from gateway.fleet.failures.quarantine import Quarantine
from gateway.records.bases.base import Binding, suspect_name
from gateway.records.sql.database import Database
from gateway.records.tenants.tenants import Tenant, Tenants
from tests.gateway.fleet.failures.test_quarantine import SECRET, Clock, note_death

DIGEST = "d" * 64
URLS = ("http://one:1", "http://two:1")


class Engines:
    """Two engines that die with each probe, and the prober. probed: the URLs of the probes."""

    def __init__(self, acme: Tenant) -> None:
        self.acme = acme
        self.clock = Clock()
        self.quarantine = Quarantine(100.0, SECRET, clock=self.clock)
        self.probed: list[str] = []
        self.error: Exception = ServerDisconnectedError()

    async def start(self) -> None:
        async def discover() -> list[Address]:
            return [parse_address(url) for url in URLS]

        async def check(engine: EngineRecord) -> None:
            engine.base = Binding().base

        registry = Registry(discover, cast(Any, SimpleNamespace(check=check)))
        await registry.poll()
        self.all = {each.url: each for each in registry.engines}
        self.kept: set[str] = set()
        kinds = cast(Any, {"loraplex": self})
        self.prober = AdapterProber(registry, kinds, self.quarantine, lambda each: each.url not in self.kept)

    async def probe(self, engine: EngineRecord, digest: str, tenant_id: str, on_sent: Any) -> Any:
        self.probed.append(engine.url)
        raise self.error

    async def attempt(self, **running: Sequence[str]) -> type[Exception]:
        """Probe the adapter after a restart of all engines. running: tenants with requests, by "one" and "two".

        Return the outcome.
        """
        self.clock.now += 2 * ONE_DEATH_SECONDS
        with ExitStack() as stack:
            for url, engine in self.all.items():
                state = EngineState(instance=f"{self.clock.now}", probes=True)
                engine.observe_state(state, 0)
                engine.mark_up()
                for tenant in running.get(url[7:10], ()):
                    stack.enter_context(engine.requests.count(None, tenant)).end()
            with pytest.raises((AdapterRefused, NotProbed)) as raised:
                await self.prober.probe(self.acme, DIGEST, Binding())
        return raised.type


@pytest.fixture
async def engines(database: Database) -> Engines:
    made = Engines(await Tenants(database).create("acme", {}, "op"))
    await made.start()
    return made


@pytest.mark.parametrize("error", [ServerDisconnectedError(), ClientOSError(104, "reset")])
async def test_an_adapter_alone_on_two_engines_that_die_is_refused(engines: Engines, error: Exception):
    engines.error = error
    assert [await engines.attempt() for _ in range(3)] == [NotProbed, NotProbed, AdapterRefused]
    assert len(engines.probed) == 2


async def test_the_deaths_are_remembered_for_longer_than_the_quarantine(engines: Engines):
    for _ in range(2):
        assert await engines.attempt() is NotProbed
        engines.clock.now += 101.0
    assert await engines.attempt() is AdapterRefused


async def test_a_tenants_own_requests_do_not_excuse_its_adapter(engines: Engines):
    own = [engines.acme.id]
    assert [await engines.attempt(one=own, two=own) for _ in range(3)] == [NotProbed, NotProbed, AdapterRefused]


async def test_no_requests_of_other_tenants_get_an_adapter_refused(engines: Engines):
    """Neither those of the same tenant at each death, nor those of another one at each."""
    for tenant in "bcbc":
        assert await engines.attempt(one=[tenant], two=[tenant]) is NotProbed
    assert len(engines.probed) == 1, "after a death it waits for an engine without other tenants' requests"
    assert await engines.attempt(one="b") is NotProbed
    assert engines.probed[1:] == ["http://two:1"]
    assert await engines.attempt(two="b") is NotProbed
    assert engines.probed[2:] == ["http://one:1"]
    assert await engines.attempt() is AdapterRefused, "it was alone at two of three deaths"


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_request_that_begins_during_the_probe_may_be_the_cause(leaves: bool, engines: Engines):
    begun = ExitStack()

    async def probe(engine: EngineRecord, digest: str, tenant_id: str, on_sent: Any) -> Any:
        engines.probed.append(engine.url)
        begun.enter_context(engine.requests.count(None, "b"))
        if leaves:
            begun.close()
        raise ServerDisconnectedError

    engines.probe = probe  # type: ignore[method-assign]
    for _ in range(4):
        with begun:
            assert await engines.attempt() is NotProbed
    assert len(engines.probed) == 2, "after two shared deaths the next probe waits"
    engines.clock.now += 101.0
    with begun:
        assert await engines.attempt() is NotProbed
    assert len(engines.probed) == 3


async def test_a_kept_engine_gets_no_probe(engines: Engines):
    engines.kept.update(URLS)
    assert await engines.attempt() is NotProbed
    assert engines.probed == []
    engines.kept.discard(URLS[1])
    assert await engines.attempt() is NotProbed
    assert engines.probed == [URLS[1]]


async def test_a_quarantined_adapter_is_not_refused_for_good(engines: Engines):
    for number, url in enumerate((*URLS, "http://three:1")):
        engines.clock.now += ONE_DEATH_SECONDS
        record = EngineRecord(parse_address(url))
        note_death(engines.quarantine, record, engines.acme.id, [DIGEST], prompt=f"{number}")
    assert await engines.attempt() is NotProbed
    assert engines.probed == []
    engines.clock.now += 101.0
    assert await engines.attempt() is NotProbed
    assert len(engines.probed) == 1


async def test_deaths_on_one_base_model_refuse_no_probe_on_another(database: Database):
    acme = await Tenants(database).create("acme", {}, "op")
    quarantine = Quarantine(100.0, SECRET, clock=(clock := Clock()))

    async def discover() -> list[Address]:
        return []

    prober = AdapterProber(Registry(discover, cast(Any, None)), cast(Any, {}), quarantine)
    for own, digest in (("", "d"), ("qwen", "e")):
        mark = suspect_name(digest, own)
        for url in ("http://one:1", "http://two:1"):
            clock.now += ONE_DEATH_SECONDS
            quarantine.died(EngineRecord(parse_address(url)), acme.id, named([Suspect("probe", acme.id, mark)]))
        for base in ("", "qwen"):
            with pytest.raises(AdapterRefused if base == own else NotProbed):
                await prober.probe(acme, digest, Binding(base))
