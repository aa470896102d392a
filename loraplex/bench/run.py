"""Load generator that sends a workload to an OpenAI-compatible server and measures the time of every token."""

import asyncio
import json
import time
from dataclasses import dataclass, field

import aiohttp

from loraplex.bench.workload import Target, Workload
from loraplex.client import reason

REQUEST_SECONDS = 1800


class BenchError(Exception):
    """The server cannot be measured, because nothing listens there."""


@dataclass(slots=True)
class Sample:
    """The measurement of a request.

    Times in seconds; `token_gaps` between pieces after the first. Token counts from the server's usage.
    """

    target: Target
    ttft: float | None = None
    latency: float = 0.0
    token_gaps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str | None = None


async def measure(url: str, workload: Workload, internal_token: str | None = None) -> tuple[list[Sample], float]:
    """Return the measured requests' samples, and the seconds from the first request to the last answer.

    internal_token: token required by an engine behind a gateway.
    """
    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS, sock_connect=10)
    connector = aiohttp.TCPConnector(limit=0)
    headers = {} if internal_token is None else {"x-loraplex-internal-token": internal_token}
    async with aiohttp.ClientSession(url.rstrip("/"), headers=headers, timeout=timeout, connector=connector) as session:
        try:
            async with session.get("/health"):
                pass
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise BenchError(f"cannot reach {url}: {reason(error)}") from error
        requests = list(workload.requests())
        await _closed_loop(session, workload, requests[: workload.warmup])
        send = _closed_loop if workload.rate is None else _open_loop
        started = time.perf_counter()
        samples = await send(session, workload, requests[workload.warmup :])
        return samples, time.perf_counter() - started


async def _closed_loop(
    session: aiohttp.ClientSession, workload: Workload, requests: list[tuple[Target, str]]
) -> list[Sample]:
    free = asyncio.Semaphore(workload.concurrency)

    async def one(target: Target, prompt: str) -> Sample:
        async with free:
            return await _ask(session, target, prompt, workload.output_tokens)

    return await asyncio.gather(*(one(*request) for request in requests))


async def _open_loop(
    session: aiohttp.ClientSession, workload: Workload, requests: list[tuple[Target, str]]
) -> list[Sample]:
    tasks = []
    loop = asyncio.get_running_loop()
    due = loop.time()
    for (target, prompt), gap in zip(requests, workload.gaps(), strict=False):
        # Relative to the schedule, not to now: a slow sender must not reduce the load.
        due += gap
        await asyncio.sleep(due - loop.time())
        tasks.append(asyncio.create_task(_ask(session, target, prompt, workload.output_tokens)))
    return await asyncio.gather(*tasks)


async def _ask(session: aiohttp.ClientSession, target: Target, prompt: str, output_tokens: int) -> Sample:
    sample = Sample(target)
    body = {
        "model": target.model,
        "prompt": prompt,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    started = time.perf_counter()
    try:
        async with session.post("/v1/completions", json=body, headers=headers) as response:
            if response.status == 200:
                await _read(response, sample, started)
            else:
                sample.error = f"status {response.status}: {(await response.text())[:200]}"
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        sample.error = f"{type(error).__name__}: {error}"
    sample.latency = time.perf_counter() - started
    return sample


async def _read(response: aiohttp.ClientResponse, sample: Sample, started: float) -> None:
    last: float | None = None
    async for line in response.content:
        if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
            continue
        event = json.loads(line[5:])
        if "error" in event:
            sample.error = str(event["error"])
            return
        if usage := event.get("usage"):
            sample.prompt_tokens, sample.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        if event.get("choices"):
            now = time.perf_counter()
            if last is None:
                sample.ttft = now - started
            else:
                sample.token_gaps.append(now - last)
            last = now
    if last is None:
        sample.error = "the answer held no token"
