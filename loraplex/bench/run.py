"""Run of a load against a server: each request at its planned time, with the generator's own delays measured.

Open loop: a request's latency counts from its planned time. A late sender or a busy event loop so adds to the latency
instead of hiding it (coordinated omission).
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit, urlunsplit

import aiohttp

from loraplex.bench.arrivals import Closed
from loraplex.bench.load import Load, PlannedRequest, Source, Tenant
from loraplex.bench.monitor import Monitor
from loraplex.bench.sampling import Fixed
from loraplex.bench.sending import Sample, Sender
from loraplex.client import reason
from wire.headers import INTERNAL_TOKEN_HEADER, TENANT_HEADER, WEIGHT_HEADER

# Pause of a closed loop's place after a failed request, so that a server that refuses everything is not flooded.
AFTER_FAILURE = 0.1
WARMUP_CONCURRENCY = 8
WARMUP_TOKENS = 8


class BenchError(Exception):
    """The server cannot be measured, because nothing listens there."""


@dataclass(slots=True)
class RunCounts:
    """Counts of a run so far."""

    sent: int = 0
    done: int = 0
    failed: int = 0
    tokens: int = 0

    def line(self) -> str:
        waiting = self.sent - self.done - self.failed
        return f"{self.sent} sent, {self.done} done, {self.failed} failed, {waiting} in flight"


@dataclass(slots=True)
class Run:
    """A finished run. Times in the samples are relative to its start; seconds: until the last answer's end."""

    load: Load
    samples: list[Sample] = field(default_factory=list)
    seconds: float = 0.0
    interrupted: bool = False
    monitor: Monitor = field(default_factory=Monitor)
    progress: RunCounts = field(default_factory=RunCounts)


@dataclass(slots=True)
class Server:
    """A server and the session to it. internal_token: required by an engine behind a gateway."""

    url: str
    session: aiohttp.ClientSession
    internal_token: str | None = None

    def headers(self, tenant: Tenant | None, api_key: str | None) -> dict[str, str]:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        if self.internal_token is not None:
            headers[INTERNAL_TOKEN_HEADER] = self.internal_token
            if tenant is not None:
                headers |= {TENANT_HEADER: tenant.name, WEIGHT_HEADER: f"{tenant.weight:g}"}
        return headers


def base_url(url: str) -> str:
    """Return the URL in front of `/v1`."""
    return url.rstrip("/").removesuffix("/v1")


def shown_url(url: str) -> str:
    """Return the URL without the user and password that it may have."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


@asynccontextmanager
async def connect(url: str, internal_token: str | None = None) -> AsyncIterator[Server]:
    """Open a session to a server that answers. Raises BenchError."""
    connector = aiohttp.TCPConnector(limit=0)
    probe = aiohttp.ClientTimeout(total=10)
    async with aiohttp.ClientSession(connector=connector) as session:
        try:
            async with session.get(base_url(url) + "/health", timeout=probe, allow_redirects=False):
                pass
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise BenchError(f"cannot reach {shown_url(url)}: {reason(error)}") from error
        yield Server(base_url(url), session, internal_token)


async def warm_up(server: Server, load: Load) -> None:
    """Send each source's warm-up requests, with short answers and prompts that differ from the run's. Failures are
    ignored.
    """
    warm = replace(load, seed=-1 - load.seed, seconds=None)
    free = asyncio.Semaphore(WARMUP_CONCURRENCY)
    runner = Runner(server, warm, Run(warm))

    async def one(planned: PlannedRequest) -> None:
        async with free:
            await runner.send(planned, warm.prompt(planned), time.perf_counter())

    sources = (
        replace(source, requests=load.warmup, arrival=Closed(1), rows=(), output=Fixed(WARMUP_TOKENS))
        for source in load.sources
    )
    await asyncio.gather(*(one(planned) for source in sources for planned in warm.plan(source)))


async def measure(server: Server, load: Load, run: Run, stop: asyncio.Event) -> None:
    """Send the load and fill the run. The requests in flight are cut at the end of the load's `drain`, or when `stop`
    is set, which makes the run `interrupted`.
    """
    runner = Runner(server, load, run)

    async def send_all() -> None:
        await warm_up(server, load)
        run.monitor.start()
        with suppress(TimeoutError):
            async with asyncio.timeout(load.longest):
                await runner.drive()

    work, stopped = asyncio.create_task(send_all()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
        run.interrupted = stop.is_set() and not work.done()
    finally:
        stopped.cancel()
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work
        run.monitor.stop()
    ends = [sample.ended for sample in run.samples if sample.ended is not None]
    run.seconds = max(ends, default=runner.start) - runner.start
    for sample in run.samples:
        _make_relative(sample, runner.start)


def _make_relative(sample: Sample, start: float) -> None:
    sample.due -= start
    sample.sent -= start
    sample.ended = None if sample.ended is None else sample.ended - start
    for number, at in enumerate(sample.times):
        sample.times[number] = at - start


class Runner:
    """Sends a load's requests and records a sample of each, in the order of their starts."""

    def __init__(self, server: Server, load: Load, run: Run) -> None:
        self._server = server
        self._load = load
        self._run = run
        self._sender = Sender(server.session, server.url, load.api, ignore_eos=load.ignore_eos, timeout=load.timeout)
        self._tenants: Mapping[str, Tenant] = {tenant.name: tenant for tenant in load.tenants}
        self.start = time.perf_counter()

    async def drive(self) -> None:
        self.start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for source in self._load.sources:
                if isinstance(source.arrival, Closed):
                    plan = self._load.plan(source)
                    for _ in range(min(source.arrival.concurrency, source.requests or source.arrival.concurrency)):
                        group.create_task(self._place(source, plan))
                else:
                    group.create_task(self._open(source, group))

    async def send(self, planned: PlannedRequest, prompt: str, due: float) -> Sample:
        sample = Sample(planned, due, sent=due)
        self._run.samples.append(sample)
        target = planned.target
        headers = self._server.headers(self._tenants.get(target.tenant), target.api_key)
        progress = self._run.progress
        progress.sent += 1
        await self._sender.send(sample, prompt, headers)
        progress.done += sample.error is None
        progress.failed += sample.error is not None
        progress.tokens += sample.output_tokens
        return sample

    async def _open(self, source: Source, group: asyncio.TaskGroup) -> None:
        for planned in self._load.plan(source):
            assert planned.at is not None
            due, prompt = self.start + planned.at, self._load.prompt(planned)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            group.create_task(self.send(planned, prompt, due))

    async def _place(self, source: Source, plan: Iterator[PlannedRequest]) -> None:
        """Send one request after the other until the plan or the run ends."""
        end = min((end for end in (self._load.seconds, source.stop) if end is not None), default=float("inf"))
        await asyncio.sleep(max(0.0, self.start + source.start - time.perf_counter()))
        for planned in plan:
            prompt = self._load.prompt(planned)
            now = time.perf_counter()
            if now - self.start >= end:
                return
            sample = await self.send(planned, prompt, now)
            if sample.error is not None:
                await asyncio.sleep(AFTER_FAILURE)
