"""Cost of the choice of an engine: adapter loads and time to first token of four policies on the same requests.

    python -m benchmarks.routing [--requests 20000] [--out docs/perf/FILE.md]

A discrete-event simulation around the gateway's own `choose` and `EngineRecord`: 4 engines, 200 adapters of zipf
popularity, fewer device slots than adapters. Like ours, a simulated engine runs batches in steps, loads one adapter at
a time beside them, evicts the least recently used adapter that no request uses, and makes a request wait if all slots
are in use. The gateway learns which engine holds which adapter 50 ms later, and its own requests at once. Nothing here
depends on the machine: the same seed gives the same table.
"""

import argparse
import heapq
import itertools
import random
from bisect import bisect
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gateway.fleet.engine import Address, EngineRecord
from gateway.fleet.health import Condition, Health
from gateway.fleet.routing import choose, rank

ENGINES, ADAPTERS, PLACES, SLOTS = 4, 200, 32, 16
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


@dataclass
class Engine:
    """A simulated engine and the gateway's knowledge of it."""

    record: EngineRecord
    load_seconds: float
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    # Digests on the device, least recently used first.
    resident: OrderedDict[str, None] = field(default_factory=OrderedDict)
    loading: str | None = None
    stepping: bool = False
    loads: int = 0

    def room_for_another(self) -> bool:
        """Free a slot for an adapter if there is none; return False if every slot is in use."""
        if len(self.resident) < PLACES:
            return True
        used = {request.digest for request in self.running}
        victim = next((digest for digest in self.resident if digest not in used), None)
        if victim is None:
            return False
        del self.resident[victim]
        return True


Policy = Callable[[list[Engine], Request, int], Engine]


def round_robin(engines: list[Engine], request: Request, number: int) -> Engine:
    return engines[number % len(engines)]


def least_loaded(engines: list[Engine], request: Request, number: int) -> Engine:
    return min(engines, key=lambda engine: engine.record.requests.in_flight)


def pure_hash(engines: list[Engine], request: Request, number: int) -> Engine:
    return min(engines, key=lambda engine: rank(request.digest.encode(), engine.record.url))


def ours(engines: list[Engine], request: Request, number: int) -> Engine:
    chosen = choose([engine.record for engine in engines], request.digest)
    return next(engine for engine in engines if engine.record is chosen)


POLICIES: dict[str, Policy] = {
    "round robin": round_robin,
    "least loaded": least_loaded,
    "hash of the adapter": pure_hash,
    "ours": ours,
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

    def __init__(self, policy: Policy, load_seconds: float) -> None:
        self._policy = policy
        self._engines = [
            Engine(
                EngineRecord(
                    Address(f"http://engine-{i}"),
                    condition=Condition(Health.UP),
                    slots=SLOTS,
                    load_seconds=load_seconds,
                ),
                load_seconds,
            )
            for i in range(ENGINES)
        ]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._now = 0.0
        self.done: list[Request] = []

    @property
    def loads(self) -> int:
        return sum(engine.loads for engine in self._engines)

    def run(self, requests: list[Request]) -> None:
        for number, request in enumerate(requests):
            self._at(request.arrival, lambda number=number, request=request: self._arrive(number, request))
        self._at(0.0, self._push)
        while len(self.done) < len(requests):
            self._now, _, event = heapq.heappop(self._events)
            event()

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def _push(self) -> None:
        for engine in self._engines:
            engine.record.resident = frozenset(engine.resident)
        self._at(self._now + PUSH_SECONDS, self._push)

    def _arrive(self, number: int, request: Request) -> None:
        engine = self._policy(self._engines, request, number)
        engine.record.requests.in_flight += 1
        engine.record.requests.by_digest[request.digest] += 1
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
        record = engine.record
        record.requests.in_flight -= 1
        record.requests.by_digest[request.digest] -= 1
        record.observe_request(self._now - request.arrival)
        self.done.append(request)


def measure(policy: Policy, requests: int, rate: float, zipf: float, load_seconds: float) -> tuple[int, float, float]:
    """Return the loads, and the median and 99th percentile of the time to the first token in seconds."""
    simulation = Simulation(policy, load_seconds)
    simulation.run(list(arrivals(requests, rate, zipf, seed=1)))
    waits = sorted(request.first_token - request.arrival for request in simulation.done)
    return simulation.loads, waits[len(waits) // 2], waits[int(len(waits) * 0.99)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--out", type=Path, help="also append the tables here")
    arguments = parser.parse_args()
    # Capacity of an engine: full batches all the time, each request's prompt once.
    busy = OUTPUT_TOKENS * (STEP / SLOTS + STEP_SEQUENCE) + PROMPT_TOKENS * STEP_PROMPT_TOKEN
    lines = [
        f"{ENGINES} engines of {SLOTS} slots and {PLACES} places for adapters, {ADAPTERS} adapters, "
        f"{arguments.requests} requests.",
        "",
        "| load | zipf | a load takes | policy | loads | fewer than least loaded by | TTFT p50 | TTFT p99 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for share, zipf, load_seconds in itertools.product((0.5, 0.8), (1.0,), (0.05, 0.3)):
        rate = share * ENGINES / busy
        found = {
            name: measure(policy, arguments.requests, rate, zipf, load_seconds) for name, policy in POLICIES.items()
        }
        for name, (loads, median, worst) in found.items():
            fewer = found["least loaded"][0] / loads
            lines.append(
                f"| {share:.0%} | {zipf:g} | {load_seconds * 1000:.0f} ms | {name} | {loads} | {fewer:.1f}x "
                f"| {median * 1000:.0f} ms | {worst * 1000:.0f} ms |"
            )
    print("\n".join(lines))
    if arguments.out:
        with arguments.out.open("a") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
