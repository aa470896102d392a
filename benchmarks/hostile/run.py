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
    seconds per second of the attacker's process. waited: seconds per second that it waited for a CPU. quiet_load: see
    `QuietLoad.words`. rate, quiet_rate: events that the attacker counts in `statuses`, mostly requests, per second;
    those of the quiet load. missed: limits that the attack exceeds, except those of latency. slow, undecided: the
    latter, judged by `Report`.
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
    quiet_load: str = ""
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


@dataclass(frozen=True)
class QuietLoad:
    """Load of the quiet rounds.

    attack: what its process runs. place: the stack that it uses. words: its name in the report.
    """

    attack: Attack
    place: Place
    words: str


def quiet_load(attack: Attack, place: Place, elsewhere: Place | None) -> QuietLoad:
    """Return the load with which an attack on `place` is compared.

    With another stack of this machine, it is the same attack on that stack. Otherwise it is the attack's honest use, if
    it has one, or a process that takes as much CPU time as the attacker's client took, at the same moments of the
    round: a real attacker has its own machine; here its client takes CPU time from the service, often in bursts, which
    is no effect of its requests.
    """
    if elsewhere is not None:
        return QuietLoad(attack, elsewhere, f"{attack.name} elsewhere")
    honest = ATTACKS[attack.honest or "busy-loop"]
    return QuietLoad(honest, place, honest.name)


class Side:
    """The attacked or the quiet rounds: a process, the stack that it uses, and the sums of its rounds.

    watch: observes the stack that the process uses. rounds: the neighbour's measurements, round by round. seen:
    observations of the neighbour's stack. left: leftovers on the stack that the process used.
    """

    def __init__(self, child: Child, watch: Watch) -> None:
        self._child, self._watch = child, watch
        self.rounds: list[Measurements] = []
        self.seen, self.sums = Seen(), Round()
        self.left: list[str] = []

    @property
    def measured(self) -> Measurements:
        """Return the neighbour's measurements of all rounds."""
        together = Measurements()
        for each in self.rounds:
            together.add(each)
        return together

    async def run(self, neighbour: Neighbour, of_neighbour: Watch, order: Order) -> Round:
        """Run one round and wait until the stack that was used is as before. Return the outcome of its process.

        of_neighbour: observes the neighbour's stack.
        """
        remains = await self._watch.settled()
        measured, seen, outcome = await measure(neighbour, of_neighbour, self._child, order)
        self.rounds.append(measured)
        merge(self.seen, self.sums, seen, outcome)
        accepted = set(self.sums.accepted)
        began = time.monotonic()
        self.left += (await self._watch.settled(remains, accepted)).beyond(remains, accepted)
        if time.monotonic() - began > SLOW_TO_SETTLE:
            self.sums.notes.append(f"all was as before {time.monotonic() - began:.0f} s after the round")
        return outcome


async def run_attack(
    attack: Attack, place: Place, rounds: Rounds, limits: Limits, elsewhere: Place | None = None
) -> Result:
    """Attack in rounds, each right before a quiet one, of the same length if latencies are judged.

    elsewhere: another stack of this machine; the quiet rounds then attack it (see `quiet_load`), and the neighbour
    always uses `place`. It idles in the attacked rounds, so its presence is the same in both.
    """
    number, seconds, started = next(NUMBERS), max(rounds.seconds, attack.least_seconds), time.monotonic()
    quiet_by = quiet_load(attack, place, elsewhere)
    places = dict.fromkeys((place, quiet_by.place))
    keys = {each: each.tenant(f"neighbour-{number}", **NEIGHBOUR_LIMITS) for each in places}
    watches = {each: Watch(each) for each in places}
    async with contextlib.AsyncExitStack() as exits:
        for watch in watches.values():
            exits.callback(watch.close)

        async def side(of: Attack, at: Place, name: str) -> Side:
            target = Target(
                *(at.url, at.tenant(name, **of.limits), keys[at], at.base_model, limits.refusal),
                control=at.control,
                mutations=rounds.mutations,
                # A busy machine must leave the attacker some time; only judged latencies need it at low priority.
                gives_way=limits.latency is not None,
                core=rounds.core,
            )
            return Side(await exits.enter_async_context(child(of, target)), watches[at])

        async with asyncio.TaskGroup() as starting:
            hostile = starting.create_task(side(attack, place, f"attacker-{number}"))
            calm = starting.create_task(side(quiet_by.attack, quiet_by.place, f"calm-{number}"))
        attacked, quiet = hostile.result(), calm.result()
        # No keep-alive: connections that are open after a round belong to the attacker.
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        session = await exits.enter_async_context(aiohttp.ClientSession(connector=connector))
        neighbours = {each: Neighbour(session, each, keys[each], uploads=each.has_real_engine) for each in places}
        for each in neighbours.values():  # warms up both stacks
            await each.calibrate()
        quiet_seconds = min(seconds, UNJUDGED_QUIET_SECONDS) if limits.latency is None else seconds
        for _ in range(rounds.pairs):
            outcome = await attacked.run(neighbours[place], watches[place], Order(seconds))
            order = Order(quiet_seconds, outcome.cpu_curve, outcome.served / outcome.seconds)
            await quiet.run(neighbours[place], watches[place], order)
        result = judge(attack, limits, attacked, quiet)
        result.quiet_load = quiet_by.words
        result.chat_interval = neighbours[place].chat_interval
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


def judge(attack: Attack, limits: Limits, attacked: Side, quiet: Side) -> Result:
    """Compare a result with the limits, except those of latency."""
    measured, before, seen, sums = attacked.measured, quiet.measured, attacked.seen, attacked.sums
    left = [*attacked.left, *quiet.left]
    in_quiet = [*quiet.sums.breaches, *quiet.sums.notes]
    result = Result(
        name=attack.name,
        p50=ratio(0.5, measured.whole, before.whole),
        p99=ratio(0.99, measured.whole, before.whole),
        first_p50=ratio(0.5, measured.first, before.first),
        first_p99=ratio(0.99, measured.first, before.first),
        quiet_ms=(percentile(before.whole, 0.5) * 1000, percentile(before.whole, 0.99) * 1000),
        quiet_spread=(spread(0.5, quiet.rounds), spread(0.99, quiet.rounds)),
        samples=len(measured.whole),
        upload=max(measured.uploads, default=0.0),
        memory=seen.memory,
        children=seen.children,
        stall=seen.stall,
        quiet_stall=quiet.seen.stall,
        cpu=seen.cpu,
        busy=sums.cpu / sums.seconds,
        waited=sums.waited / sums.seconds,
        rate=rate(sums),
        quiet_rate=rate(quiet.sums),
        largest_error=sums.largest_error,
        slowest=sums.slowest,
        statuses=sums.statuses,
        left=left,
        notes=[*sums.notes, *(f"in the quiet rounds: {words}" for words in in_quiet)],
        explained=seen.explained,
        quiet_explained=quiet.seen.explained,
        judges_latency=attack.judges_latency,
    )
    failures = Counter(measured.failures)
    missed = [f"the neighbour's {words} (x{number})" for words, number in failures.most_common(3)]
    missed += [f"before the attack: {words} (x{number})" for words, number in Counter(before.failures).most_common(2)]
    if limits.latency is not None and attack.judges_latency:
        missed += [] if measured.whole else ["no chat of the neighbour ended"]
    if result.upload > limits.upload:
        missed.append(f"the neighbour's upload took {result.upload:.1f} s")
    if result.memory > limits.memory:
        missed.append(f"+{result.memory / 2**20:.0f} MiB")
    if result.stall > limits.stall:
        missed.append(f"stall of {result.stall * 1000:.0f} ms")
    missed += [f"left: {words}" for words in dict.fromkeys(left)]
    missed += sums.breaches[:6] + list(dict.fromkeys(seen.failures))
    result.missed = missed
    return result


def spread(part: float, rounds: list[Measurements]) -> float:
    """Return the largest percentile of the rounds as a factor of the smallest."""
    found = [percentile(each.whole, part) for each in rounds if each.whole]
    return max(found) / min(found) if found else 0.0
