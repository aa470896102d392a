"""Attacks of a hostile tenant beside a well-behaved one on a live stack, with a report of the effect of each.

    python -m benchmarks.hostile                          (all; prints an estimate; --list names them)
    python -m benchmarks.hostile --seconds 5 --pairs 1    (all, within half an hour)
    python -m benchmarks.hostile --only pax-bomb rank-65 --seconds 5 --pairs 1
    python -m benchmarks.hostile --only mutated-uploads --mutations 1000
    python -m benchmarks.hostile --engine-core            (the engine has a core for itself, as a GPU would be)

The target is the gateway, engine, Valkey and SQLite (--postgres: PostgreSQL) that `loraplex up --demo` starts. A few
attacks need misbehaving engines and run on a gateway before engine doubles. Each attacker is a new tenant with the
default limits, in a process of niceness 19, so that its own work takes little CPU time from the service. For each
attack the neighbour is measured in pairs of rounds, attacked and quiet, one right after the other, so that a drift of
the machine cancels. In the quiet round, a process of the attacker's niceness takes as much CPU time as the attacker's
own client took, and sends nothing, because a real attacker has its own machine. If the attack is a use
of the engine that any tenant may make, an honest tenant with the same use runs in the quiet round instead. Between the
attacks, the controls `nothing` and `busy-loop` send nothing: their ratios show how far quiet rounds differ from each
other. Each ratio has an interval of 90 %, from resampling. A ratio above its limit whose interval begins below the
limit is undecided: more or longer rounds decide it. Exit code 1 if a limit is missed.

Limits: p50 and p99 of the neighbour 1.2 times the quiet ones, its uploads 2 s; the gateway's memory +64 MiB (without
its children); an answer of /healthz, requested every 10 ms, 100 ms; nothing left behind; no 5xx except 503.
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
from pathlib import Path

from benchmarks.hostile.attack import Attack
from benchmarks.hostile.catalogue import ATTACKS, SHOWN
from benchmarks.hostile.place import STACKS, Place, before_doubles, up
from benchmarks.hostile.run import Limits, Result, as_json, run_attack

# Number of attacks between two runs of the control.
CONTROL_EVERY = 10
CONTROLS = ("nothing", "busy-loop")


# Time beside the rounds, in seconds: the start of a stack, and for each attack its processes and the neighbour's
# calibration; for each pair of rounds the wait until all is as before.
START_SECONDS, ATTACK_SECONDS, PAIR_SECONDS = 15.0, 6.0, 2.0


def show(result: Result) -> str:
    """Return an attack's line of the report."""
    verdict = "holds"
    if result.undecided:
        verdict = "UNDECIDED " + "; ".join(result.undecided)
    if result.missed:
        verdict = "MISSED " + "; ".join(result.missed + result.undecided)
    statuses = " ".join(f"{status}:{number}" for status, number in sorted(result.statuses.items()))
    return (
        f"{result.name:20} p50 {result.p50}  p99 {result.p99}  {result.upload:6.2f} s "
        f"{result.memory / 2**20:+6.0f} MiB {result.children / 2**20:5.0f} MiB "
        f"{result.stall * 1000:6.0f} ({result.quiet_stall * 1000:.0f}) ms {result.cpu:5.1f} s "
        f"{result.busy:.2f}  {statuses}\n"
        f"{'':20} {result.samples} chats; quiet {result.quiet_ms[0]:.0f} {result.quiet_ms[1]:.0f} ms, its rounds "
        f"differ by {result.quiet_spread[0]:.2f} {result.quiet_spread[1]:.2f}; took {result.seconds:.0f} s\n"
        f"{'':20} {verdict}" + "".join(f"\n{'':20} {note}" for note in result.notes)
    )


def estimate(attacks: list[Attack], seconds: float, pairs: int) -> float:
    """Return the expected duration of all attacks, in seconds. Slow recoveries and mutated uploads add to it."""
    rounds = sum(2 * pairs * max(seconds, attack.least_seconds) for attack in attacks)
    places = len({attack.place for attack in attacks})
    return rounds + places * START_SECONDS + len(attacks) * (ATTACK_SECONDS + pairs * PAIR_SECONDS)


async def run_all(flags: argparse.Namespace, folder: Path) -> list[Result]:
    wanted = [ATTACKS[name] for name in flags.only] if flags.only else SHOWN
    if not flags.mutations:
        wanted = [attack for attack in wanted if attack.name != "mutated-uploads"]
    limits = Limits(latency=flags.latency or None)
    if not flags.only:
        wanted = with_controls(wanted)
    print(f"{len(wanted)} runs, about {estimate(wanted, flags.seconds, flags.pairs) / 60:.0f} minutes", flush=True)
    results = []
    for name in dict.fromkeys(attack.place for attack in wanted):
        with contextlib.ExitStack() as exits:
            place = exits.enter_context(open_place(name, folder, flags))
            for attack in wanted:
                if attack.place == name:
                    print(f"\n{attack.name}: {attack.words}", flush=True)
                    results.append(await measured(attack, place, flags, limits))
                    print(show(results[-1]), flush=True)
    return results


async def measured(attack: Attack, place: Place, flags: argparse.Namespace, limits: Limits) -> Result:
    """Run an attack. One that cannot be measured is missed, and the others follow."""
    try:
        return await run_attack(attack, place, flags.seconds, flags.pairs, limits, flags.mutations)
    except Exception as error:  # noqa: BLE001 - a part that the attack broke may raise anything
        traceback.print_exc()
        return Result(attack.name, missed=[f"not measured: {type(error).__name__}: {str(error)[:200]}"])


def table(results: list[Result]) -> str:
    """Return the results as a table in Markdown."""
    head = ("attack", "p50", "p99", "upload", "gateway", "stall (quiet)", "statuses", "verdict")
    rows = [head, ("---",) * len(head)]
    for each in results:
        statuses = " ".join(f"{status}:{number}" for status, number in sorted(each.statuses.items()))
        verdict = "; ".join([*each.missed, *each.undecided])
        prefix = "**missed**: " if each.missed else "undecided: " if each.undecided else "holds"
        stall = f"{each.stall * 1000:.0f} ({each.quiet_stall * 1000:.0f}) ms"
        memory = f"{each.memory / 2**20:+.0f} MiB"
        cells = (each.name, str(each.p50), str(each.p99), f"{each.upload:.2f} s", memory, stall, statuses)
        rows.append((*cells, prefix + verdict))
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in row) + " |" for row in rows
    )


def with_controls(attacks: list[Attack]) -> list[Attack]:
    """Return the attacks with the control `nothing` before each group of CONTROL_EVERY, and all controls at the end."""
    control, mixed = ATTACKS["nothing"], []
    for index, attack in enumerate(attacks):
        mixed += [control] * (index % CONTROL_EVERY == 0) + [attack]
    return [*mixed, *(ATTACKS[name] for name in CONTROLS)]


def open_place(name: str, folder: Path, flags: argparse.Namespace) -> contextlib.AbstractContextManager[Place]:
    home = folder / name
    home.mkdir()
    if name not in STACKS:
        return before_doubles(home, name)
    return up(home, name, postgres=flags.postgres, engine_core=flags.engine_core)


def leave_core() -> int:
    """Move this process and its future children off the machine's last core. Return that core."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("--engine-core: this machine has one core, expected at least 2.")
    os.sched_setaffinity(0, cores[:-1])
    return cores[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(ATTACKS), metavar="NAME", help="these attacks")
    parser.add_argument("--list", action="store_true", help="print the attacks and end")
    parser.add_argument("--seconds", type=float, default=12.0, help="length of a round")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of rounds for each attack")
    parser.add_argument("--latency", type=float, default=1.2, help="limit of the neighbour's p50 and p99; 0 for none")
    parser.add_argument("--mutations", type=int, default=200, help="mutated uploads in a round; 0 for none")
    parser.add_argument("--postgres", action="store_true", help="PostgreSQL instead of SQLite")
    parser.add_argument("--engine-core", action="store_true", help="the engine has one core, and all else the others")
    parser.add_argument("--json", type=Path, help="write the results there as well")
    flags = parser.parse_args()
    flags.engine_core = leave_core() if flags.engine_core else None
    if flags.list:
        for attack in SHOWN:
            print(f"{attack.name:20} {attack.words}" + (f"   [{attack.place}]" if attack.place != "up" else ""))
        return 0
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    print("attack, the neighbour's p50 and p99 (times quiet) [interval of 90 %], its slowest upload, the gateway's")
    print(
        "memory, its children's, its longest stall (in the quiet rounds), its CPU time, the attacker's share of a core,"
    )
    print("statuses seen")
    # SIGTERM stops all started processes, like Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        results = asyncio.run(run_all(flags, Path(folder)))
    controls = [result for result in results if result.name in CONTROLS]
    missed = [result.name for result in results if result.missed and result not in controls]
    print(f"\n{table(results)}\n\n{len(results) - len(controls)} attacks in {time.monotonic() - began:.0f} s: ", end="")
    print(f"{len(missed)} MISSED: {', '.join(missed)}" if missed else "none missed")
    undecided = [result.name for result in results if result.undecided and not result.missed and result not in controls]
    if undecided:
        print(f"{len(undecided)} UNDECIDED: {', '.join(undecided)}")
    if controls:
        print("no attack: " + ", ".join(f"{each.name} p50 {each.p50} p99 {each.p99}" for each in controls))
    if flags.json:
        flags.json.write_bytes(as_json(results))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
