"""Adapters that do not fit on the device: throughput, loads and waits, and the cost for a neighbour of a tenant that
cycles through many.

    python -m benchmarks.residency [--before CHECKOUT] [--only zipf cycle] [--requests 480]

Real engines on the demo model, rank 16 on all projections, requests over HTTP with the gateway's headers. `--before`:
a checkout of an earlier release, which runs the same requests in the same run.

zipf: 64 adapters of zipf popularity (exponent 1) of 8 tenants, 32 streams at once, with device memory for 64 adapters
and for 8. A wait is the time to the first token. docs/design/step-loop.md bounds the time in which a tenant with
waiting requests has nothing running. There are seats for all, so this is the bound for pages. It is compared with the
longest time during each wait in which the request's tenant got no token.

cycle: a neighbour sends one request after the other to its only adapter; beside it another tenant has 4 streams, with
one adapter and with a new one of 1,000 for each request.
"""

import argparse
import asyncio
import itertools
import random
import statistics
import tempfile
from bisect import bisect
from dataclasses import dataclass
from pathlib import Path

from benchmarks.adapter_engine import (
    Adapters,
    EngineClient,
    Stream,
    make_session,
    percentile,
    random_prompt,
    running_engine,
)
from testing.stack import ROOT

NUM_ADAPTERS, NUM_TENANTS, ON_DEVICE, AT_ONCE, PROMPT = 64, 8, 8, 32, 32
CYCLED, CYCLING_STREAMS = 1000, 4
# Times from adapters/tiers/reservations.py, and upper limits of a host load, a copy and a step on this machine.
CALM_WAIT, PAGE_WAIT, LOAD, COPY, STEP = 10.0, 0.5, 0.1, 0.1, 0.3
BOUND = CALM_WAIT + PAGE_WAIT + LOAD + COPY + 2 * STEP


@dataclass(frozen=True)
class Planned:
    tenant: str
    digest: str
    prompt: list[int]
    tokens: int


def planned(digests: list[str], count: int) -> list[Planned]:
    """Return requests of zipf popularity. The tenant of an adapter is that of its rank modulo 8."""
    chance = random.Random(7)
    shares = list(itertools.accumulate(1 / (rank + 1) for rank in range(len(digests))))
    found = []
    for _ in range(count):
        rank = bisect(shares, chance.random() * shares[-1])
        prompt = random_prompt(chance, PROMPT)
        found.append(Planned(f"t{rank % NUM_TENANTS}", digests[rank], prompt, chance.randint(16, 96)))
    return found


@dataclass(frozen=True)
class Zipf:
    """Result of a run. beyond: requests during whose wait their tenant got no token for longer than the bound; worst:
    the longest such time.
    """

    tokens_per_second: float
    loads: int
    waits: list[float]
    beyond: int
    worst: float

    def row(self, name: str, resident: "Zipf | None") -> str:
        ratio = "" if resident is None else f"{self.tokens_per_second / resident.tokens_per_second:.2f}"
        times = " | ".join(f"{percentile(self.waits, share):.2f} s" for share in (0.5, 0.99, 1.0))
        return (
            f"| {name} | {self.tokens_per_second:.0f} | {ratio} | {self.loads} | {times} | {self.beyond} | "
            f"{self.worst:.2f} s |"
        )


async def run_zipf(url: str, warm: list[str], requests: list[Planned]) -> Zipf:
    async with make_session() as session:
        engine = EngineClient(session, url)
        await engine.ready()
        for digest in warm:
            await engine.stream("warm", digest, [1000, 1001], 1)
        before = (await engine.state())["adapter_loads"]
        left, streams = iter(requests), list[Stream]()
        all_sent: list[float] = []

        async def work() -> None:
            for one in left:
                streams.append(await engine.stream(one.tenant, one.digest, one.prompt, one.tokens))
            # No request is left for this worker, so fewer than `AT_ONCE` streams run from here on.
            all_sent.append(asyncio.get_running_loop().time())

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
        start = min(stream.sent for stream in streams)
        full = min(all_sent) - start
        tokens = sum(time - start <= full for stream in streams for time in stream.token_times)
        loads = (await engine.state())["adapter_loads"] - before
    of_tenant: dict[str, list[float]] = {}
    for stream in streams:
        of_tenant.setdefault(stream.tenant, []).extend(stream.token_times)
    for times in of_tenant.values():
        times.sort()
    without = [longest_without(stream, of_tenant[stream.tenant]) for stream in streams]
    return Zipf(tokens / full, loads, [s.ttft for s in streams], sum(w > BOUND for w in without), max(without))


def longest_without(stream: Stream, tokens: list[float]) -> float:
    """Return the longest time during a request's wait in which its tenant got no token. tokens: the tenant's times."""
    first = stream.token_times[0]
    times = [stream.sent, *tokens[bisect(tokens, stream.sent) : bisect(tokens, first)], first]
    return max(after - before for before, after in itertools.pairwise(times))


async def run_cycle(url: str, mine: str, digests: list[str], seconds: float) -> list[tuple[str, list[float], int]]:
    """Return the name, the neighbour's times to the first token and the device loads of each phase."""
    chance = random.Random(5)
    results = []
    async with make_session() as session:
        engine = EngineClient(session, url)
        await engine.ready()
        await engine.stream("neighbour", mine, [1000, 1001], 1)

        async def other(cycle: "itertools.cycle[str]") -> None:
            while True:
                await engine.stream("other", next(cycle), random_prompt(chance, PROMPT), 8)

        for name, used in (("alone", []), ("beside one adapter", digests[:1]), ("beside 1,000", digests)):
            before = (await engine.state())["adapter_loads"]
            cycle = itertools.cycle(used)
            others = [asyncio.create_task(other(cycle)) for _ in range(CYCLING_STREAMS if used else 0)]
            await asyncio.sleep(1)
            loop, times = asyncio.get_running_loop(), list[float]()
            end = loop.time() + seconds
            while loop.time() < end:
                times.append((await engine.stream("neighbour", mine, random_prompt(chance, PROMPT), 4)).ttft)
                await asyncio.sleep(chance.uniform(0, 0.1))
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            results.append((name, times, (await engine.state())["adapter_loads"] - before))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="checkout of an earlier release")
    parser.add_argument("--only", nargs="+", default=["zipf", "cycle"], choices=["zipf", "cycle"])
    parser.add_argument("--requests", type=int, default=480, help="requests of zipf")
    parser.add_argument("--seconds", type=float, default=12.0, help="seconds of each phase of cycle")
    options = parser.parse_args()
    trees = {"now": ROOT} | ({"before": options.before.absolute()} if options.before else {})
    with tempfile.TemporaryDirectory() as folder:
        adapters = Adapters(Path(folder))
        common = ("--max-lora-rank", "16", "--kv-cache-memory", "1GiB")
        few = (*common, "--adapter-memory", str(ON_DEVICE * adapters.num_bytes))
        if "zipf" in options.only:
            digests = adapters.make(NUM_ADAPTERS)
            requests = planned(digests, options.requests)
            print("| engine | tokens/s | of all resident | loads | wait p50 | p99 | max | above the bound | longest |")
            print("|" + "---|" * 9, flush=True)
            many = (*common, "--adapter-memory", str((NUM_ADAPTERS + 1) * adapters.num_bytes))
            with running_engine(adapters.root, *many) as url:
                resident = asyncio.run(run_zipf(url, digests, requests))
            print(resident.row("all resident", None), flush=True)
            for name, tree in trees.items():
                with running_engine(adapters.root, *few, tree=tree) as url:
                    print(asyncio.run(run_zipf(url, digests, requests)).row(f"8 of 64, {name}", resident), flush=True)
        if "cycle" in options.only:
            digests = adapters.make(CYCLED + 1)
            print("\n| engine | neighbour's TTFT | p50 | p99 | p50 of alone | requests | loads |\n|" + "---|" * 7)
            for name, tree in trees.items():
                with running_engine(adapters.root, *few, "--host-adapter-memory", "1GiB", tree=tree) as url:
                    phases = asyncio.run(run_cycle(url, digests[-1], digests[:-1], options.seconds))
                alone = statistics.median(phases[0][1])
                for phase, times, loads in phases:
                    middle = statistics.median(times)
                    figures = f"{1000 * middle:.0f} ms | {1000 * percentile(times, 0.99):.0f} ms | {middle / alone:.2f}"
                    print(f"| {name} | {phase} | {figures} | {len(times)} | {loads} |", flush=True)


if __name__ == "__main__":
    main()
