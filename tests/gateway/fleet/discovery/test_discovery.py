"""Sources of engine addresses, and the circuit breaker of each engine."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from gateway.fleet.discovery.addresses import parse_address
from gateway.fleet.discovery.base_engines import EXACT, capacity_of
from gateway.fleet.discovery.discovery import Announcements, Discovery
from gateway.fleet.discovery.registry import Registry
from gateway.fleet.engines.breaker import FAILURES_UNTIL_OPEN, FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS, Breaker, Sent
from gateway.fleet.engines.engine import Address, EngineRecord, EngineState
from gateway.fleet.kinds.vllm import Vllm
from gateway.records.bases.base import FIRST
from gateway.redis.keys import ANNOUNCED_ENGINES_KEY
from gateway.settings import SettingsError
from testing.gateway.running import settings, until


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("http://one:8000/", Address("http://one:8000")),
        ("https://one", Address("https://one")),
        ("dns://engines.internal:8000", Address("dns://engines.internal:8000")),
        ("vllm+http://v:8000", Address("http://v:8000", Vllm.traits)),
        ("vllm+http://v:8000?requests=256&adapters=8", Address("http://v:8000", Vllm.traits, 8, 256)),
        ("vllm+http://v:8000?max_rank=16", Address("http://v:8000", Vllm.traits, max_rank=16)),
        ("vllm+dns://v:8000?adapters=8", Address("dns://v:8000", Vllm.traits, 8)),
        ("vllm+http://v?adapters=0", Address("http://v", Vllm.traits, 0)),
    ],
)
def test_addresses(text: str, address: Address):
    assert parse_address(text) == address


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("ftp://one", "http://"),
        ("http://", "http://"),
        ("vllm+announced", "http://"),
        ("dns://name", "port"),
        ("http://one?adapters=1", "options"),
        ("http://user:secret@one", "no user or password"),
        ("vllm+http://one?key_env=PATH", "LORAPLEX_ENGINES lists"),
        ("vllm+http://one?key_file=/etc/passwd", "LORAPLEX_ENGINES lists"),
        ("vllm+http://one?any_version=true", "LORAPLEX_ENGINES lists"),
        ("vllm+http://v?requests=0", "above 0"),
        ("vllm+http://v?max_rank=0", "above 0"),
        ("vllm+http://v?adaptors=4", "adapters=N"),
        ("vllm+http://v?adapters=many", "whole numbers"),
    ],
)
def test_what_is_none(text: str, part: str):
    with pytest.raises(ValueError, match=part):
        parse_address(text)


@pytest.mark.parametrize(
    ("engines", "part"),
    [
        ([], "at least one"),
        (["http://one", "http://one/"], "twice"),
        (["http://user:secret@one"], "no user or password"),
        (["vllm+http://one?key_file=/no/such/secret"], "cannot be read"),
        (["vllm+http://one?key_env=LORAPLEX_NO_SUCH_secret"], "is not set"),
        (["vllm+http://one?key_file=/dev/null"], "expected a key of ASCII characters"),
        (["vllm+http://one?secret"], "expected options"),
        (["one:8000"], "announced"),
    ],
)
def test_settings_name_what_is_wrong_and_show_no_secret(tmp_path: Path, model_dir: Path, engines: list[str], part: str):
    with pytest.raises(SettingsError, match=part) as refused:
        settings(tmp_path, model_dir, engines, "redis://unused")
    assert refused.value.field == "LORAPLEX_ENGINES"
    assert "secret" not in str(refused.value)


async def test_announced_engines_are_seen_by_all_until_they_go_or_fall_silent(redis_url: str):
    async with Redis.from_url(redis_url) as redis:
        await redis.delete(ANNOUNCED_ENGINES_KEY)
        one, other = Announcements(redis, 5.0), Announcements(redis, 5.0)
        discovery = Discovery([Address("http://fixed:1")], other)
        await one.announce("http://a:1")
        await one.announce("vllm+http://b:1?adapters=3")
        found = await discovery()
        assert set(found) == {
            Address("http://fixed:1"),
            Address("http://a:1"),
            Address("http://b:1", Vllm.traits, adapters=3),
        }
        await other.withdraw("http://a:1")
        assert await one.all() == ["vllm+http://b:1?adapters=3"]
        # Its last announcement was an hour ago, by Redis' clock.
        seconds, _ = await redis.time()
        await redis.zadd(ANNOUNCED_ENGINES_KEY, {"vllm+http://b:1?adapters=3": seconds - 3600})
        assert await one.all() == []
        assert await discovery() == [Address("http://fixed:1")]


async def test_with_redis_away_the_last_list_stays():
    class Script:
        def __init__(self) -> None:
            self.answers = [[b"http://a:1"]]

        async def __call__(self, keys: list[str], args: list[object]) -> list[bytes]:
            if not self.answers:
                raise ConnectionError
            return self.answers.pop()

    class Away:
        def register_script(self, _: str) -> Script:
            return Script()

    discovery = Discovery([], Announcements(Away(), 1.0))
    assert await discovery() == [Address("http://a:1")]
    assert await discovery() == [Address("http://a:1")]


async def test_a_name_is_looked_up_and_each_address_is_an_engine():
    found = await Discovery([parse_address("vllm+dns://localhost:8123?requests=7")], None)()
    assert Address("http://127.0.0.1:8123", Vllm.traits, requests=7) in found
    assert all(address.url.endswith(":8123") for address in found)
    assert await Discovery([parse_address("dns://no-such-name.invalid:1")], None)() == []


async def test_engines_come_and_go_without_a_restart():
    listed = [Address("http://a"), Address("http://b")]

    async def discover() -> list[Address]:
        return listed

    class Checks:
        async def check(self, engine: EngineRecord) -> None:
            engine.mark_up()

        async def follow(self, engine: EngineRecord, changed: Callable[[], None]) -> bool:
            return False

    registry = Registry(discover, Checks())
    await registry.poll()
    stays, goes = registry.engines
    listed = [listed[0], Address("http://c")]
    await registry.poll()
    assert [engine.url for engine in registry.up] == ["http://a", "http://c"]
    assert registry.engines[0] is stays
    assert not goes.available


async def test_sums_over_a_large_fleet_are_kept_for_a_moment_and_those_over_a_small_one_are_not(
    monkeypatch: pytest.MonkeyPatch,
):
    listed = [Address(f"http://{number}") for number in range(EXACT + 1)]

    async def discover() -> list[Address]:
        return listed

    class Checks:
        async def check(self, engine: EngineRecord) -> None:
            engine.mark_up()

    registry = Registry(discover, cast(Any, Checks()))
    await registry.poll()
    large = registry.of_base(FIRST)
    assert large.engines == registry.engines
    assert registry.capacity_of("another") is None
    before, ring = registry.capacity_of(FIRST), large.ring
    registry.engines[0].mark_down("test")
    assert registry.of_base(FIRST) is large
    assert registry.capacity_of(FIRST) == before == capacity_of(registry.engines)
    monkeypatch.setattr("gateway.fleet.discovery.registry.MAX_AGE", -1.0)
    assert registry.capacity_of(FIRST) == capacity_of(registry.up) != before
    # The ring changes with the engines only.
    assert registry.of_base(FIRST).ring is ring
    listed.pop()
    await registry.poll()
    assert registry.of_base(FIRST).ring is not ring
    monkeypatch.undo()
    small = registry.of_base(FIRST)
    assert registry.of_base(FIRST) is not small
    registry.engines[0].mark_down("test")
    assert registry.capacity_of(FIRST) == capacity_of(registry.up)


@pytest.mark.parametrize("number", [EXACT, EXACT + 1])
async def test_reports_of_a_large_fleet_are_merged(number: int):
    engines, calls, reports = [Address(f"http://{number}") for number in range(number)], 0, 0

    async def discover() -> list[Address]:
        return engines

    class Checks:
        async def check(self, engine: EngineRecord) -> None:
            engine.mark_up()

        async def follow(self, engine: EngineRecord, changed: Callable[[], None]) -> bool:
            nonlocal reports
            for _ in range(10):
                reports += 1
                changed()
            await asyncio.Event().wait()
            return True

    def changed() -> None:
        nonlocal calls
        calls += 1

    registry = Registry(discover, cast(Any, Checks()))
    watching = asyncio.create_task(registry.watch(changed))

    async def done() -> bool:
        return reports == 10 * number and calls > 0

    await until(done)
    # Each engine also has a first probe. All of that takes a moment, and merged calls one for each 50 ms of it.
    assert calls == 11 * number if number <= EXACT else calls <= number
    watching.cancel()


def test_older_word_of_an_engine_does_not_overwrite_newer():
    def said(instance: str, revision: int, *resident: str) -> EngineState:
        return EngineState(instance=instance, revision=revision, adapters_resident=list(resident))

    engine = EngineRecord(Address("http://a"))
    engine.observe_state(said("first", 7, "new"), 0)
    engine.observe_state(said("first", 6, "old"), 0)
    assert engine.resident == {"new"}
    engine.observe_state(said("first", 8, "newer"), 0)
    assert engine.resident == {"newer"}
    # A restart resets the counter.
    engine.observe_state(said("second", 0), 0)
    assert engine.resident == set()


def test_others_requests_are_all_but_ours():
    engine = EngineRecord(Address("http://a"))
    engine.requests.sequences = 3
    engine.observe_state(EngineState(running=4, waiting=2, max_num_seqs=8), 3)
    assert (engine.other_processes_load, engine.load, engine.slots) == (3, 6, 8)
    engine.observe_state(EngineState(running=1, waiting=0), 3)
    assert engine.other_processes_load == 0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


# A request that was sent before the breaker opened.
ANOTHER = Sent("a", 0.0)


def test_the_breaker_opens_tries_one_and_waits_longer_each_time():
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(FAILURES_UNTIL_OPEN):
        assert breaker.allows
        breaker.sent(request := Sent("a", 0.0))
        breaker.failed(request)
    pause = FIRST_PAUSE_SECONDS
    for _ in range(10):
        assert not breaker.allows
        clock.now += pause
        # A single trial request is sent, and no other until its outcome.
        assert breaker.allows
        breaker.sent(request := Sent("a", 0.0))
        assert not breaker.allows
        breaker.failed(request)
        pause = min(2 * pause, MAX_PAUSE_SECONDS)
    clock.now += pause
    breaker.sent(Sent("a", 0.0))
    breaker.succeeded()
    breaker.sent(Sent("a", 0.0))
    assert breaker.allows


def test_a_trial_that_begins_to_answer_lets_others_in_and_its_failure_opens_it_for_longer():
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(FAILURES_UNTIL_OPEN):
        breaker.failed(ANOTHER)
    clock.now += FIRST_PAUSE_SECONDS
    breaker.sent(request := Sent("a", 0.0))
    assert not breaker.allows
    # Its answer may take minutes; other requests do not wait for that.
    breaker.began(request)
    assert breaker.allows
    breaker.sent(ANOTHER)
    breaker.failed(ANOTHER)
    assert not breaker.allows
    clock.now += FIRST_PAUSE_SECONDS
    assert not breaker.allows
    clock.now += FIRST_PAUSE_SECONDS
    breaker.sent(request := Sent("a", 0.0))
    breaker.began(request)
    breaker.succeeded()
    for _ in range(FAILURES_UNTIL_OPEN - 1):
        breaker.failed(ANOTHER)
        assert breaker.allows


def test_many_requests_that_one_death_breaks_cost_one_pause():
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(FAILURES_UNTIL_OPEN + 20):
        breaker.failed(ANOTHER)
    assert not breaker.allows
    clock.now += FIRST_PAUSE_SECONDS
    assert breaker.allows


def test_a_trial_that_its_client_ends_leaves_the_place_to_the_next():
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(FAILURES_UNTIL_OPEN):
        breaker.failed(ANOTHER)
    clock.now += FIRST_PAUSE_SECONDS
    breaker.sent(request := Sent("a", 0.0))
    breaker.gave_up(request)
    assert breaker.allows


def test_a_success_between_failures_keeps_it_closed():
    breaker = Breaker(Clock())
    for _ in range(10 * FAILURES_UNTIL_OPEN):
        breaker.failed(ANOTHER)
        breaker.succeeded()
        assert breaker.allows
