"""Adapters that do not fit on the device: throughput, loads and waits, and the cost for a neighbour of a tenant that
cycles through many.

    python -m benchmarks.residency --repeat 3 --out docs/perf/2026-11-27-residency.json
    python -m benchmarks.residency [--before CHECKOUT] [--only zipf cycle] [--requests 480]
    python -m benchmarks.residency --requests 160 --most-seconds 60 [--vllm VENV/bin/vllm --vllm-requests 48]

Real engines on the demo model, rank 16 on all projections, requests over HTTP with the gateway's headers. In each
round, fair share and `--scheduler fcfs` run in turn. `--before`: a checkout of an earlier release, which runs the same
requests in the same run. `--out FILE.json` also draws FILE.svg.

zipf: 64 adapters of zipf popularity (exponent 1) of 8 tenants, 32 streams at once, with device memory for 64 adapters
and for 8. A wait is the time to the first token. `above bound` counts the requests that at some moment had waited
longer than their bound (docs/design/step-loop.md, `residency_bound.py`); `of bound`: that time divided by the bound of
that moment, its median and its greatest. The bound grows with the service of the request's own tenant and with the
arrival of further tenants. `above bound at start`: the requests that waited longer than the bound without their
tenant's later requests, which is no guarantee. OUT has these figures of each request. `without token`: the longest time
during a wait in which the request's tenant got no token; `above idle bound` counts those above the bound of a tenant
with nothing running.

cycle: a neighbour sends one request after the other to its only adapter. Beside it another tenant has 16 streams of one
token, with one adapter, with 1,000 in turn, and with one adapter as often as with 1,000. The phase of 1,000 lasts until
each of them was used, at most --most-seconds. `of alone`, `of one adapter`, `of one as often`: the median time to the
neighbour's first token, divided by that of the other phases; docs/design/bench.md has their meaning. With `--seconds 8
--most-seconds 60` a round of cycle takes 3.5 minutes on two cores.

`--vllm`: a vLLM server gets the same requests of zipf in the same order, or the first --vllm-requests of them, with 64
adapters on the device and with 8, and all 64 in host memory. It is not in cycle: vLLM serves only adapters that it
loaded at its start or by a call for each (VLLM_ALLOW_RUNTIME_LORA_UPDATING), so its cycle would consist of 1,000 such
loads before the requests, and not of loads during them.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import tempfile
import time
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from adapters.tiers.reservations import CALM_WAIT_S, PAGE_WAIT_S
from benchmarks.adapter_engine import (
    MODEL,
    Adapters,
    EngineClient,
    Stream,
    make_session,
    model_of,
    percentile,
    random_prompt,
    running_engine,
)
from benchmarks.against_vllm import serving, vllm, vllm_command
from benchmarks.plot import Bar, bar_chart
from benchmarks.report_file import median_cell, run_facts
from benchmarks.residency_bound import COPY_S, LOAD_S, STEP_S, Machine, Wait, waits
from engine.scheduling.request import QUANTUM
from testing.ports import free_port
from testing.stack import ROOT

NUM_ADAPTERS, NUM_TENANTS, ON_DEVICE, AT_ONCE, PROMPT, LONG_PROMPT = 64, 8, 8, 32, 32, 512
# Short requests and many streams, so that the loads, and nothing else, limit the cycle.
CYCLED, CYCLING_STREAMS, CYCLING_PROMPT = 1000, 16, 8
# The bound of a tenant with nothing running: for pages, and for the prompts and first tokens of other tenants.
PAGES_IDLE = CALM_WAIT_S + PAGE_WAIT_S + LOAD_S + 2 * COPY_S + 2 * STEP_S
PREEMPT_AFTER, PROMPT_STEPS = 0.25, (NUM_TENANTS - 1) * (PROMPT + 2 * QUANTUM + 2)

Figures = dict[str, float]


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


async def run_zipf(url: str, warm: list[str], requests: list[Planned], room: int) -> tuple[Figures, list[Wait]]:
    """room: number of adapters that the device holds."""
    async with make_session() as session:
        engine = EngineClient(session, url)
        await engine.ready()
        for digest in warm:
            await engine.stream("warm", digest, [1000, 1001], 1)
        row = await row_seconds(engine, warm[0])
        before = (await engine.state())["adapter_loads"]
        rate, streams = await send_all(engine, requests)
        loads = (await engine.state())["adapter_loads"] - before
    gaps = [b - a for s in streams for a, b in itertools.pairwise(s.token_times)]
    found = waits(streams, Machine(statistics.mean(gaps), row, PROMPT, room))
    step = statistics.median(gaps)
    figures = {"tokens/s": rate, "loads": loads} | wait_figures([wait.ttft for wait in found])
    return figures | bound_figures(found) | figures_without_token(streams, step), found


async def run_zipf_vllm(url: str, warm: list[str], requests: list[Planned]) -> Figures:
    """Return the figures of a run at a vLLM server, which reports no loads and has no bound."""
    async with make_session() as session:
        server = EngineClient(session, url)
        for digest in warm:
            await server.stream("warm", digest, [1000, 1001], 1)
        rate, streams = await send_all(server, requests)
    return {"tokens/s": rate} | wait_figures([stream.ttft for stream in streams])


async def send_all(server: EngineClient, requests: list[Planned]) -> tuple[float, list[Stream]]:
    """Send the requests in order, `AT_ONCE` at once. Return the tokens a second while as many ran, and the streams."""
    left, answers = iter(requests), list[tuple[Planned, Stream]]()
    all_sent: list[float] = []

    async def work() -> None:
        for one in left:
            answers.append((one, await server.stream(one.tenant, one.digest, one.prompt, one.tokens)))
        # No request is left for this worker, so fewer than `AT_ONCE` streams run from here on.
        all_sent.append(time.perf_counter())

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    streams = [stream for _, stream in answers]
    start, end = min(stream.sent for stream in streams), min(all_sent)
    return sum(tokens_until(end, one.tokens, stream) for one, stream in answers) / (end - start), streams


def tokens_until(end: float, tokens: int, stream: Stream) -> float:
    """Return the tokens that a whole answer of `tokens` had delivered at a time. A server may deliver several tokens at
    once; each delivery counts for an equal part of the answer.
    """
    return tokens * sum(delivery <= end for delivery in stream.token_times) / len(stream.token_times)


async def row_seconds(engine: EngineClient, digest: str) -> float:
    """Return the seconds that a prompt token takes on an idle engine."""
    chance = random.Random(9)
    times = [(await engine.stream("warm", digest, random_prompt(chance, LONG_PROMPT), 1)).ttft for _ in range(4)]
    return statistics.median(times[1:]) / LONG_PROMPT


def wait_figures(times: list[float]) -> Figures:
    """Return percentiles of waits, in seconds."""
    return {"wait p50": percentile(times, 0.5), "wait p99": percentile(times, 0.99), "wait max": max(times)}


def bound_figures(found: Sequence[Wait]) -> Figures:
    """Return the waits' parts of their bounds."""
    parts = [wait.part for wait in found]
    return {
        "above bound": sum(part > 1 for part in parts),
        "of bound p50": percentile(parts, 0.5),
        "of bound max": max(parts),
        "least bound": min(wait.bound for wait in found),
        "above bound at start": sum(wait.ttft > wait.at_start for wait in found),
    }


def figures_without_token(streams: Sequence[Stream], step: float) -> Figures:
    """Return the longest time during a wait without a token of the request's tenant, and the number of requests in
    which it exceeded the bound of a tenant with nothing running. step: seconds of a step.
    """
    of_tenant: dict[str, list[float]] = {}
    for stream in streams:
        of_tenant.setdefault(stream.tenant, []).extend(stream.token_times)
    for times in of_tenant.values():
        times.sort()
    bound = PAGES_IDLE + PREEMPT_AFTER + PROMPT_STEPS * step
    without = [longest_without(stream, of_tenant[stream.tenant]) for stream in streams]
    return {"without token": max(without), "above idle bound": sum(time > bound for time in without)}


def longest_without(stream: Stream, tokens: list[float]) -> float:
    """Return the longest time during a request's wait in which its tenant got no token. tokens: the tenant's times."""
    first = stream.token_times[0]
    times = [stream.sent, *tokens[bisect(tokens, stream.sent) : bisect(tokens, first)], first]
    return max(after - before for before, after in itertools.pairwise(times))


@dataclass
class Cycle:
    """A neighbour with one adapter, beside streams of another tenant. seconds: least length of a phase; most_seconds:
    greatest length, if adapters are left unused.
    """

    engine: EngineClient
    mine: str
    seconds: float
    most_seconds: float
    chance: random.Random = field(default_factory=lambda: random.Random(5))

    async def phase(self, digests: Sequence[str], gap: float = 0.0) -> Figures:
        """Return the figures of a phase in which the other tenant uses `digests` in turn. gap: least mean time between
        its requests, in seconds.
        """
        loop, times, answered = asyncio.get_running_loop(), list[float](), list[str]()
        turns, cycle = itertools.count(), itertools.cycle(digests)
        before = (await self.engine.state())["adapter_loads"]
        began = loop.time()

        async def other() -> None:
            for digest in cycle:
                await asyncio.sleep(began + next(turns) * gap - loop.time())
                await self.engine.stream("other", digest, random_prompt(self.chance, CYCLING_PROMPT), 1)
                answered.append(digest)

        others = [asyncio.create_task(other()) for _ in range(CYCLING_STREAMS if digests else 0)]
        await asyncio.sleep(1)
        start = loop.time()
        while (now := loop.time() - start) < self.seconds or (
            now < self.most_seconds and len(set(answered)) < len(digests)
        ):
            prompt = random_prompt(self.chance, PROMPT)
            times.append((await self.engine.stream("neighbour", self.mine, prompt, 4)).ttft)
            await asyncio.sleep(self.chance.uniform(0, 0.1))
            for task in others:
                if task.done():
                    task.result()  # raises the error of a failed stream
        end, num_answers = loop.time(), len(answered)
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        loads = (await self.engine.state())["adapter_loads"] - before
        figures = {"p50": statistics.median(times), "p99": percentile(times, 0.99), "requests": len(times)}
        figures |= {"loads": loads, "adapters used": len(set(answered)), "seconds": end - start}
        return figures | {"other requests/s": num_answers / (end - began)}


async def run_cycle(url: str, mine: str, digests: list[str], seconds: float, most_seconds: float) -> dict[str, Figures]:
    """Return the figures of each phase, by its name."""
    async with make_session() as session:
        engine = EngineClient(session, url)
        await engine.ready()
        await engine.stream("neighbour", mine, [1000, 1001], 1)
        cycle = Cycle(engine, mine, seconds, most_seconds)
        alone, one, many = [await cycle.phase(used) for used in ([], digests[:1], digests)]
        as_often = await cycle.phase(digests[:1], gap=1 / many["other requests/s"])
    many |= {"of one adapter": many["p50"] / one["p50"], "of one as often": many["p50"] / as_often["p50"]}
    phases = {"alone": alone, "beside one": one, f"beside {len(digests):,}": many, "beside one as often": as_often}
    return {name: figures | {"of alone": figures["p50"] / alone["p50"]} for name, figures in phases.items()}


@dataclass
class Bench:
    """Runs of all rounds. results: by case and engine, the figures of each round. waits: by engine, those of zipf of
    each round. options.out: rewritten after each run.
    """

    options: argparse.Namespace
    adapters: Adapters
    results: dict[str, dict[str, list[Figures]]]
    waits: dict[str, list[list[Wait]]]

    @property
    def engines(self) -> dict[str, tuple[Path, tuple[str, ...]]]:
        """Return the checkout and the flags of each engine under test, by its name."""
        found: dict[str, tuple[Path, tuple[str, ...]]] = {"fair": (ROOT, ()), "fcfs": (ROOT, ("--scheduler", "fcfs"))}
        before = self.options.before
        return found | ({"before": (before.absolute(), ())} if before else {})

    def record(self, case: str, engine: str, figures: Figures) -> None:
        self.results.setdefault(case, {}).setdefault(engine, []).append(figures)
        print(f"{case}, {engine}: " + ", ".join(f"{name} {value:.3g}" for name, value in figures.items()), flush=True)
        if self.options.out:
            write(self.options.out, self.results, self.waits)

    def zipf(self) -> None:
        digests = self.adapters.make(NUM_ADAPTERS)
        requests = planned(digests, self.options.requests)
        for _ in range(self.options.repeat):
            with running_engine(self.adapters.root, *self._flags(NUM_ADAPTERS + 1)) as url:
                resident, found = asyncio.run(run_zipf(url, digests, requests, NUM_ADAPTERS + 1))
            self.waits.setdefault("all resident", []).append(found)
            self.record("zipf", "all resident", resident)
            for name, (tree, flags) in self.engines.items():
                with running_engine(self.adapters.root, *self._flags(ON_DEVICE), *flags, tree=tree) as url:
                    figures, found = asyncio.run(run_zipf(url, digests, requests, ON_DEVICE))
                self.waits.setdefault(f"8 of 64, {name}", []).append(found)
                ratio = figures["tokens/s"] / resident["tokens/s"]
                self.record("zipf", f"8 of 64, {name}", figures | {"of all resident": ratio})
            if self.options.vllm:
                self._zipf_vllm(digests, requests[: self.options.vllm_requests])

    def _zipf_vllm(self, digests: list[str], requests: list[Planned]) -> None:
        adapters = {model_of(digest): self.adapters.folder(digest) for digest in digests}
        resident: Figures | None = None
        for name, on_device in (("all resident", NUM_ADAPTERS), ("8 of 64", ON_DEVICE)):
            port = free_port()
            command, environment = vllm(self.options.vllm, MODEL, adapters, port, seats=AT_ONCE, on_device=on_device)
            with serving(command, port, environment) as url:
                figures = asyncio.run(run_zipf_vllm(url, digests, requests))
            resident = resident or figures
            ratio = {"of all resident": figures["tokens/s"] / resident["tokens/s"]} if figures is not resident else {}
            self.record("zipf", f"{name}, vLLM", figures | ratio)

    def cycle(self) -> None:
        digests, options = self.adapters.make(self.options.adapters + 1), self.options
        for _ in range(options.repeat):
            for name, (tree, flags) in self.engines.items():
                memory = ("--host-adapter-memory", "1GiB")
                with running_engine(self.adapters.root, *self._flags(ON_DEVICE), *memory, *flags, tree=tree) as url:
                    cycle = run_cycle(url, digests[-1], digests[:-1], options.seconds, options.most_seconds)
                    for phase, figures in asyncio.run(cycle).items():
                        self.record("cycle", f"{name}, {phase}", figures)

    def _flags(self, adapters: int) -> tuple[str, ...]:
        memory = str(adapters * self.adapters.num_bytes)
        return ("--max-lora-rank", "16", "--kv-cache-memory", "1GiB", "--adapter-memory", memory)


def table(case: str, engines: dict[str, list[Figures]]) -> str:
    """Return a Markdown table: median (least to greatest) of the rounds."""
    names = list(dict.fromkeys(name for runs in engines.values() for run in runs for name in run))
    lines = [f"**{case}**", "", f"| engine | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for engine, runs in engines.items():
        cells = [median_cell([run[name] for run in runs if name in run]) for name in names]
        lines.append(f"| {engine} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def write(out: Path, results: dict[str, dict[str, list[Figures]]], waits: dict[str, list[list[Wait]]]) -> None:
    """Write the figures of each round as JSON, with the fields of each request's `Wait`, and a plot beside them."""
    facts = run_facts("benchmarks.residency")
    each = {
        engine: [
            [[w.tenant, *(round(v, 3) for v in (w.ttft, w.part, w.bound, w.at_start))] for w in run] for run in runs
        ]
        for engine, runs in waits.items()
    }
    text = json.dumps(facts | {"results": results}, indent=1)
    # A line for each engine's waits, not five for each wait.
    out.write_text(text[:-2] + f',\n "waits": {json.dumps(each)}\n}}\n')
    panels = {
        f"{case} · {figure}": [Bar(name, [run[figure] for run in runs if figure in run]) for name, runs in of.items()]
        for case, of in results.items()
        for figure in dict.fromkeys(name for runs in of.values() for run in runs for name in run)
    }
    bar_chart(out.with_suffix(".svg"), f"Adapters beyond device memory, {facts['date']}, {facts['commit']}", panels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="checkout of an earlier release")
    parser.add_argument("--vllm", type=vllm_command, help="the vllm command, or its virtual environment; zipf only")
    parser.add_argument(
        "--vllm-requests", type=int, help="requests of zipf that vLLM gets, the first ones; default: all"
    )
    parser.add_argument("--only", nargs="+", default=["zipf", "cycle"], choices=["zipf", "cycle"])
    parser.add_argument("--repeat", type=int, default=1, help="rounds")
    parser.add_argument("--requests", type=int, default=480, help="requests of zipf")
    parser.add_argument("--adapters", type=int, default=CYCLED, help="adapters that cycle uses")
    parser.add_argument("--seconds", type=float, default=12.0, help="least seconds of each phase of cycle")
    parser.add_argument("--most-seconds", type=float, default=300.0, help="most seconds of cycle's last phase")
    parser.add_argument("--out", type=Path, help="write the figures as JSON, and a plot beside them")
    options = parser.parse_args()
    results: dict[str, dict[str, list[Figures]]] = {}
    every_wait: dict[str, list[list[Wait]]] = {}
    for case in options.only:
        with tempfile.TemporaryDirectory() as folder:  # of its own, because both cases make the same adapters
            bench = Bench(options, Adapters(Path(folder)), results, every_wait)
            bench.zipf() if case == "zipf" else bench.cycle()
    for case, engines in results.items():
        print(f"\n{table(case, engines)}")


if __name__ == "__main__":
    main()
