"""Measurement of an attack in pairs of a quiet and an attacked round, and its verdict."""

import asyncio
import contextlib
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field

import aiohttp
import msgspec

from benchmarks.hostile.attack import Attack
from benchmarks.hostile.attacker import GRACE_SECONDS, Order, Round, Target
from benchmarks.hostile.catalogue import ATTACKS
from benchmarks.hostile.neighbour import NEIGHBOUR_LIMITS, Measurements, Neighbour
from benchmarks.hostile.place import Place
from benchmarks.hostile.ratios import NO_RATIO, Ratio, percentile, ratio
from benchmarks.hostile.watch import Seen, Watch
from testing.stack import ROOT

# The report mentions a recovery that takes longer than this many seconds.
SLOW_TO_SETTLE = 5.0
# Length of the quiet round where latencies are not judged: it shows only that the neighbour is served afterwards.
UNJUDGED_QUIET_SECONDS = 0.5
NUMBERS = itertools.count(1)


@dataclass(frozen=True)
class Limits:
    """Limits of a verdict.

    latency: factor over the quiet p50 and p99; None: not judged. upload, stall, refusal (of an upload): seconds.
    memory: bytes.
    """

    latency: float | None = 1.2
    upload: float = 2.0
    memory: int = 64 * 2**20
    stall: float = 0.1
    refusal: float = 5.0


@dataclass
class Result:
    """Outcome of an attack.

    p50, p99: time of the neighbour's whole chats as a factor of the quiet ones; 0 if no chat ended. first: the same for
    first tokens. quiet_spread: the largest p50 and p99 of the quiet rounds as factors of the smallest. busy: CPU
    seconds per second of the attacker's process. waited: seconds per second that it waited for a CPU. rate, quiet_rate:
    events that it counts in `statuses`, mostly requests, per second; those of the process in the quiet rounds. missed:
    limits that the attack exceeds, except those of latency. slow, undecided: the latter, judged by `Report`.
    explained, quiet_explained: the gateway's explanations of stalls, in attacked and quiet rounds.
    of_control: p50 and p99 as multiples of the largest control's; None without one.
    """

    name: str
    p50: Ratio = NO_RATIO
    p99: Ratio = NO_RATIO
    first_p50: Ratio = NO_RATIO
    first_p99: Ratio = NO_RATIO
    quiet_ms: tuple[float, float] = (0.0, 0.0)
    quiet_spread: tuple[float, float] = (0.0, 0.0)
    samples: int = 0
    seconds: float = 0.0
    chat_interval: float = 0.0
    upload: float = 0.0
    memory: int = 0
    children: int = 0
    stall: float = 0.0
    quiet_stall: float = 0.0
    cpu: float = 0.0
    busy: float = 0.0
    waited: float = 0.0
    rate: float = 0.0
    quiet_rate: float = 0.0
    largest_error: int = 0
    slowest: float = 0.0
    statuses: Counter[str] = field(default_factory=Counter)
    left: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    explained: list[str] = field(default_factory=list)
    quiet_explained: list[str] = field(default_factory=list)
    of_control: tuple[float | None, float | None] = (None, None)
    judges_latency: bool = True

    @property
    def all_missed(self) -> list[str]:
        return [*self.missed, *self.slow]


def as_json(results: Sequence[Result]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n"


class Child:
    """An attacker's process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def run(self, order: Order) -> Round:
        """Run one round of the attack."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(order)).encode() + b"\n")
        async with asyncio.timeout(order.seconds + 2 * GRACE_SECONDS):
            line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError("the attacker's process ended; its error is above")
        fields = json.loads(line)
        return Round(**fields | {"statuses": Counter(fields["statuses"])})


@contextlib.asynccontextmanager
async def child(attack: Attack, target: Target) -> AsyncIterator[Child]:
    """Start an attacker's process and wait until its payloads are made."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.hostile.attacker", attack.name),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=2**24,
        cwd=ROOT,
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(asdict(target)).encode() + b"\n")
        line = await process.stdout.readline()
        if line != b"ready\n":
            raise RuntimeError(f"the attacker {attack.name} did not start")
        yield Child(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@dataclass(frozen=True)
class Rounds:
    """Rounds of an attack. pairs: their number, each with a quiet round. mutations: uploads in a round of
    `mutated-uploads`. core: the core for the attackers alone; None if they use all.
    """

    seconds: float
    pairs: int
    mutations: int = 200
    core: int | None = None


async def run_attack(attack: Attack, place: Place, rounds: Rounds, limits: Limits) -> Result:
    """Attack in rounds, each right before a quiet one, of the same length if latencies are judged.

    In the quiet round a process of the attacker's priority takes as much CPU time as the attacker took, at the same
    moments of the round. A real attacker has its own machine; here its client takes CPU time from the service, often in
    bursts, which is no effect of its requests.
    """
    number, seconds, started = next(NUMBERS), max(rounds.seconds, attack.least_seconds), time.monotonic()
    neighbour_key = place.tenant(f"neighbour-{number}", **NEIGHBOUR_LIMITS)
    watch = Watch(place)
    async with contextlib.AsyncExitStack() as exits:
        exits.callback(watch.close)

        async def attacker(of: Attack, name: str) -> Child:
            key = place.tenant(name, **of.limits)
            target = Target(
                *(place.url, key, neighbour_key, place.base_model, limits.refusal),
                control=place.control,
                mutations=rounds.mutations,
                # A busy machine must leave the attacker some time; only judged latencies need it at low priority.
                gives_way=limits.latency is not None,
                core=rounds.core,
            )
            return await exits.enter_async_context(child(of, target))

        async with asyncio.TaskGroup() as starting:
            hostile_start = starting.create_task(attacker(attack, f"attacker-{number}"))
            calm_start = starting.create_task(attacker(ATTACKS[attack.honest or "busy-loop"], f"calm-{number}"))
        hostile, calm = hostile_start.result(), calm_start.result()
        # No keep-alive: connections that are open after a round belong to the attacker.
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        session = await exits.enter_async_context(aiohttp.ClientSession(connector=connector))
        uploads = place.has_real_engine
        neighbour = Neighbour(session, place, neighbour_key, uploads=uploads)
        await neighbour.calibrate()
        calm_rounds: list[Measurements] = []
        measured, seen, attacked = Measurements(), Seen(), Round()
        quiet_seen, quiet, left = Seen(), Round(), []
        for _ in range(rounds.pairs):
            remains = await watch.settled()
            after, one, outcome = await measure(neighbour, watch, hostile, Order(seconds))
            measured.add(after)
            merge(seen, attacked, one, outcome)
            accepted = set(attacked.accepted)
            began = time.monotonic()
            left += (await watch.settled(remains, accepted)).beyond(remains, accepted)
            if time.monotonic() - began > SLOW_TO_SETTLE:
                attacked.notes.append(f"all was as before {time.monotonic() - began:.0f} s after the attack")
            quiet_seconds = min(seconds, UNJUDGED_QUIET_SECONDS) if limits.latency is None else seconds
            order = Order(quiet_seconds, outcome.cpu_curve, outcome.served / outcome.seconds)
            before, one, outcome = await measure(neighbour, watch, calm, order)
            calm_rounds.append(before)
            merge(quiet_seen, quiet, one, outcome)
        result = judge(attack, limits, calm_rounds, measured, seen, attacked, quiet_seen.stall, left)
        result.explained, result.quiet_explained = seen.explained, quiet_seen.explained
        result.quiet_rate = rate(quiet)
        result.chat_interval = neighbour.chat_interval
        result.seconds = time.monotonic() - started
        return result


async def measure(neighbour: Neighbour, watch: Watch, child: Child, order: Order) -> tuple[Measurements, Seen, Round]:
    """Measure the neighbour for a round beside an attacker, an honest tenant, or a process that sends nothing."""
    over = asyncio.Event()
    measuring = asyncio.ensure_future(neighbour.measure(over))
    observing = asyncio.ensure_future(watch.observe(over))
    try:
        outcome = await child.run(order)
    finally:
        over.set()
        measured, seen = await asyncio.gather(measuring, observing)
    outcome.notes += [f"this benchmark's own loop stalled: {stall.fields}" for stall in seen.own]
    return measured, seen, outcome


def merge(seen: Seen, attacked: Round, one: Seen, outcome: Round) -> None:
    """Add a round to the sums and maxima."""
    for name in ("memory", "children", "stall"):
        setattr(seen, name, max(getattr(seen, name), getattr(one, name)))
    seen.cpu += one.cpu
    seen.failures += one.failures
    seen.explained += one.explained
    attacked.cpu += outcome.cpu
    attacked.waited += outcome.waited
    attacked.seconds += outcome.seconds
    attacked.statuses += outcome.statuses
    attacked.accepted += outcome.accepted
    attacked.slowest = max(attacked.slowest, outcome.slowest)
    attacked.largest_error = max(attacked.largest_error, outcome.largest_error)
    attacked.breaches += [words for words in outcome.breaches if words not in attacked.breaches]
    attacked.notes += [words for words in outcome.notes if words not in attacked.notes]


def rate(rounds: Round) -> float:
    """Return the number of requests and other events a second of merged rounds."""
    return rounds.statuses.total() / rounds.seconds


def judge(
    attack: Attack,
    limits: Limits,
    calm_rounds: list[Measurements],
    measured: Measurements,
    seen: Seen,
    attacked: Round,
    quiet_stall: float,
    left: list[str],
) -> Result:
    """Compare a result with the limits, except those of latency.

    calm_rounds: the neighbour's measurements in the quiet rounds.
    """
    quiet = Measurements()
    for before in calm_rounds:
        quiet.add(before)
    result = Result(
        name=attack.name,
        p50=ratio(0.5, measured.whole, quiet.whole),
        p99=ratio(0.99, measured.whole, quiet.whole),
        first_p50=ratio(0.5, measured.first, quiet.first),
        first_p99=ratio(0.99, measured.first, quiet.first),
        quiet_ms=(percentile(quiet.whole, 0.5) * 1000, percentile(quiet.whole, 0.99) * 1000),
        quiet_spread=(spread(0.5, calm_rounds), spread(0.99, calm_rounds)),
        samples=len(measured.whole),
        upload=max(measured.uploads, default=0.0),
        memory=seen.memory,
        children=seen.children,
        stall=seen.stall,
        quiet_stall=quiet_stall,
        cpu=seen.cpu,
        busy=attacked.cpu / attacked.seconds,
        waited=attacked.waited / attacked.seconds,
        rate=rate(attacked),
        largest_error=attacked.largest_error,
        slowest=attacked.slowest,
        statuses=attacked.statuses,
        left=left,
        notes=attacked.notes,
        judges_latency=attack.judges_latency,
    )
    failures = Counter(measured.failures)
    missed = [f"the neighbour's {words} (x{number})" for words, number in failures.most_common(3)]
    missed += [f"before the attack: {words} (x{number})" for words, number in Counter(quiet.failures).most_common(2)]
    if limits.latency is not None and attack.judges_latency:
        missed += [] if measured.whole else ["no chat of the neighbour ended"]
    if result.upload > limits.upload:
        missed.append(f"the neighbour's upload took {result.upload:.1f} s")
    if result.memory > limits.memory:
        missed.append(f"+{result.memory / 2**20:.0f} MiB")
    if result.stall > limits.stall:
        missed.append(f"stall of {result.stall * 1000:.0f} ms")
    missed += [f"left: {words}" for words in dict.fromkeys(left)]
    missed += attacked.breaches[:6] + list(dict.fromkeys(seen.failures))
    result.missed = missed
    return result


def spread(part: float, rounds: list[Measurements]) -> float:
    """Return the largest percentile of the rounds as a factor of the smallest."""
    found = [percentile(each.whole, part) for each in rounds if each.whole]
    return max(found) / min(found) if found else 0.0
