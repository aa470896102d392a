"""Overhead of the generator itself, measured against the echo server in a process of its own."""

import asyncio
import statistics
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from loraplex.bench.arrivals import Closed, Even
from loraplex.bench.echo import MODEL
from loraplex.bench.load import Api, Load, Source, Target, Tenant
from loraplex.bench.metrics import spread, ttft
from loraplex.bench.run import Run, connect, measure
from loraplex.bench.sampling import Even as EvenPopularity
from loraplex.bench.sampling import Fixed
from loraplex.bench.sending import Sample

# Seconds of each of the two measurements.
SECONDS = 1.0
CONCURRENCY = 32
# The lowest rate, so that the second measurement has enough requests, and the highest, as a share of the maximum.
MIN_RATE, MAX_SHARE = 30.0, 0.5


async def measure_overhead(api: Api, rate: float, samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the generator's highest throughput, and the latency that it adds at `rate` requests per second.

    samples: the run's; their mean lengths are used.
    """
    prompt = round(statistics.fmean(s.planned.input_tokens for s in samples)) if samples else 64
    answer = round(statistics.fmean(s.planned.output_tokens for s in samples)) if samples else 64
    async with _echo_server() as url:
        fastest = await _run(url, api, Closed(CONCURRENCY), prompt, answer)
        done = [sample for sample in fastest.samples if sample.error is None]
        most = len(done) / max(fastest.seconds, 1e-9)
        tested = min(max(rate, MIN_RATE), max(1.0, MAX_SHARE * most))
        added = await _run(url, api, Even(tested), prompt, answer)
    values = [value for sample in added.samples if (value := ttft(sample)) is not None]
    return {
        "input_tokens": prompt,
        "output_tokens": answer,
        "max_requests_per_second": most,
        "max_events_per_second": sum(len(sample.times) for sample in done) / max(fastest.seconds, 1e-9),
        "rate": tested,
        "ttft": spread(values),
    }


async def _run(url: str, api: Api, arrival: Closed | Even, prompt: int, answer: int) -> Run:
    target = Target("echo", None, MODEL)
    source = Source("echo", (target,), arrival, EvenPopularity(), Fixed(prompt), Fixed(answer))
    load = Load((Tenant("echo"),), (source,), seconds=SECONDS, warmup=4, timeout=30, api=api)
    run = Run(load)
    async with connect(url) as server:
        await measure(server, load, run, asyncio.Event())
    return run


@asynccontextmanager
async def _echo_server() -> AsyncIterator[str]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "loraplex.bench.echo", stdin=pipe, stdout=pipe)
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        port = int(await process.stdout.readline())
        yield f"http://127.0.0.1:{port}"
    finally:
        process.stdin.close()
        await process.wait()
