"""Circuit breakers of an engine, by tenant and for all."""

import asyncio
from pathlib import Path

import pytest

from gateway.fleet.engines import breaker
from gateway.fleet.engines.breaker import FAILURES_UNTIL_OPEN, FIRST_PAUSE_SECONDS, MAX_TRIAL_SECONDS, Breakers
from testing.gateway.running import running, settings, until
from testing.gateway.upstream import Upstream
from testing.gateway.vllm_double import VllmDouble
from tests.gateway.api.adapters.test_adapters import files, push
from tests.gateway.fleet.failures.test_quarantine import Clock
from tests.gateway.fleet.kinds.test_vllm import key_file


def fail(breakers: Breakers, *tenant_ids: str) -> None:
    """Send a failing request of each tenant."""
    for tenant_id in tenant_ids:
        breakers.failed(breakers.sent(tenant_id))


def test_one_tenants_failures_open_a_breaker_for_it_alone():
    breakers = Breakers(Clock())
    fail(breakers, *"a" * (10 * FAILURES_UNTIL_OPEN))
    assert not breakers.allows("a")
    assert breakers.allows("b")
    assert breakers.allows_some


def test_failures_of_two_tenants_in_a_row_open_it_for_all():
    breakers = Breakers(clock := Clock())
    fail(breakers, *"ab" * FAILURES_UNTIL_OPEN)
    assert not breakers.allows("c")
    clock.now += 3600.0
    trial = breakers.sent("c")
    assert not breakers.allows("d")
    breakers.began(trial)
    breakers.succeeded(trial)
    assert breakers.allows("d")


def test_a_success_between_them_keeps_it_closed():
    breakers = Breakers(Clock())
    for _ in range(10):
        fail(breakers, "a", "b")
        breakers.succeeded(breakers.sent("c"))
    assert breakers.allows("c")


def opened() -> tuple[Breakers, Clock]:
    """Return breakers whose common one is open."""
    breakers = Breakers(clock := Clock())
    fail(breakers, *"ab" * FAILURES_UNTIL_OPEN)
    assert not breakers.allows_some
    return breakers, clock


def test_a_tenants_failures_beside_a_single_one_of_another_open_none_for_all():
    breakers = Breakers(Clock())
    fail(breakers, "b", *"a" * (10 * FAILURES_UNTIL_OPEN))
    assert breakers.allows("c")
    fail(breakers, "c")
    assert not breakers.allows_some, "of three tenants, two others failed too"


def test_a_tenant_that_fails_every_trial_blocks_no_other_one():
    breakers, clock = opened()
    for number in range(5):
        clock.now += 100.0
        assert breakers.allows("a")
        trial = breakers.sent("a")
        assert breakers.allows("c") == (number > 0), "a second trial of the tenant is its own"
        breakers.began(trial)
        breakers.failed(trial)
        assert breakers.allows("c") == (number > 0)
    trial = breakers.sent("c")
    breakers.began(trial)
    breakers.succeeded(trial)
    assert breakers.allows("d")


def test_tenants_that_fail_trials_in_turn_block_others_with_one_trial_each():
    """Only the last failed trial's tenant was remembered, so two tenants failed every trial."""
    breakers, clock = opened()
    for tenant_id in "abab":
        clock.now += 100.0
        fail(breakers, tenant_id)
    assert breakers.allows("c"), "the last two were no trials"
    breakers.succeeded(breakers.sent("c"))
    fail(breakers, *"ab" * FAILURES_UNTIL_OPEN)
    clock.now += 100.0
    fail(breakers, "a")
    assert not breakers.allows("c"), "a success gives all tenants trials again"


def test_an_engine_gets_requests_again_if_only_tenants_without_trials_use_it():
    breakers, clock = opened()
    for tenant_id in "abab":
        clock.now += 100.0
        fail(breakers, tenant_id)
    for _ in range(3):
        clock.now += 100.0
        assert breakers.allows("a")
        fail(breakers, "a")
    clock.now += 100.0
    breakers.succeeded(breakers.sent("b"))
    assert breakers.allows("a")
    assert breakers.allows("c")


def test_the_tenants_without_trials_are_limited(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(breaker, "MAX_TENANTS", 2)
    breakers, clock = opened()
    for tenant_id in "abc":
        clock.now += 100.0
        fail(breakers, tenant_id)
    clock.now += 100.0
    fail(breakers, "b")
    assert breakers.allows("d"), "b gets no trial"
    fail(breakers, "a")
    assert not breakers.allows("d"), "a was the first, and is forgotten"


def test_a_tenants_failures_beside_anothers_trial_do_not_fail_it():
    breakers, clock = opened()
    clock.now += 100.0
    trial = breakers.sent("c")
    fail(breakers, "a")
    breakers.gave_up(breakers.sent("a"))
    assert not breakers.allows("d"), "the trial runs"
    breakers.began(trial)
    assert breakers.allows("d")
    fail(breakers, "a")
    assert breakers.allows("d")
    breakers.failed(trial)
    assert not breakers.allows("d"), "the trial's answer broke"


def test_failures_of_others_take_no_trial_from_a_tenant_whose_answer_has_begun():
    """The tenant of the trial counted as the one that failed it, and the tenant that had failed one as a good one."""
    breakers, clock = opened()
    clock.now += 100.0
    fail(breakers, "a")
    clock.now += 100.0
    trial = breakers.sent("c")
    breakers.began(trial)
    fail(breakers, *"ab" * FAILURES_UNTIL_OPEN)
    assert not breakers.allows_some
    clock.now += 100.0
    fail(breakers, "a")
    assert breakers.allows("d"), "a has failed a trial"
    breakers.sent("c")
    assert not breakers.allows("d"), "c has failed none"


def test_an_earlier_request_of_the_trials_tenant_is_not_the_trial():
    """The trial was known by its tenant: each request of it ended, failed or proved the trial."""
    breakers = Breakers(clock := Clock())
    early = [breakers.sent("c") for _ in range(3)]
    fail(breakers, *"ab" * FAILURES_UNTIL_OPEN)
    clock.now += 100.0
    trial = breakers.sent("c")
    breakers.began(early[0])
    assert not breakers.allows("d")
    breakers.gave_up(early[1])
    assert not breakers.allows("d")
    breakers.failed(early[2])
    assert breakers.seconds_open == MAX_TRIAL_SECONDS
    breakers.gave_up(trial)
    trial = breakers.sent("c")
    assert not breakers.allows("d"), "c has failed no trial"
    breakers.began(trial)
    assert breakers.allows("d")


def test_a_tenants_own_trial_is_one_request():
    breakers = Breakers(clock := Clock())
    early = [breakers.sent("a") for _ in range(3)]
    fail(breakers, *"a" * FAILURES_UNTIL_OPEN)
    clock.now += FIRST_PAUSE_SECONDS
    trial = breakers.sent("a")
    breakers.began(early[0])
    breakers.gave_up(early[1])
    breakers.failed(early[2])
    assert not breakers.allows("a")
    breakers.began(trial)
    assert breakers.allows("a")


def test_the_only_tenant_gets_an_engine_back():
    breakers, clock = opened()
    for _ in range(3):
        clock.now += 100.0
        assert breakers.allows("a")
        fail(breakers, "a")
    clock.now += 100.0
    trial = breakers.sent("a")
    breakers.began(trial)
    breakers.succeeded(trial)
    assert breakers.allows("a")
    assert breakers.allows("b")


def test_a_trial_whose_client_leaves_gives_its_tenants_failures_no_weight():
    breakers, clock = opened()
    clock.now += 100.0
    trial = breakers.sent("a")
    breakers.began(trial)
    clock.now += 100.0
    breakers.gave_up(trial)
    fail(breakers, "a")
    assert breakers.allows("c")
    fail(breakers, *"ab" * FAILURES_UNTIL_OPEN)
    clock.now += 100.0
    breakers.sent("a")
    assert not breakers.allows("c"), "a has failed no trial"


@pytest.mark.parametrize("how", ["leaves late", "leaves at once", "stays"])
def test_a_trial_without_an_answer_blocks_others_once(how: str):
    """A long whole answer kept the engine from everybody, and its client could leave and send the next trial."""
    breakers, clock = opened()
    clock.now += 100.0
    trial = breakers.sent("a")
    if how == "stays":
        clock.now += MAX_TRIAL_SECONDS - 1.0
        assert not breakers.allows("c")
        clock.now += 1.0
    else:
        clock.now += FIRST_PAUSE_SECONDS if how == "leaves late" else FIRST_PAUSE_SECONDS / 2
        breakers.gave_up(trial)
    assert breakers.allows("c")
    breakers.sent("a")
    assert breakers.allows("c") == (how != "leaves at once")
    if how == "stays":
        breakers.sent("c")
        breakers.gave_up(trial)
        assert not breakers.allows("d"), "the later trial runs"


def made_breakers(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> list[Breakers]:
    """Give the breakers of later engines this clock. Return a list to which each of them is added."""
    made: list[Breakers] = []

    def make() -> Breakers:
        made.append(Breakers(clock))
        return made[-1]

    monkeypatch.setattr("gateway.fleet.engines.engine.Breakers", make)
    return made


async def test_a_trial_that_gets_no_first_byte_in_time_has_failed(
    tmp_path: Path, model_dir: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
):
    """The time-out counted as a client that left: the pause did not grow, and the tenant got the next trial too."""
    clock = Clock()
    made = made_breakers(monkeypatch, clock)
    async with (
        Upstream().serving() as upstream,
        running(settings(tmp_path, model_dir, [upstream.url], redis_url, engine_timeout=1.0)) as gateway,
    ):
        a, b, c, d = [await gateway.tenant(name, requests_per_minute=1000) for name in "abcd"]
        for tenant in (a, b) * FAILURES_UNTIL_OPEN:
            await tenant.complete(x_engine={"status": 500})
        assert (await d.complete()).error["code"] == "no_engine"
        clock.now += FIRST_PAUSE_SECONDS
        upstream.holds, before = True, len(upstream.requests)
        got = await c.complete(stream=True)
        assert (got.status, got.error["message"]) == (502, "No engine began to answer within 1 s.")
        assert len(upstream.requests) == before + 1
        clock.now += FIRST_PAUSE_SECONDS
        assert (await d.complete(stream=True)).error["code"] == "no_engine", "the second pause is twice the first"
        clock.now += FIRST_PAUSE_SECONDS
        asked = asyncio.create_task(c.complete())

        async def is_there() -> bool:
            return len(upstream.requests) == before + 2

        await until(is_there)
        assert made[-1].allows_some, "c gets no further trial"
        upstream.holds = False
        assert (await asked).status == 200
        assert (await d.complete()).status == 200


async def test_a_request_that_no_engine_of_the_kind_serves_is_no_success(
    tmp_path: Path, model_dir: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
):
    """Nothing was sent to the engine, so its breaker must not close."""
    clock = Clock()
    made = made_breakers(monkeypatch, clock)
    async with VllmDouble().serving() as vllm:
        engines = [f"vllm+{vllm.url}?key_file={key_file(tmp_path)}"]
        async with running(settings(tmp_path, model_dir, engines, redis_url, redis_timeout=30.0)) as gateway:
            acme = await gateway.tenant("acme")
            for seed, name in enumerate(("a", "b")):
                assert (await push(acme, name, files(seed))).status == 201
            [breakers] = made
            fail(breakers, *"ab" * FAILURES_UNTIL_OPEN)
            clock.now += FIRST_PAUSE_SECONDS
            assert (await acme.complete(model="a*0.5+b*0.5")).error["param"] == "model"
            assert breakers.allows("c"), "the trial is free again"
            breakers.sent("c")
            assert not breakers.allows("d"), "the breaker is half open still"
