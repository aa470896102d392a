"""Attacks of a hostile tenant beside a well-behaved one on a live stack, with a report of the effect of each.

    python -m benchmarks.hostile                          (all; prints an estimate; --list names them)
    python -m benchmarks.hostile --seconds 5 --pairs 1    (all, within half an hour)
    python -m benchmarks.hostile --only pax-bomb rank-65 --seconds 5 --pairs 1
    python -m benchmarks.hostile --only mutated-uploads --mutations 1000
    python -m benchmarks.hostile --engine-core            (the engine has a core for itself, as a GPU would be)
    python -m benchmarks.hostile --engine-core --attacker-core    (the attackers too, beside a simulated engine)
    python -m benchmarks.hostile --device simulated:8,0.02    (steps as short as a GPU's, for the attacks on the engine)
    python -m benchmarks.hostile --device simulated:8,0.02 --elsewhere    (quiet rounds attack a second stack)

The target is the gateway, engine, Valkey and SQLite (--postgres: PostgreSQL) that `loraplex up --demo` starts. A few
attacks need misbehaving engines and run on a gateway before engine doubles. Each attacker is a new tenant with the
default limits, in a process that gives way to all others (SCHED_IDLE), because a real attacker has its own machine. The
neighbour is measured for each attack in pairs of rounds, attacked and quiet, one right after the other, so that a drift
of the machine cancels. In the quiet round, a process of the attacker's priority takes as much CPU time as the
attacker's own client took, at the same moments of the round, and sends nothing. If the attack is a use of the engine
that any tenant may make, an honest tenant with the same use runs in the quiet round instead. Between the attacks, the
controls `nothing` and `busy-loop` send nothing: their ratios show how far quiet rounds differ from each other. Each
ratio has an interval of 90 %, from resampling. A limit of latency counts as missed only if the interval begins above it
and the ratio is above it as a multiple of the largest control too. Otherwise a ratio above it is undecided: more or
longer rounds decide it. An attacker that gives way attacks less when the stack keeps all cores busy, so the report has
its requests a second, also those of the quiet rounds. If it waited for a CPU for more than half of its rounds
(/proc/self/schedstat), it was starved, and latencies that are not missed are undecided: run that attack on a machine
with more cores. An attack that breaks the stack is reported, and the others follow on a new one. Exit code 1 if a limit
is missed, 2 if an attack is undecided.

With --elsewhere there is a second whole stack on the machine, and the same attack on it runs in the quiet rounds, while
the neighbour goes on using the first stack. Both rounds then have the same work on the machine's cores, so the ratio
is what tenants do to each other within one gateway and engine. It includes ordinary use of the engine, which an honest
tenant has too. The second engine takes no CPU time while it idles, but both need it under attack: use a simulated
device. The table names the load of each attack's quiet rounds.

Limits: p50 and p99 of the neighbour 1.2 times the quiet ones, its uploads 2 s; the gateway's memory +64 MiB (without
its children); an answer of /healthz, requested every 10 ms, 100 ms; nothing left behind; no 5xx except 503.
Beside a stall is its cause, if the gateway has logged one (`gateway.loop_stalled`).
"""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from benchmarks.hostile.attack import Attack
from benchmarks.hostile.catalogue import ATTACKS, SHOWN
from benchmarks.hostile.place import STACKS, Place, before_doubles, up
from benchmarks.hostile.report import CONTROLS, Report, show
from benchmarks.hostile.run import Limits, Result, Rounds, run_attack
from gateway.process.garbage import reduce_pauses
from testing.stack import http

# Number of attacks between two runs of the control `nothing`.
CONTROL_EVERY = 10

# Time beside the rounds, in seconds: the start of a stack, and for each attack its processes and the neighbour's
# calibration; for each pair of rounds the wait until all is as before.
START_SECONDS, ATTACK_SECONDS, PAIR_SECONDS = 15.0, 6.0, 2.0
# Time for a stack to be ready again after an attack. An engine that ended is started again by `loraplex up`.
READY_SECONDS = 60.0


def estimate(attacks: list[Attack], seconds: float, pairs: int, *, elsewhere: bool) -> float:
    """Return the expected duration of all attacks, in seconds. Slow recoveries and mutated uploads add to it."""
    stacks = len({attack.place for attack in attacks}) * (2 if elsewhere else 1)
    rounds = sum(2 * pairs * max(seconds, attack.least_seconds) for attack in attacks)
    return rounds + stacks * START_SECONDS + len(attacks) * (ATTACK_SECONDS + pairs * PAIR_SECONDS)


async def run_all(flags: argparse.Namespace, folder: Path, report: Report) -> None:
    wanted = [ATTACKS[name] for name in flags.only] if flags.only else SHOWN
    if not flags.mutations:
        wanted = [attack for attack in wanted if attack.name != "mutated-uploads"]
    limits = Limits(latency=flags.latency or None)
    if not flags.only:
        wanted = with_controls(wanted)
    expected = estimate(wanted, flags.seconds, flags.pairs, elsewhere=flags.elsewhere)
    print(f"{len(wanted)} runs, about {expected / 60:.0f} minutes", flush=True)
    for kind in dict.fromkeys(attack.place for attack in wanted):
        with Site(kind, folder / kind, flags) as site, Site(kind, folder / f"{kind}-elsewhere", flags) as other:
            for attack in wanted:
                if attack.place == kind:
                    print(f"\n{attack.name}: {attack.words}", flush=True)
                    report.add(await measured(attack, site, other if flags.elsewhere else None, flags, limits))
                    print(show(report.results[-1]), flush=True)


class Site:
    """A stack of one kind, started when it is first needed and again after an attack that broke it.

    folder: its folder; a number is added for each start.
    """

    def __init__(self, kind: str, folder: Path, flags: argparse.Namespace) -> None:
        self._kind, self._folder, self._flags = kind, folder, flags
        self._exits = contextlib.ExitStack()
        self._place: Place | None = None
        self._starts = 0

    def __enter__(self) -> "Site":
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def ready(self) -> Place:
        """Return the running stack. Raises an error of its start."""
        if self._place is not None and not _answers(self._place):
            print(f"the stack {self._kind} does not answer: starting a new one", flush=True)
            self._place = None
            self._exits.close()
        if self._place is None:
            home = self._folder.with_name(f"{self._folder.name}-{self._starts}")
            home.mkdir()
            self._starts += 1
            self._place = self._exits.enter_context(open_place(self._kind, home, self._flags))
        return self._place


def _answers(place: Place) -> bool:
    """Return whether the stack is ready within READY_SECONDS."""
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if http("GET", f"{place.url}/readyz").status == 200:
                return True
        time.sleep(0.5)
    return False


async def measured(attack: Attack, site: Site, other: Site | None, flags: argparse.Namespace, limits: Limits) -> Result:
    """Run an attack. An attack that cannot be measured is missed, and the others follow."""
    try:
        rounds = Rounds(flags.seconds, flags.pairs, flags.mutations, flags.attacker_core)
        return await run_attack(attack, site.ready(), rounds, limits, other.ready() if other else None)
    except Exception as error:  # noqa: BLE001 - a part that the attack broke may raise anything
        traceback.print_exc()
        words = " ".join(str(error).split())[-200:]  # the reason is at the end of a stack's output
        return Result(attack.name, missed=[f"not measured: {type(error).__name__}: {words}"])


def with_controls(attacks: list[Attack]) -> list[Attack]:
    """Return the attacks between all controls, with the control `nothing` before each group of CONTROL_EVERY."""
    controls, mixed = [ATTACKS[name] for name in CONTROLS], []
    for index, attack in enumerate(attacks):
        mixed += [ATTACKS["nothing"]] * (index > 0 and index % CONTROL_EVERY == 0) + [attack]
    return [*controls, *mixed, *controls]


def open_place(name: str, home: Path, flags: argparse.Namespace) -> contextlib.AbstractContextManager[Place]:
    if name not in STACKS:
        return before_doubles(home, name)
    return up(home, name, postgres=flags.postgres, device=flags.device, engine_core=flags.engine_core)


def leave_core() -> int:
    """Move this process and its future children off the machine's last core. Return that core."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("--engine-core, --attacker-core: this machine has one core, expected at least 2.")
    os.sched_setaffinity(0, cores[:-1])
    return cores[-1]


def read_flags(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the flags of the command line. Raises SystemExit for flags that contradict each other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(ATTACKS), metavar="NAME", help="these attacks")
    parser.add_argument("--list", action="store_true", help="print the attacks and end")
    parser.add_argument("--seconds", type=float, default=12.0, help="length of a round")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of rounds for each attack")
    parser.add_argument("--latency", type=float, default=1.2, help="limit of the neighbour's p50 and p99; 0 for none")
    parser.add_argument("--mutations", type=int, default=200, help="mutated uploads in a round; 0 for none")
    parser.add_argument("--postgres", action="store_true", help="PostgreSQL instead of SQLite")
    parser.add_argument("--device", default="auto", help="the engine's device, such as simulated:8,0.02")
    parser.add_argument("--engine-core", action="store_true", help="the engine has the last core, all else the others")
    parser.add_argument(
        "--attacker-core", action="store_true", help="the attackers have the last core, all else the others"
    )
    parser.add_argument(
        "--elsewhere", action="store_true", help="the quiet rounds have the same attack on a second stack"
    )
    parser.add_argument("--json", type=Path, help="write the results there, after each attack")
    flags = parser.parse_args(arguments)
    if flags.elsewhere and flags.engine_core:
        parser.error("--elsewhere has two engines, and --engine-core gives one engine a core for itself.")
    if flags.elsewhere and not flags.latency:
        parser.error("--elsewhere compares latencies, and --latency 0 has no limit for them.")
    return flags


def main() -> int:
    flags = read_flags()
    core = leave_core() if flags.engine_core or flags.attacker_core else None
    flags.engine_core, flags.attacker_core = core if flags.engine_core else None, core if flags.attacker_core else None
    if flags.list:
        for attack in SHOWN:
            print(f"{attack.name:20} {attack.words}" + (f"   [{attack.place}]" if attack.place != "up" else ""))
        return 0
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    # A full collection of this process's modules takes 130 ms, which looked like a stall of the gateway.
    reduce_pauses()
    print("attack, the neighbour's p50 and p99 (times quiet) [interval of 90 %], its slowest upload, the gateway's")
    print(
        "memory, its children's, its longest stall (in the quiet rounds), its CPU time; the attacker's share of a core,"
    )
    print("share of its time that it waited for one, requests a second (in the quiet rounds), statuses seen")
    # SIGTERM stops all started processes, like Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.monotonic()
    report = Report(Limits(latency=flags.latency or None), flags.json)
    try:
        with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
            asyncio.run(run_all(flags, Path(folder), report))
    finally:  # Ctrl-C too shows what was measured
        seconds = time.monotonic() - began
        print(f"\n{report.table()}\n\n{len(report.attacks)} attacks in {seconds:.0f} s\n{report.totals()}", flush=True)
    if any(result.all_missed for result in report.attacks):
        return 1
    return 2 if any(result.undecided for result in report.attacks) else 0


if __name__ == "__main__":
    sys.exit(main())
