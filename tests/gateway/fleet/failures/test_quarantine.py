"""A tenant's bad requests beside others: an engine's breaker, and requests that kill engines."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.errors import UpstreamFailed
from gateway.fleet.calls.call import EngineGone, EngineRefused
from gateway.fleet.discovery.addresses import parse_address
from gateway.fleet.discovery.registry import Registry
from gateway.fleet.engines import own_requests
from gateway.fleet.engines.breaker import FAILURES_UNTIL_OPEN
from gateway.fleet.engines.engine import Address, EngineRecord, EngineState
from gateway.fleet.engines.health import Health
from gateway.fleet.engines.own_requests import NamedBody
from gateway.fleet.failures.deaths import LIMITS, ONE_DEATH_SECONDS
from gateway.fleet.failures.quarantine import Quarantine, Quarantined
from testing.gateway.running import Gateway, running, settings, until
from testing.gateway.upstream import Upstream
from tests.gateway.api.adapters.test_adapters import files, push

SECRET = b"of the tests"
BODY: dict[str, Any] = {"prompt": "what ends engines", "max_tokens": 5}


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def engine(url: str = "http://one:1", others: int = 0, **tenants: int) -> EngineRecord:
    record = EngineRecord(parse_address(url))
    record.other_processes_load, record.requests.by_tenant = others, Counter(tenants)
    return record


def die(quarantine: Quarantine, clock: Clock, at: EngineRecord, tenant: str = "a", digests: Sequence[str] = ()) -> None:
    clock.now += ONE_DEATH_SECONDS
    note_death(quarantine, at, tenant, digests)


def note_death(
    quarantine: Quarantine,
    record: EngineRecord,
    tenant: str,
    digests: Sequence[str] = (),
    instance: str | None = None,
    **body: Any,
) -> None:
    """Note that an engine died with a tenant's request. body: its fields that differ from BODY."""
    names = quarantine.suspects(tenant, digests, NamedBody(BODY | body))
    quarantine.died(record, tenant, names, instance)


def tenants_at_deaths(quarantine: Quarantine, tenant: str = "a") -> list[set[str]]:
    """Return the tenants at each death of the tenant's request."""
    key, *_ = quarantine.suspects(tenant, (), NamedBody(BODY)).result()
    return [death.tenants for death in quarantine.deaths(key)]


def is_quarantined(quarantine: Quarantine, tenant: str = "a", digests: Sequence[str] = (), **body: Any) -> bool:
    check = quarantine.check(tenant, digests, NamedBody(BODY | body))
    try:
        # The check of a small body never waits.
        check.send(None)
    except Quarantined:
        return True
    except StopIteration:
        return False
    raise AssertionError("the check waited")


def test_a_request_is_quarantined_after_its_second_death_for_a_time(clock: Clock):
    counted: list[str] = []
    quarantine = Quarantine(100.0, SECRET, count=counted.append, clock=clock)
    die(quarantine, clock, engine(a=3))
    assert not is_quarantined(quarantine)
    die(quarantine, clock, engine(a=1))
    assert is_quarantined(quarantine)
    assert is_quarantined(quarantine, user="another", stream=True, priority=3, ttft_target=1.0)
    assert not is_quarantined(quarantine, prompt="something else")
    assert not is_quarantined(quarantine, tenant="b")
    assert counted == ["request"]
    clock.now += 101.0
    assert not is_quarantined(quarantine)


def test_deaths_that_are_forgotten_count_no_more(clock: Clock):
    """A request was quarantined by one new death after two that were older than the quarantine's time."""
    quarantine = Quarantine(100.0, SECRET, clock=clock)
    die(quarantine, clock, engine(a=1))
    die(quarantine, clock, engine(a=1))
    clock.now += 101.0
    die(quarantine, clock, engine(a=1))
    assert not is_quarantined(quarantine)
    die(quarantine, clock, engine(a=1))
    assert is_quarantined(quarantine)


def test_many_connections_that_break_at_once_are_one_death(clock: Clock):
    quarantine = Quarantine(100.0, SECRET, clock=clock)
    record = engine(a=5)
    for _ in range(5):
        note_death(quarantine, record, "a")
    assert not is_quarantined(quarantine)


@pytest.mark.parametrize(
    ("deaths", "expected"),
    [
        # With two tenants at each death, neither can be blamed.
        ([engine(a=1, b=1), engine(a=1, b=1), engine(a=1, b=1)], False),
        ([engine(a=1, b=1), engine(a=1, c=1)], True),
        ([engine(a=1, others=2), engine(a=1, others=1)], False),
        ([engine(a=1, others=2), engine(a=1)], True),
    ],
)
def test_no_tenant_puts_anothers_requests_into_quarantine(deaths: list[EngineRecord], expected: bool, clock: Clock):
    quarantine = Quarantine(100.0, SECRET, clock=clock)
    for record in deaths:
        die(quarantine, clock, record)
    assert is_quarantined(quarantine) == expected


def test_other_gateways_requests_count_though_the_engine_is_marked_down_first(clock: Clock):
    """Its health check or the broken request itself marks it before the death is noted, while Redis is away."""
    quarantine, record = Quarantine(100.0, SECRET, clock=clock), engine(a=1)
    for number in range(2):
        record.observe_state(EngineState(instance=f"{number}", running=3), 1)
        record.mark_down("a request failed")
        record.mark_down("its health check failed")
        die(quarantine, clock, record)
    assert not is_quarantined(quarantine)
    for number in (3, 4):
        record.observe_state(EngineState(instance=f"{number}", running=1), 1)
        record.mark_down("a request failed")
        die(quarantine, clock, record)
    assert is_quarantined(quarantine)


def leave(quarantine: Quarantine, record: EngineRecord, tenant: str) -> None:
    """Count a tenant's request that ends because its client leaves."""
    suspects = partial(quarantine.suspects, tenant, (), NamedBody(BODY))
    with pytest.raises(asyncio.CancelledError), record.requests.count(None, tenant, suspects=suspects):
        raise asyncio.CancelledError


def restart(quarantine: Quarantine, record: EngineRecord, clock: Clock) -> None:
    """Let an engine report another instance than before."""
    clock.now += ONE_DEATH_SECONDS
    record.on_end = quarantine.note_instance_death
    record.observe_state(EngineState(instance=f"{clock.now}"), 0)


def test_a_request_that_was_left_may_be_the_cause(clock: Clock):
    """Otherwise a tenant that sends what ends engines and leaves would put another tenant into quarantine."""
    quarantine, records = Quarantine(100.0, SECRET, clock=clock), [engine(a=1) for _ in range(3)]
    for record in records[:2]:
        leave(quarantine, record, "b")
        die(quarantine, clock, record)
    assert not is_quarantined(quarantine)
    assert not is_quarantined(quarantine, tenant="b")
    die(quarantine, clock, records[2])
    assert is_quarantined(quarantine)


def test_a_request_that_was_left_alone_on_engines_that_then_died_is_quarantined(clock: Clock):
    """No request breaks then: only the engine's next instance shows the death."""
    quarantine, records = Quarantine(100.0, SECRET, clock=clock), [engine() for _ in range(3)]
    leave(quarantine, records[0], "a")
    restart(quarantine, records[0], clock)
    restart(quarantine, records[0], clock)
    assert not is_quarantined(quarantine)
    leave(quarantine, records[1], "a")
    records[1].mark_down("it finishes its requests and stops", Health.DRAINING)
    records[1].observe_state(EngineState(draining=True), 0)
    leave(quarantine, records[1], "a")
    restart(quarantine, records[1], clock)
    assert not is_quarantined(quarantine)
    leave(quarantine, records[2], "a")
    restart(quarantine, records[2], clock)
    assert is_quarantined(quarantine)
    assert not is_quarantined(quarantine, prompt="something else")


def test_a_detached_request_that_the_engine_survived_is_forgotten(clock: Clock, monkeypatch: pytest.MonkeyPatch):
    quarantine, record = Quarantine(100.0, SECRET, clock=clock), engine()
    leave(quarantine, record, "a")
    record.observe_state(EngineState(), 0)
    assert record.requests.tenants == {"a"}, "the report may have been on its way when the client left"
    monkeypatch.setattr(own_requests, "SURVIVED_SECONDS", 0.0)
    record.observe_state(EngineState(), 0)
    assert not record.requests.tenants
    with record.requests.count(None, "a") as request:
        request.end()
    assert not record.requests.tenants
    with pytest.raises(EngineGone), record.requests.count(None, "a") as request, request.ending_with(EngineGone):
        raise EngineGone(may_have_read=False)
    assert not record.requests.tenants
    with pytest.raises(EngineRefused), record.requests.count(None, "a") as request, request.ending_with(EngineRefused):
        raise EngineRefused(UpstreamFailed("no answer in time"))
    assert record.requests.tenants == {"a"}
    record.observe_state(EngineState(readings=7), 0)
    leave(quarantine, record, "a")
    record.observe_state(EngineState(readings=7), 0)
    assert record.requests.tenants == {"a"}, "this report repeats the one before, because a step has not ended"
    record.observe_state(EngineState(readings=8), 0)
    assert not record.requests.tenants
    monkeypatch.setattr(own_requests, "MAX_DETACHED", 10)
    for _ in range(11):
        leave(quarantine, record, "a")
    assert len(record.requests._detached["a"]) == 10
    tenants, names = record.requests.report_detached()
    assert tenants == {"a"}
    assert [each.result() for each in names] == 10 * [quarantine.suspects("a", (), NamedBody(BODY)).result()]
    assert record.requests.report_detached() == ({"a"}, []), "the tenant counts at each death, its requests at one"


@pytest.mark.parametrize("health", [Health.DOWN, Health.UP])
async def test_detached_requests_count_if_the_dead_engine_disappears(health: Health, clock: Clock):
    """Its next instance may have another address."""
    quarantine, listed = Quarantine(100.0, SECRET, clock=clock), list[Address]()

    async def discover() -> list[Address]:
        return listed

    async def check(_: EngineRecord) -> None: ...

    registry = Registry(discover, cast(Any, SimpleNamespace(check=check)))
    registry.on_end = quarantine.note_instance_death
    for number in range(2):
        listed.append(parse_address(f"http://engine-{number}:1"))
        await registry.poll()
        [record] = registry.engines
        leave(quarantine, record, "a")
        record.condition.change(health, "")
        clock.now += ONE_DEATH_SECONDS
        listed.clear()
        await registry.poll()
    assert is_quarantined(quarantine) == (health is Health.DOWN)


def test_a_tenants_suspects_make_no_room_for_its_own_at_others_expense(clock: Clock, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gateway.fleet.failures.deaths.MAX_SUSPECTS", 100)
    quarantine, record = Quarantine(100.0, SECRET, clock=clock), engine(a=1)
    die(quarantine, clock, record)
    for number in range(150):
        note_death(quarantine, engine("http://two:1", b=1), "b", prompt=f"{number}")
    die(quarantine, clock, record)
    assert is_quarantined(quarantine)
    assert len(quarantine._deaths._of) == 100


def test_an_adapter_is_quarantined_for_its_tenant(clock: Clock):
    quarantine = Quarantine(100.0, SECRET, clock=clock)
    for number in range(LIMITS["adapter"]):
        assert not is_quarantined(quarantine, digests=["d"], prompt="never seen")
        clock.now += ONE_DEATH_SECONDS
        note_death(quarantine, engine(a=1), "a", ["d", f"{number}"], prompt=f"{number}")
    assert is_quarantined(quarantine, digests=["d"], prompt="never seen")
    assert is_quarantined(quarantine, digests=["c", "d"], prompt="never seen"), "a mixture with it"
    assert not is_quarantined(quarantine, digests=["e"], prompt="never seen")
    assert not is_quarantined(quarantine, tenant="b", digests=["d"], prompt="never seen")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tenant_that_leaves_before_engines_die_does_not_put_another_into_quarantine(
    stream: bool, tmp_path: Path, model_dir: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
):
    # Longer than a slow machine needs.
    monkeypatch.setattr(own_requests, "SURVIVED_SECONDS", 60.0)
    monkeypatch.setattr("gateway.fleet.failures.isolation.WAIT_SECONDS", 0.5)
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(Upstream().serving()) for _ in range(2)]
        of = settings(tmp_path, model_dir, [each.url for each in engines], redis_url, redis_timeout=30.0)
        gateway = await stack.enter_async_context(running(of))
        acme, other = await gateway.tenant("acme"), await gateway.tenant("other")
        # A stream has begun when its client leaves.
        slow = {"max_tokens": 8, "stream": stream, "x_engine": {"tokens": 8, "delay": 0.5 if stream else 10.0}}
        asked = [asyncio.create_task(other.complete(prompt=f"{i}", **slow)) for i in range(8)]

        async def have_some() -> bool:
            return all(each.events if stream else each.requests for each in engines)

        await until(have_some)
        for each in asked:
            each.cancel()
        await until(partial(have_detached, gateway))
        for each in engines:
            each.refuses = None
        assert (await acme.complete()).status == 503
        for each in engines:
            each.refuses = False
        await gateway.engines_up(2)
        assert (await acme.complete()).error["code"] == "request_suspected", "each engine may still have detached ones"
        monkeypatch.setattr(own_requests, "SURVIVED_SECONDS", 0.0)
        monkeypatch.setattr("gateway.fleet.failures.isolation.WAIT_SECONDS", 60.0)
        assert (await acme.complete()).status == 200


async def have_detached(gateway: Gateway) -> bool:
    return "loraplex_gateway_http_in_flight 1.0" in (await gateway.admin.get("/metrics")).body.decode()


async def test_a_request_that_kills_engines_is_answered_without_one(
    tmp_path: Path, model_dir: Path, redis_url: str, caplog: pytest.LogCaptureFixture
):
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(Upstream().serving()) for _ in range(3)]
        of = settings(tmp_path, model_dir, [each.url for each in engines], redis_url, redis_timeout=30.0)
        gateway = await stack.enter_async_context(running(of))
        acme, other = await gateway.tenant("acme"), await gateway.tenant("other")
        for each in engines:
            each.refuses = None
        assert (await acme.complete(prompt="a secret of acme")).status == 502
        for each in engines:
            each.refuses = False
        got = await acme.complete(prompt="a secret of acme")
        assert (got.status, got.error["code"]) == (422, "request_quarantined")
        assert int(got.headers["Retry-After"]) > 60
        assert sum(len(each.requests) for each in engines) == 2
        await gateway.engines_up(3)
        assert (await acme.complete(prompt="another")).status == 200
        assert (await other.complete(prompt="a secret of acme")).status == 200
        page = (await gateway.admin.get("/metrics")).body.decode()
        assert 'loraplex_gateway_quarantined_total{kind="request"} 1.0' in page
    assert "a secret" not in caplog.text


@pytest.mark.parametrize("how", [{"drop_after": 1}, {"status": 500}])
async def test_a_tenant_whose_requests_fail_takes_no_engine_from_others(
    how: dict[str, int], gateway: Gateway, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
):
    # The breaker stays open for the whole test, however slow the machine.
    monkeypatch.setattr("gateway.fleet.engines.breaker.FIRST_PAUSE_SECONDS", 600.0)
    monkeypatch.setattr("gateway.fleet.engines.breaker.MAX_PAUSE_SECONDS", 600.0)
    bad, good = await gateway.tenant("bad"), await gateway.tenant("good")
    for _ in range(2 * FAILURES_UNTIL_OPEN):
        await bad.complete(stream=True, x_engine=how)
    assert (await bad.complete()).error["code"] in ("no_engine", "request_quarantined")
    assert (await good.complete()).status == 200


async def test_an_adapters_fault_is_no_failure_of_the_engine(gateway: Gateway, upstream: Upstream):
    acme = await gateway.tenant("acme", requests_per_minute=100)
    await push(acme, "mine", files())
    upstream.refuses = (500, "adapter_refused")
    for _ in range(2 * FAILURES_UNTIL_OPEN):
        got = await acme.complete(model="mine")
        assert (got.status, got.error["code"]) == (400, "adapter_refused")
    upstream.refuses = False
    assert (await acme.complete(model="mine")).status == 200


@pytest.mark.parametrize("refusal", [(503, "adapter_files_unreadable"), (404, "model_not_found")])
async def test_an_adapter_store_that_fails_closes_no_engine(
    refusal: tuple[int, str], gateway: Gateway, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("gateway.fleet.engines.breaker.FIRST_PAUSE_SECONDS", 600.0)
    tenants = [await gateway.tenant(name, requests_per_minute=100) for name in ("acme", "globex")]
    for tenant in tenants:
        await push(tenant, "mine", files())
    upstream.refuses = refusal
    for _ in range(FAILURES_UNTIL_OPEN):
        for tenant in tenants:
            assert (await tenant.complete(model="mine")).status in (502, 503)
    upstream.refuses = False
    for tenant in tenants:
        assert (await tenant.complete()).status == 200
