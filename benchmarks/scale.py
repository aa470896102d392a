"""Limits by size: CPU time of the gateway's parts, a simulated large installation, and a table of what breaks first.

    python -m benchmarks.scale                      # costs, table and simulation at full size
    python -m benchmarks.scale --part costs
    python -m benchmarks.scale --engines 40 --gateways 4 --adapters 400 --tenants 1000 --seconds 5    # small

The costs are CPU time of the real code at growing numbers of engines and tenants, with a real Valkey. The table applies
them to an installation and orders its parts by their load; a part breaks where it needs more than one core. The
simulation (`scale_fleet.py`) runs the choice, the queue, the counters and the quota of all gateways in simulated time.
The full size needs about 1 GB of memory; `--seconds` bounds its time.
"""

import argparse
import os
import platform
import time
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

from benchmarks.report_file import publish
from benchmarks.scale_costs import Cost, measure
from benchmarks.scale_fleet import PUSH_SECONDS, REQUEST_SECONDS, SLOTS, Result, Scale, simulate
from gateway.fleet.discovery.base_engines import HOLDERS_AGE, MAX_AGE
from gateway.fleet.queueing.engine_service import SECONDS as SERVICE_SECONDS
from gateway.fleet.queueing.shared_service import SECONDS as EXCHANGE_SECONDS
from gateway.fleet.queueing.shared_service import interval

# Reports of a busy engine per second to a gateway, and the gateways up to which it sends as many
# (`engine/http/state_feed.py`).
REPORTS, USUAL_FOLLOWERS = 20, 16
# CPU seconds of a request's HTTP and everything else in a process (docs/perf/2026-11-30-scale.md), and rows a second of
# the ledger on PostgreSQL with two hyperthreads (docs/perf/2026-11-27-usage-partitions.md). Two whole cores take 3,472
# (docs/perf/2026-11-30-usage-100-million.md).
HTTP_SECONDS, LEDGER_ROWS = 1.44e-3, 1964
# Readings per second of the changes of keys and names.
READINGS = 10
FULL_QUEUE = "full queue of 512 requests"
# Tenants that send FLOOD of all requests in the simulation with flooders, and its load.
FLOODERS, FLOOD, FLOODED_LOAD = 20, 0.7, 1.5


class Part(NamedTuple):
    """Load of a part of the installation, in cores of a process or server.

    before: without the present bounds; None if nothing has changed. amount, unit: the size that the load grows with.
    """

    name: str
    where: str
    before: float | None
    load: float
    amount: float
    unit: str
    beyond: str

    def limit(self, load: float) -> str:
        """Return the size at which the part needs a whole core if it needs `load` now."""
        return f"{self.amount / load:,.0f} {self.unit}"


class Costs:
    def __init__(self, costs: Sequence[Cost]) -> None:
        self._costs = costs

    def at(self, part: str, number: int, *, grows: bool = True) -> float:
        """Return the seconds of a call at a number of objects, from the largest number measured up to it.

        grows: whether the cost grows with the number.
        """
        found = [cost for cost in self._costs if cost.part == part]
        below = [cost for cost in found if cost.number <= number] or [min(found, key=lambda cost: cost.number)]
        cost = max(below, key=lambda cost: cost.number)
        return cost.seconds * (number / cost.number if grows else 1.0)


def parts(costs: Costs, scale: Scale, active: int) -> list[Part]:
    """Return the parts of an installation, the most loaded first. active: tenants active in a process."""
    gateways, engines, rate = scale.gateways, scale.engines, scale.rate
    own, all_reports = rate / gateways, REPORTS * engines
    reports = all_reports / max(1.0, gateways / USUAL_FOLLOWERS)
    sums = costs.at("sums over engines", engines)
    service = [costs.at(f"service to {part}", engines) / SERVICE_SECONDS for part in ("all engines", "engines")]
    attempt = costs.at("attempt to admit", 512)
    # A request tries to admit others when it comes, when its engine has finished and when it ends.
    waiting = [attempt * (3 * own + looks) for looks in (all_reports, min(reports, 1 / MAX_AGE))]

    def of_requests(name: str, before: float | None, load: float) -> Part:
        return Part(name, "a process", before, load, own, "requests/s", "more gateway processes")

    def of_active(name: str, before: float, load: float) -> Part:
        return Part(name, "a process", before, load, active, "active tenants", "more gateway processes")

    def of_engines(name: str, before: float | None, load: float) -> Part:
        return Part(name, "a process", before, load, engines, "engines", "a set of gateways for each group of engines")

    def of_server(name: str, where: str, before: float | None, load: float, amount: float, unit: str) -> Part:
        return Part(name, where, before, load, amount, unit, f"a {where} for each group of tenants")

    exchange, before = 1 / interval(active), 1 / EXCHANGE_SECONDS
    of_process, of_redis = (costs.at(f"exchange, {part}", active) for part in ("process", "Redis"))
    index = costs.at("index of holders", engines) / HOLDERS_AGE
    found = [
        of_requests(
            "choice of an engine",
            own * costs.at("choice among all", engines),
            own * costs.at("choice", engines, grows=False),
        ),
        of_engines("sums over engines, index of holders", own * sums, sums / MAX_AGE + index),
        of_requests("admission by the queue", None, own * costs.at("admission", active)),
        of_requests("calls of the quota", None, own * costs.at("quota, process", 1)),
        of_requests("HTTP, tokenizer, the rest", None, own * HTTP_SECONDS),
        of_engines("reports of engines", all_reports * costs.at("report", 1), reports * costs.at("report", 1)),
        of_engines(FULL_QUEUE, *waiting),
        of_engines("service to engines, without the POSTs", *service),
        of_active("exchange of counters", before * of_process, exchange * of_process),
        of_requests("changes of keys", None, READINGS * costs.at("changes of keys", scale.tenants, grows=False)),
        of_server(
            "exchange of counters",
            "Redis",
            gateways * before * of_redis,
            gateways * exchange * of_redis,
            gateways,
            "gateways",
        ),
        of_server("quota", "Redis", None, rate * costs.at("quota, Redis", 1), rate, "requests/s"),
        of_server("usage rows", "PostgreSQL", None, rate / LEDGER_ROWS, rate, "requests/s"),
    ]
    return sorted(found, key=lambda part: -part.load)


def table_of_costs(costs: Sequence[Cost]) -> Iterator[str]:
    yield "| part | size | CPU of a call |"
    yield "|---|---|---|"
    for cost in costs:
        yield f"| {cost.part} | {cost.size} | {1e6 * cost.seconds:,.0f} us |"


def table_of_parts(found: Sequence[Part], scale: Scale, active: int) -> Iterator[str]:
    yield f"Cores that each part needs at {words(scale)}, {active:,} tenants active in each process."
    yield "A part that needs more than one core breaks."
    yield ""
    of_process = [part for part in found if part.where == "a process" and part.name != FULL_QUEUE]
    now, before = sum(part.load for part in of_process), sum(part.before or part.load for part in of_process)
    yield f"A gateway process needs {now:.2f} cores in all while its queue is not full, {before:.2f} before."
    yield ""
    yield "| part | where | cores before | cores | limit before | limit | beyond |"
    yield "|---|---|---|---|---|---|---|"
    for part in found:
        cores, was = ("", "") if part.before is None else (f"{part.before:.2f}", part.limit(part.before))
        yield (
            f"| {part.name} | {part.where} | {cores} | {part.load:.2f} | {was} | "
            f"{part.limit(part.load)} | {part.beyond} |"
        )


def words(scale: Scale) -> str:
    return (
        f"{scale.gateways} gateways, {scale.engines:,} engines of {SLOTS} places, {scale.adapters:,} adapters, "
        f"{scale.tenants:,} tenants, {scale.rate:,.0f} requests/s"
    )


def table_of_results(results: Sequence[tuple[str, Result]]) -> Iterator[str]:
    yield f"A request takes {REQUEST_SECONDS:.2f} s without a wait; engines report every {PUSH_SECONDS * 1000:.0f} ms."
    yield ""
    yield (
        "| run | requests | refused | TTFT p50 | p99 | loads per 100 requests | engines of the first adapter | "
        "requests on an engine: mean, most | Jain's index | tenants active in a process |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for name, found in results:
        busy, jain = found.busy or [0], "" if found.jain is None else f"{found.jain:.3f}"
        counted = found.requests * (1 - found.scale.warmup / found.scale.seconds)
        yield (
            f"| {name} | {found.requests:,} | {found.refused + found.over_quota:,} | "
            f"{1000 * found.percentile(0.5):,.0f} ms | {1000 * found.percentile(0.99):,.0f} ms | "
            f"{100 * found.loads / max(1.0, counted):.2f} | {len(found.engines_of['adapter-0'])} | "
            f"{sum(busy) / len(busy):.1f}, {max(busy)} | {jain} | {found.active:,} |"
        )


def simulations(scale: Scale, *, compare: bool) -> Iterator[tuple[str, Result]]:
    """Simulate the installation, and a tenth of it with flooders, twice as long because their queues fill first.

    compare: also with a choice among all engines.
    """
    if compare:
        yield "choice among all engines", simulate(scale._replace(among_all=True))
    yield "now", simulate(scale)
    tenth = {name: max(1, getattr(scale, name) // 10) for name in ("gateways", "engines", "adapters", "tenants")}
    flooded = scale._replace(**tenth, seconds=2 * scale.seconds, load=FLOODED_LOAD, flooders=FLOODERS, flood=FLOOD)
    name = f"a tenth, load {FLOODED_LOAD:.0%}, {FLOOD:.0%} of it from {FLOODERS} tenants of weight 1 or 2"
    yield name, simulate(flooded)


def sizes_up_to(number: int) -> list[int]:
    """Return the powers of ten below a number, and the number."""
    return [*(10**power for power in range(1, 7) if 10**power < number), number]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("all", "costs", "simulation"), default="all")
    for name in ("gateways", "engines", "adapters", "tenants"):
        parser.add_argument(f"--{name}", type=int, default=Scale._field_defaults[name])
    parser.add_argument("--seconds", type=float, default=Scale().seconds, help="simulated time with arrivals")
    parser.add_argument("--active", type=int, default=1000, help="tenants active in a process, for the table")
    parser.add_argument("--requests", type=int, default=5000, help="requests of the quota's measurement")
    parser.add_argument("--compare", action="store_true", help="simulate a choice among all engines too (slow)")
    parser.add_argument("--out", type=Path, help="also append the tables here")
    given = parser.parse_args()
    scale = Scale(given.gateways, given.engines, given.adapters, given.tenants, seconds=given.seconds)
    scale = scale._replace(warmup=0.4 * given.seconds)
    began, lines = time.monotonic(), [f"{date.today()}, {os.cpu_count()} cores ({platform.machine()}).", ""]
    if given.part != "simulation":
        costs = measure(sizes_up_to(given.engines), sizes_up_to(given.tenants), given.requests)
        found = parts(Costs(costs), scale, given.active)
        lines += [*table_of_costs(costs), "", *table_of_parts(found, scale, given.active), ""]
    if given.part != "costs":
        lines += [f"Simulation of {words(scale)}, {scale.seconds:g} s.", ""]
        lines += [*table_of_results(list(simulations(scale, compare=given.compare))), ""]
    lines.append(f"It took {time.monotonic() - began:.0f} s.")
    publish(lines, given.out)


if __name__ == "__main__":
    main()
