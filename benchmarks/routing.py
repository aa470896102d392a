"""Cost of the choice of an engine: adapter loads and time to first token of each policy on the same requests.

    python -m benchmarks.routing [--requests 20000] [--places 32] [--out docs/perf/FILE.md]

A discrete-event simulation around the gateway's own `choose`, `Rates` and `EngineRecord` and the engine's `UseCounts`:
4 engines, 500 adapters of zipf popularity, fewer places for adapters. Like ours, a simulated engine runs batches in
steps, loads one adapter at a time beside them, evicts an adapter that no request uses, and makes a request wait if all
places are in use. The gateway learns which engine holds which adapter 50 ms later, and its own requests at once.
Nothing here depends on the machine: the same seed gives the same table.

The last row of each table is the least possible number of loads: one pool of all places, which knows all future
requests and evicts the adapter whose next request is last (Belady 1966). No routing and no eviction can load less.

A second table has one adapter that becomes popular: the time until it is on three engines.
"""

import argparse
import heapq
import itertools
import random
from bisect import bisect
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from adapters.use_counts import UseCounts
from benchmarks.report_file import publish
from gateway.fleet.engines.engine import Address, EngineRecord, EngineState
from gateway.fleet.engines.health import Condition, Health
from gateway.fleet.routing.choice import (
    ADAPTER_LOAD_COST,
    CROWDING,
    Rates,
    RoutedRequest,
    choose,
    level,
    rank,
    seconds_in_queue,
)

ENGINES, ADAPTERS, PLACES, SLOTS = 4, 500, 32, 16
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 64
# Seconds of a step: fixed, per sequence in it, per prompt token. Measured on our engine with two CPU cores.
STEP, STEP_SEQUENCE, STEP_PROMPT_TOKEN = 0.008, 0.0006, 0.00025
# Seconds between two reports of an engine on its adapters.
PUSH_SECONDS = 0.05


@dataclass(slots=True)
class Request:
    arrival: float
    digest: str
    tokens: int
    first_token: float = 0.0
    made: int = 0
    # Ends the request's count in the engine's record.
    counted: ExitStack = field(default_factory=ExitStack)


@dataclass
class Engine:
    """A simulated engine and the gateway's knowledge of it."""

    record: EngineRecord
    load_seconds: float
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    # Digests on the device, least recently used first.
    resident: OrderedDict[str, None] = field(default_factory=OrderedDict)
    # Places for adapters, and the counts by which adapters are evicted; None: the least recently used one is.
    places: int = PLACES
    uses: UseCounts | None = None
    loading: str | None = None
    stepping: bool = False
    loads: int = 0

    def room_for_another(self) -> bool:
        """Free a slot for an adapter if there is none; return False if every slot is in use."""
        if len(self.resident) < self.places:
            return True
        used = {request.digest for request in self.running}
        idle = [digest for digest in self.resident if digest not in used]
        if not idle:
            return False
        del self.resident[idle[0] if self.uses is None else min(idle, key=self.uses.score)]
        return True


@dataclass(frozen=True)
class Asked:
    """A request to choose an engine for. rate: the adapter's requests per second."""

    number: int
    digest: str
    rate: float


Choice = Callable[[list[EngineRecord], Asked], EngineRecord | None]


def round_robin(engines: list[EngineRecord], asked: Asked) -> EngineRecord:
    return engines[asked.number % len(engines)]


def least_loaded(engines: list[EngineRecord], asked: Asked) -> EngineRecord:
    return min(engines, key=lambda engine: engine.requests.in_flight)


def pure_hash(engines: list[EngineRecord], asked: Asked) -> EngineRecord:
    return min(engines, key=lambda engine: rank(asked.digest.encode(), engine.url))


def before(engines: list[EngineRecord], asked: Asked) -> EngineRecord:
    """Choose as the release of 2026-11-21 did: without homes, and without the loads that an engine has to make."""
    request_seconds = sum(engine.request_seconds for engine in engines) / len(engines)
    load_seconds = sum(engine.load_seconds for engine in engines) / len(engines)

    def order(engine: EngineRecord) -> tuple[int, float, bytes]:
        seconds = seconds_in_queue(engine) + CROWDING * level(engine) * request_seconds
        if not engine.holds(asked.digest):
            seconds += ADAPTER_LOAD_COST * load_seconds
        return engine.fullness(), seconds, rank(asked.digest.encode(), engine.url)

    return min(engines, key=order)


def ours(engines: list[EngineRecord], asked: Asked) -> EngineRecord | None:
    choice = choose(engines, RoutedRequest(asked.digest, rate=asked.rate))
    return choice.engine if choice is not None else None


@dataclass(frozen=True)
class Policy:
    """A choice of engines, and whether the engines evict by use counts."""

    choice: Choice
    counts_uses: bool = False


POLICIES = {
    "round robin": Policy(round_robin),
    "least loaded": Policy(least_loaded),
    "hash of the adapter": Policy(pure_hash),
    "2026-11-21": Policy(before),
    "ours, old eviction": Policy(ours),
    "ours": Policy(ours, counts_uses=True),
}


def arrivals(number: int, rate: float, zipf: float, seed: int) -> Iterator[Request]:
    """Generate Poisson arrivals at `rate` per second.

    Adapter i has popularity 1 / (i + 1) ** zipf; lengths are exponential.
    """
    chance = random.Random(seed)
    shares = list(itertools.accumulate(1 / (i + 1) ** zipf for i in range(ADAPTERS)))
    now = 0.0
    for _ in range(number):
        now += chance.expovariate(rate)
        adapter = bisect(shares, chance.random() * shares[-1])
        yield Request(now, f"adapter-{adapter}", 1 + int(chance.expovariate(1 / OUTPUT_TOKENS)))


class Simulation:
    """Run of one policy over one stream of requests. Times are simulated seconds."""

    def __init__(self, policy: Policy, load_seconds: float, places: int = PLACES, engines: int = ENGINES) -> None:
        self._policy = policy
        self._rates = Rates(lambda: self._now)
        self._engines = [
            Engine(
                EngineRecord(
                    Address(f"http://engine-{i}"),
                    condition=Condition(Health.UP),
                    slots=SLOTS,
                    load_seconds=load_seconds,
                    state=EngineState(adapter_pages_total=places),
                ),
                load_seconds,
                places=places,
                uses=UseCounts() if policy.counts_uses else None,
            )
            for i in range(engines)
        ]
        self._records = [engine.record for engine in self._engines]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._now = 0.0
        self.done: list[Request] = []
        # Times at which each adapter came to engines for the first time.
        self.first_held: dict[str, dict[str, float]] = {}

    @property
    def loads(self) -> int:
        return sum(engine.loads for engine in self._engines)

    def run(self, requests: list[Request]) -> None:
        for number, request in enumerate(requests):
            self._at(request.arrival, partial(self._arrive, number, request))
        self._at(0.0, self._push)
        while len(self.done) < len(requests):
            self._now, _, event = heapq.heappop(self._events)
            event()

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def _push(self) -> None:
        for engine in self._engines:
            engine.record.observe_resident(engine.resident)
        self._at(self._now + PUSH_SECONDS, self._push)

    def _arrive(self, number: int, request: Request) -> None:
        self._rates.count(request.digest)
        asked = Asked(number, request.digest, self._rates.of(request.digest))
        chosen = self._policy.choice(self._records, asked)
        engine = next(engine for engine in self._engines if engine.record is chosen)
        loads = not engine.record.holds(request.digest)
        request.counted.enter_context(engine.record.requests.count(request.digest, loads=loads))
        if engine.uses is not None:
            engine.uses.count(request.digest, self._now)
        engine.waiting.append(request)
        self._go_on(engine)

    def _go_on(self, engine: Engine) -> None:
        """Admit the requests that can run, start a load for the first that cannot, and a step if any can run."""
        for request in list(engine.waiting):
            if request.digest in engine.resident:
                if len(engine.running) < SLOTS:
                    engine.waiting.remove(request)
                    engine.running.append(request)
                    engine.resident.move_to_end(request.digest)
            elif engine.loading is None and engine.room_for_another():
                engine.loading = request.digest
                engine.loads += 1
                self._at(self._now + engine.load_seconds, lambda: self._loaded(engine))
        if engine.running and not engine.stepping:
            engine.stepping = True
            prompts = sum(PROMPT_TOKENS for request in engine.running if not request.made)
            seconds = STEP + STEP_SEQUENCE * len(engine.running) + STEP_PROMPT_TOKEN * prompts
            self._at(self._now + seconds, lambda: self._stepped(engine))

    def _loaded(self, engine: Engine) -> None:
        assert engine.loading is not None
        engine.resident[engine.loading] = None
        self.first_held.setdefault(engine.loading, {}).setdefault(engine.record.url, self._now)
        engine.loading = None
        self._go_on(engine)

    def _stepped(self, engine: Engine) -> None:
        engine.stepping = False
        for request in list(engine.running):
            request.made += 1
            if request.made == 1:
                request.first_token = self._now
            if request.made >= request.tokens:
                engine.running.remove(request)
                self._end(engine, request)
        self._go_on(engine)

    def _end(self, engine: Engine, request: Request) -> None:
        request.counted.close()
        engine.record.observe_request(self._now - request.arrival)
        self.done.append(request)


class Result(NamedTuple):
    """Loads, and seconds to the first token: median and 99th percentile."""

    loads: int
    median: float
    worst: float


def measure(
    policy: Policy,
    requests: int,
    rate: float,
    zipf: float,
    load_seconds: float,
    places: int = PLACES,
    engines: int = ENGINES,
) -> Result:
    simulation = Simulation(policy, load_seconds, places, engines)
    simulation.run(list(arrivals(requests, rate, zipf, seed=1)))
    waits = sorted(request.first_token - request.arrival for request in simulation.done)
    return Result(simulation.loads, waits[len(waits) // 2], waits[int(len(waits) * 0.99)])


def least_loads(requests: Sequence[Request], places: int) -> int:
    """Return the loads of one pool that evicts the adapter whose next request is last (Belady 1966)."""
    never = len(requests)
    following, seen = [never] * len(requests), dict[str, int]()
    for number in reversed(range(len(requests))):
        following[number] = seen.get(requests[number].digest, never)
        seen[requests[number].digest] = number
    resident, by_next, loads = dict[str, int](), list[tuple[int, str]](), 0
    for number, request in enumerate(requests):
        if request.digest not in resident:
            loads += 1
            while len(resident) >= places:
                at, digest = heapq.heappop(by_next)
                if resident.get(digest) == -at:
                    del resident[digest]
        resident[request.digest] = following[number]
        heapq.heappush(by_next, (-following[number], request.digest))
    return loads


def seconds_to_engines(policy: Policy, number: int, share: float, popular: float, load_seconds: float) -> float | None:
    """Return the seconds from the first request of a new popular adapter until `number` engines hold it; None: never.

    share: load of the fleet. popular: the popular adapter's part of all requests, from the third second of 15.
    """
    simulation = Simulation(policy, load_seconds)
    rate, chance, begins = share * ENGINES / BUSY_SECONDS, random.Random(3), 3.0
    requests = [r for r in arrivals(int(rate * 15), rate, 1.0, seed=2) if r.arrival < 15.0]
    for request in requests:
        if request.arrival >= begins and chance.random() < popular:
            request.digest = "popular"
    first = next(request.arrival for request in requests if request.digest == "popular")
    simulation.run(requests)
    held = sorted(simulation.first_held["popular"].values())
    return held[number - 1] - first if len(held) >= number else None


# Time of an engine per request: full batches all the time, each request's prompt once.
BUSY_SECONDS = OUTPUT_TOKENS * (STEP / SLOTS + STEP_SEQUENCE) + PROMPT_TOKENS * STEP_PROMPT_TOKEN


def compare(requests: int, places: int) -> Iterator[str]:
    sizes = f"{ENGINES} engines of {SLOTS} slots and {places} places for adapters, {ADAPTERS} adapters"
    yield f"{sizes}, {requests} requests."
    yield ""
    yield "| load | a load takes | policy | loads | of 2026-11-21's | TTFT p50 | TTFT p99 |"
    yield "|---|---|---|---|---|---|---|"
    for share, load_seconds in itertools.product((0.5, 0.8), (0.05, 0.3)):
        rate = share * ENGINES / BUSY_SECONDS
        start = f"| {share:.0%} | {load_seconds * 1000:.0f} ms |"
        found = {name: measure(each, requests, rate, 1.0, load_seconds, places) for name, each in POLICIES.items()}
        base = found["2026-11-21"].loads
        for name, (loads, median, worst) in found.items():
            yield f"{start} {name} | {loads} | {loads / base:.2f} | {median * 1000:.0f} ms | {worst * 1000:.0f} ms |"
        least = least_loads(list(arrivals(requests, rate, 1.0, seed=1)), ENGINES * places)
        yield f"{start} least possible | {least} | {least / base:.2f} | | |"


def hot_adapter() -> Iterator[str]:
    yield "| load | popular adapter's part | a load takes | policy | on two engines after | on three | on four |"
    yield "|---|---|---|---|---|---|---|"
    for share, popular, load_seconds in itertools.product((0.5, 0.8), (0.4, 0.6), (0.05, 0.3)):
        for name in ("2026-11-21", "ours"):
            times = [seconds_to_engines(POLICIES[name], number, share, popular, load_seconds) for number in (2, 3, 4)]
            shown = " | ".join("never" if seconds is None else f"{seconds:.1f} s" for seconds in times)
            yield f"| {share:.0%} | {popular:.0%} | {load_seconds * 1000:.0f} ms | {name} | {shown} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--places", type=int, default=PLACES, help="places for adapters in each engine")
    parser.add_argument("--out", type=Path, help="also append the tables here")
    arguments = parser.parse_args()
    lines = [*compare(arguments.requests, arguments.places), "", *hot_adapter()]
    publish(lines, arguments.out)


if __name__ == "__main__":
    main()
