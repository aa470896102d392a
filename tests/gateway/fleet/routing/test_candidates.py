"""The choice of an engine in large fleets, against the choice among all engines (`routing.choose`)."""

import random
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import pytest

from benchmarks.routing import BUSY_SECONDS, Asked, Policy, measure, ours
from benchmarks.routing import Choice as SimulatedChoice
from gateway.fleet.discovery.base_engines import EXACT, MAX_AGE, BaseEngines
from gateway.fleet.discovery.ring import Ring
from gateway.fleet.engines.engine import Address, EngineRecord, EngineState
from gateway.fleet.engines.health import Condition, Health
from gateway.fleet.routing.candidates import choose_in
from gateway.fleet.routing.choice import (
    CROWDING,
    Choice,
    Homes,
    RoutedRequest,
    adapter_seconds,
    choose,
    level,
    seconds_in_queue,
)

SLOTS = 16


def anyone(_: EngineRecord) -> bool:
    return True


def make(number: int, chance: random.Random, load: float) -> list[EngineRecord]:
    """Return engines with random requests, `load` batches on average, and 30 of 200 adapters each."""
    engines = []
    for i in range(number):
        record = EngineRecord(
            Address(f"http://engine-{i}"),
            condition=Condition(Health.UP),
            slots=SLOTS,
            other_processes_load=int(chance.expovariate(1 / (load * SLOTS))),
            request_seconds=chance.uniform(0.8, 1.2),
            state=EngineState(adapter_pages_total=32),
        )
        record.observe_resident(f"adapter-{chance.randrange(200)}" for _ in range(30))
        if chance.random() < 0.05:
            record.mark_down("test")
        engines.append(record)
    return engines


def in_progress(engines: Sequence[EngineRecord], digest: str | None) -> int:
    return sum(engine.requests.by_digest[digest] for engine in engines)


def choose_some(fleet: BaseEngines, request: RoutedRequest) -> Choice | None:
    return choose_in(fleet, request, in_progress(fleet.engines, request.digest), anyone)


def random_request(chance: random.Random, engines: Sequence[EngineRecord]) -> RoutedRequest:
    digest = None if chance.random() < 0.2 else f"adapter-{chance.randrange(250)}"
    cached = chance.choice(engines) if chance.random() < 0.5 else None
    return RoutedRequest(digest, b"%d" % chance.randrange(1000), cached, 40 * chance.random() ** 3)


@pytest.mark.parametrize("number", [1, 2, 8, EXACT])
def test_in_a_small_fleet_all_engines_are_compared(number: int):
    chance = random.Random(number)
    for _ in range(10):
        engines = make(number, chance, load=1.0)
        for _ in range(50):
            request = random_request(chance, engines)
            assert choose_some(BaseEngines(engines), request) == choose(engines, request)


class Estimate(NamedTuple):
    fullness: int
    seconds: float


def estimate(engine: EngineRecord, request: RoutedRequest, homes: Homes) -> Estimate:
    seconds = seconds_in_queue(engine) + CROWDING * level(engine)
    return Estimate(engine.fullness(), seconds + adapter_seconds(engine, request, homes, 1.0, engine.load_seconds))


@pytest.mark.parametrize(("number", "load"), [(200, 0.5), (200, 0.8), (1000, 0.8)])
def test_in_a_large_fleet_the_estimate_is_close_to_the_least_one(number: int, load: float):
    # Exponential loads are far less even than those that a good choice makes.
    chance = random.Random(number)
    random.seed(number)
    engines, excess = make(number, chance, load), []
    fleet = BaseEngines(engines)
    for _ in range(40):
        request = random_request(chance, engines)
        some, best = choose_some(fleet, request), choose(engines, request)
        assert some is not None
        assert best is not None
        assert some.engine.available
        homes = Homes(best.homes, len(best.homes))
        found, least = (estimate(each.engine, request, homes) for each in (some, best))
        assert found.fullness == least.fullness == 0
        excess.append(found.seconds - least.seconds)
    # In seconds; a request takes one, a load counts 0.1, a full batch 0.05. So no request queues that need not.
    assert sum(excess) / len(excess) < 0.02
    assert max(excess) <= 0.15


def test_an_engine_that_holds_the_adapter_gets_its_requests_wherever_it_is():
    engines = make(200, random.Random(1), load=0.2)
    for engine in engines:
        engine.observe_resident([])
    for digest in ("one", "two", "three"):
        holder = next(engine for engine in engines[50:] if engine.available and engine.load < SLOTS // 4)
        holder.observe_resident([digest])
        found = choose_some(BaseEngines(engines), RoutedRequest(digest))
        assert found is not None
        assert found.engine is holder


def test_a_conversation_returns_to_its_engine():
    engines = make(200, random.Random(2), load=0.0001)
    fleet = BaseEngines(engines)
    for cached in engines[:40]:
        found = choose_some(fleet, RoutedRequest(None, b"p", cached))
        assert found is not None
        assert (found.engine is cached) is cached.available


def test_conversations_begin_on_the_same_engine_in_every_process():
    engines = BaseEngines(make(200, random.Random(3), load=0.0001))
    others = BaseEngines(make(200, random.Random(3), load=0.0001)[::-1])
    found = Counter[str]()
    for number in range(400):
        request = RoutedRequest(None, b"conversation %d" % number)
        here, there = choose_some(engines, request), choose_some(others, request)
        assert here is not None
        assert there is not None
        assert here.engine.url == there.engine.url
        found[here.engine.url] += 1
    assert len(found) > 120
    assert max(found.values()) <= 12


def test_a_request_that_few_engines_may_get_finds_one_of_them():
    engines = make(300, random.Random(4), load=0.5)
    able = next(engine for engine in engines[100:] if engine.available)
    fleet, request = BaseEngines(engines), RoutedRequest("d")
    found = choose_in(fleet, request, 0, lambda engine: engine is able)
    assert found is not None
    assert found.engine is able
    assert choose_in(fleet, request, 0, lambda engine: False) is None
    for engine in engines:
        engine.mark_down("test")
    assert choose_in(BaseEngines(engines), request, 5, anyone) is None


def test_a_hot_adapter_has_as_many_homes_as_among_all_engines_and_its_requests_use_them():
    engines = make(200, random.Random(5), load=0.0001)
    for engine in engines:
        engine.observe_resident([])
    # 40 batches of requests in a second need 58 homes.
    request, served = RoutedRequest("hot", rate=40.0 * SLOTS), Counter[EngineRecord]()
    exact, fleet = choose(engines, request), BaseEngines(engines)
    assert exact is not None
    for _ in range(40 * SLOTS):
        found = choose_some(fleet, request)
        assert found is not None
        assert len(found.homes) <= 10
        served[found.engine] += 1
        found.engine.other_processes_load += 1
    assert 0.8 * len(exact.homes) < len(served) < 1.3 * len(exact.homes)
    assert max(served.values()) <= SLOTS


def test_an_engine_that_joins_or_leaves_moves_few_first_engines():
    engines = make(200, random.Random(6), load=0.5)
    before, after = Ring(engines), Ring(engines[:-1])
    keys = [b"%d" % number for number in range(1000)]
    moved = [key for key in keys if next(before.order(key)) is not next(after.order(key))]
    assert all(next(before.order(key)) is engines[-1] for key in moved)
    assert len(moved) < 20
    assert sorted(engine.url for engine in before.order(b"k")) == sorted(engine.url for engine in engines)
    firsts = Counter(next(before.order(b"%d" % number)).url for number in range(20_000))
    assert max(firsts.values()) < 200


def some_simulated(rate: float) -> SimulatedChoice:
    """Return the product's choice for a simulation with `rate` requests per second."""
    fleet = BaseEngines(())

    def choose_simulated(engines: list[EngineRecord], asked: Asked) -> EngineRecord | None:
        nonlocal fleet
        seconds = asked.number / rate
        if fleet.engines is not engines or seconds - fleet.made > MAX_AGE:
            fleet = BaseEngines(engines, fleet, lambda: seconds)
        choice = choose_some(fleet, RoutedRequest(asked.digest, rate=asked.rate))
        return choice.engine if choice is not None else None

    return choose_simulated


def test_a_simulated_large_fleet_loads_hardly_more_adapters_than_with_all_engines_compared():
    # Simulated time and seeded requests. The benchmark `benchmarks/scale.py` has more engines and requests.
    random.seed(7)
    rate = 0.8 * 40 / BUSY_SECONDS
    exact, some = (
        measure(Policy(choice, counts_uses=True), 2000, rate, 1.0, 0.3, 12, engines=40)
        for choice in (ours, some_simulated(rate))
    )
    assert some.loads <= 1.15 * exact.loads
    assert some.median <= 1.1 * exact.median
    assert some.worst <= 1.2 * exact.worst
