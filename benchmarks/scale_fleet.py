"""Simulation of a large installation around the gateway's own code, for `benchmarks/scale.py`.

Each simulated gateway process has its own `EngineRecord` of every engine, `Rates`, `RequestQueue` and
`ServiceCounters`, and chooses engines by `choose_in`, or by `choose` among all engines. `LocalLimits`, the twin of
`quota.lua`, stands for Redis. A simulated engine runs SLOTS requests, loads one adapter at a time beside them and
evicts by `UseCounts`. A request takes a place for its time, which follows from its prompt and output, so a simulated
engine has no steps. The network takes no time. The same seed gives the same result.
"""

import asyncio
import itertools
import random
from bisect import bisect
from collections import Counter, OrderedDict, defaultdict, deque
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

from adapters.use_counts import UseCounts
from benchmarks.simulated_time import run
from gateway.errors import Overloaded
from gateway.fleet.discovery.base_engines import MAX_AGE, BaseEngines
from gateway.fleet.engines.engine import Address, EngineRecord, EngineState
from gateway.fleet.engines.health import Condition, Health
from gateway.fleet.queueing.queue import Place, RequestQueue
from gateway.fleet.queueing.service_counters import ServiceCounters
from gateway.fleet.queueing.service_meter import Reported, ServiceMeter
from gateway.fleet.queueing.shared_service import interval
from gateway.fleet.routing.candidates import choose_in
from gateway.fleet.routing.choice import Choice, Rates, RoutedRequest, choose
from gateway.quota.demand import Demand
from gateway.quota.limits import Limit
from gateway.quota.local import LocalLimits
from wire.costs import OUTPUT_TOKEN, PROMPT_TOKEN
from wire.deadlines import deadline

SLOTS, PLACES = 32, 64
PROMPT_TOKENS, OUTPUT_TOKENS = 256, 40
# Seconds of a request: for its prompt, per token, and of an adapter's load. At these, an engine has 32 requests/s.
PROMPT_SECONDS, TOKEN_SECONDS, LOAD_SECONDS = 0.05, 0.02375, 0.3
REQUEST_SECONDS = PROMPT_SECONDS + OUTPUT_TOKENS * TOKEN_SECONDS
PUSH_SECONDS = 0.25
FLOODER = "flooder-"


class Scale(NamedTuple):
    """Size of a simulated installation.

    load: arriving work as a part of the engines' capacity. flooders: the number of tenants that send `flood` of all
    requests; the others follow Zipf's law with exponent 0.8. seconds: time in which requests arrive. warmup: part of it
    in which adapters are loaded first. among_all: whether each choice compares all engines.
    """

    gateways: int = 50
    engines: int = 1000
    adapters: int = 10_000
    tenants: int = 100_000
    zipf: float = 1.0
    load: float = 0.8
    flooders: int = 0
    flood: float = 0.5
    seconds: float = 8.0
    warmup: float = 3.2
    among_all: bool = False
    seed: int = 1

    @property
    def rate(self) -> float:
        return self.load * self.engines * SLOTS / REQUEST_SECONDS


@dataclass(slots=True, eq=False)
class Request:
    tenant: str
    digest: str
    tokens: int
    made: int = 0


@dataclass(slots=True, eq=False)
class Engine:
    """A simulated engine. waiting: requests with their events of admission. loaded: events of loads in progress."""

    number: int
    running: Counter[str] = field(default_factory=Counter)
    num_running: int = 0
    inside: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)
    resident: OrderedDict[str, None] = field(default_factory=OrderedDict)
    uses: UseCounts = field(default_factory=UseCounts)
    loads: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def load(self, digest: str) -> None:
        async with self.loading:
            await asyncio.sleep(LOAD_SECONDS)
            idle = [held for held in self.resident if not self.running[held]]
            if len(self.resident) >= PLACES and idle:
                del self.resident[min(idle, key=self.uses.score)]
            self.resident[digest] = None
        del self.loads[digest]

    async def serve(self, request: Request, result: "Result") -> float:
        """Run a request. Return the time of its first token."""
        loop = asyncio.get_running_loop()
        self.uses.count(request.digest, loop.time())
        if request.digest not in self.resident:
            if request.digest not in self.loads:
                result.loads += loop.time() > result.scale.warmup
                self.loads[request.digest] = asyncio.create_task(self.load(request.digest))
            await asyncio.shield(self.loads[request.digest])
        if self.num_running >= SLOTS:
            self.waiting.append(turn := loop.create_future())
            await turn
        self.num_running += 1
        self.running[request.digest] += 1
        await asyncio.sleep(PROMPT_SECONDS)
        first = loop.time()
        await asyncio.sleep(request.tokens * TOKEN_SECONDS)
        request.made = request.tokens
        self.num_running -= 1
        self.running[request.digest] -= 1
        if self.waiting:
            self.waiting.popleft().set_result(None)
        return first


class Gateway:
    """A simulated gateway process."""

    def __init__(self, scale: Scale) -> None:
        self._scale = scale
        state = EngineState(adapter_pages_total=PLACES)
        self.records = tuple(
            EngineRecord(Address(f"http://engine-{i}"), Condition(Health.UP), slots=SLOTS, state=state)
            for i in range(scale.engines)
        )
        for record in self.records:
            record.load_seconds, record.request_seconds = LOAD_SECONDS, REQUEST_SECONDS
        self.numbers = {record: i for i, record in enumerate(self.records)}
        loop = asyncio.get_running_loop()
        self.rates, self.counters = Rates(loop.time), ServiceCounters()
        self.queue = RequestQueue(lambda: self.fleet.capacity, self.counters, 512, 60.0)
        self._fleet = BaseEngines(self.records, None, loop.time)
        self.in_progress: Counter[str] = Counter()

    @property
    def fleet(self) -> BaseEngines:
        """Return the engines as `Registry.of_base` does."""
        clock = asyncio.get_running_loop().time
        if not self._fleet.is_large or clock() - self._fleet.made >= MAX_AGE:
            self._fleet = BaseEngines(self.records, self._fleet, clock)
        return self._fleet

    def choose(self, digest: str) -> Choice:
        asked = RoutedRequest(digest, rate=self.rates.of(digest))
        if self._scale.among_all:
            found = choose(self.records, asked)
        else:
            found = choose_in(self.fleet, asked, self.in_progress[digest], lambda _: True)
        assert found is not None
        return found


@dataclass
class Result:
    """Outcome of a simulation.

    served: cost units by tenant. active: most tenants in an exchange of a process. ttft: times to the first token,
    without the flooders' requests. busy: requests on each engine, at each report. engines_of: those that got requests
    of an adapter. `loads`, `ttft`, `busy` and `engines_of` are without the warm-up.
    """

    scale: Scale
    requests: int = 0
    refused: int = 0
    over_quota: int = 0
    loads: int = 0
    active: int = 0
    ttft: list[float] = field(default_factory=list)
    busy: list[int] = field(default_factory=list)
    engines_of: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    served: Counter[str] = field(default_factory=Counter)

    def percentile(self, part: float) -> float:
        waits = sorted(self.ttft)
        return waits[min(len(waits) - 1, int(part * len(waits)))] if waits else 0.0

    @property
    def jain(self) -> float | None:
        """Return Jain's index over the flooders, whose requests always wait: of their service by weight."""
        rates = [served / weight_of(tenant) for tenant, served in self.served.items() if tenant.startswith(FLOODER)]
        return sum(rates) ** 2 / (len(rates) * sum(rate * rate for rate in rates)) if rates else None


def weight_of(tenant: str) -> float:
    """Return a tenant's weight: 2 for half of the flooders, else 1."""
    return 2.0 if tenant.startswith(FLOODER) and tenant.endswith(tuple("02468")) else 1.0


class Simulation:
    def __init__(self, scale: Scale) -> None:
        self._scale = scale
        self._chance = random.Random(scale.seed)
        self.result = Result(scale)
        self._engines = [Engine(i) for i in range(scale.engines)]
        self._gateways = [Gateway(scale) for _ in range(scale.gateways)]
        self._limits = LocalLimits()
        self._adapters = list(itertools.accumulate(1 / (i + 1) ** scale.zipf for i in range(scale.adapters)))
        self._tenants = list(itertools.accumulate(1 / (i + 1) ** 0.8 for i in range(scale.tenants)))
        # Service by tenant in all processes, as `service_counters.lua` counts it.
        self._shared: defaultdict[str, float] = defaultdict(float)

    async def run(self) -> None:
        random.seed(self._scale.seed)
        loop, numbers = asyncio.get_running_loop(), itertools.count()
        # A failure in any task ends the simulation.
        async with asyncio.TaskGroup() as group:
            watchers = [group.create_task(each) for each in (self._push(), self._exchange())]
            async with asyncio.TaskGroup() as requests:
                while loop.time() < self._scale.seconds:
                    await asyncio.sleep(self._chance.expovariate(self._scale.rate))
                    requests.create_task(self._request(f"{next(numbers)}"))
            self.result.requests = next(numbers)
            for watcher in watchers:
                watcher.cancel()

    def _make(self) -> Request:
        chance, scale = self._chance, self._scale
        adapter = bisect(self._adapters, chance.random() * self._adapters[-1])
        if scale.flooders and chance.random() < scale.flood:
            tenant = f"{FLOODER}{chance.randrange(scale.flooders)}"
        else:
            tenant = f"tenant-{bisect(self._tenants, chance.random() * self._tenants[-1])}"
        return Request(tenant, f"adapter-{adapter}", 1 + int(chance.expovariate(1 / OUTPUT_TOKENS)))

    async def _request(self, request_id: str) -> None:
        """Take a request through quota, queue, choice, engine and settlement."""
        request, gateway, now = self._make(), self._chance.choice(self._gateways), asyncio.get_running_loop().time
        tenant, began = request.tenant, now()
        cost = PROMPT_TOKENS * PROMPT_TOKEN + request.tokens * OUTPUT_TOKEN
        demand = Demand(
            tenant_id=tenant, request_id=request_id, prompt_tokens=PROMPT_TOKENS, max_tokens=4 * OUTPUT_TOKENS
        )
        if not self._limits.acquire(LIMITS, demand, int(1e6 * began)).allowed:
            self.result.over_quota += 1
            return
        meter = ServiceMeter(PROMPT_TOKENS, lambda: Reported(PROMPT_TOKENS, request.made))
        place = Place(tenant, weight_of(tenant), 0, meter, tenant, arrived_at=began)
        place.deadline = deadline(began, None, 0)
        gateway.rates.count(request.digest)
        try:
            async with gateway.queue.enter(place):
                with meter.attempt(lambda _: None):
                    first = await self._serve(gateway, request)
            if began > self._scale.warmup and not tenant.startswith(FLOODER):
                self.result.ttft.append(first - began)
            if now() < self._scale.seconds:
                self.result.served[tenant] += int(cost)
        except Overloaded:
            self.result.refused += 1
        tokens = PROMPT_TOKENS + request.made
        self._limits.settle(tenant, request_id, tokens, 0, counts=True, now=int(1e6 * now()))

    async def _serve(self, gateway: Gateway, request: Request) -> float:
        """Send a request to the chosen engine. Return the time of its first token."""
        record = gateway.choose(request.digest).engine
        engine, began = self._engines[gateway.numbers[record]], asyncio.get_running_loop().time()
        if began > self._scale.warmup:
            self.result.engines_of[request.digest].add(engine.number)
        with ExitStack() as held:
            loads = not record.holds(request.digest)
            held.enter_context(record.requests.count(request.digest, request.tenant, loads=loads))
            gateway.in_progress[request.digest] += 1
            engine.inside += 1
            try:
                return await engine.serve(request, self.result)
            finally:
                engine.inside -= 1
                gateway.in_progress[request.digest] -= 1
                record.observe_request(asyncio.get_running_loop().time() - began)

    async def _push(self) -> None:
        """Report the engines' adapters and loads to all gateways, every PUSH_SECONDS."""
        while True:
            await asyncio.sleep(PUSH_SECONDS)
            if self._scale.warmup < asyncio.get_running_loop().time() < self._scale.seconds:
                self.result.busy += [engine.inside for engine in self._engines]
            for engine in self._engines:
                resident = frozenset(engine.resident)
                for gateway in self._gateways:
                    record = gateway.records[engine.number]
                    record.observe_resident(resident)
                    record.other_processes_load = engine.inside - record.requests.sequences
            for gateway in self._gateways:
                gateway.queue.admit()

    async def _exchange(self) -> None:
        """Exchange the tenants' service between all gateways, as `service_counters.lua` does."""
        while True:
            await asyncio.sleep(interval(max(gateway.counters.number for gateway in self._gateways)))
            sent = []
            for gateway in self._gateways:
                gateway.queue.count_service()
                sent.append(changes := gateway.counters.changes())
                self.result.active = max(self.result.active, len(changes))
            processes = Counter(change.tenant_id for changes in sent for change in changes if change.is_active)
            for change in itertools.chain(*sent):
                self._shared[change.tenant_id] += change.service
            least = min((self._shared[each] for each in processes), default=0.0)
            for tenant in processes:
                self._shared[tenant] = max(self._shared[tenant], least)
            weight = sum(map(weight_of, processes))
            for gateway, changes in zip(self._gateways, sent, strict=True):
                results = [(self._shared[each.tenant_id], processes[each.tenant_id]) for each in changes]
                gateway.counters.exchanged(changes, weight, results)
                gateway.queue.admit()


LIMITS = (
    Limit("tenant:r", "tenant", "r", 10**6),
    Limit("tenant:t", "tenant", "t", 10**9),
    Limit("tenant:c", "tenant", "c", 10**5),
)


def simulate(scale: Scale) -> Result:
    found: list[Result] = []

    async def main() -> None:
        simulation = Simulation(scale)
        await simulation.run()
        found.append(simulation.result)

    run(main())
    return found[0]
