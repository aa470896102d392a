"""Tenants whose requests reach all engines through two gateways, beside a tenant of each engine that asks it directly.

Each tenant always has requests waiting at every engine that it uses, so its share of the tokens is that of its weight.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import aiohttp

from gateway.settings import Settings
from testing.gateway.program import program
from testing.gateway.upstream import TOKEN
from testing.ports import free_ports

SEATS = 4
# Requests of each tenant at an engine at all times. Those of a spread tenant spend time in gateways too, more on a
# busy machine.
AT_ONCE, SPREAD_AT_ONCE = 8, 16
TOLERANCE = 0.1
MODEL = "tiny"
# With answers of 24 tokens, beside three busy programs on two cores, this client began its next requests so late that
# tenants had none waiting at times.
BODY = {"model": MODEL, "prompt": "The quick brown fox", "max_tokens": 48, "ignore_eos": True, "stream": True}
# The longest run sends more than a tenant's default limits allow.
NO_RATES = {"requests_per_minute": 10**6, "tokens_per_minute": 10**9}


class Loops:
    """Closed loops of requests. tokens: the tokens received by each."""

    def __init__(self) -> None:
        self.tokens: Counter[str] = Counter()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, name: str, url: str, headers: dict[str, str], concurrency: int) -> None:
        self._tasks += [asyncio.create_task(self._loop(name, url, headers)) for _ in range(concurrency)]

    async def _loop(self, name: str, url: str, headers: dict[str, str]) -> None:
        while True:
            # A connection of its own, so that any worker may answer.
            async with (
                aiohttp.ClientSession() as session,
                session.post(f"{url}/v1/completions", json=BODY, headers=headers) as response,
            ):
                assert response.status == 200, await response.text()
                async for line in response.content:
                    self.tokens[name] += line.startswith(b"data: {")

    async def run(self, seconds: float) -> Counter[str]:
        """Return the tokens that each loop receives in this time. Raises the error of a loop that failed."""
        before = self.tokens.copy()
        await asyncio.wait(self._tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        received = self.tokens - before
        for task in self._tasks:
            if task.done():
                task.result()
        return received

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def spread_tenants(
    of: Settings, weights: Mapping[str, float], at_once: int = SPREAD_AT_ONCE
) -> AsyncIterator[Loops]:
    """Run two gateways of two workers before the settings' engines, and the loops of all tenants.

    weights: the spread tenants' weights, by name. Each engine's own tenant has weight 1. at_once: requests of a spread
    tenant for each engine.
    """
    engines, loops = of.engines, Loops()
    async with program(of, free_ports(2)) as (_, one), program(of, free_ports(2)) as (_, other):
        most = 2 * at_once * len(engines)
        spread = {
            name: await one.tenant(name, weight=w, max_concurrent=most, **NO_RATES) for name, w in weights.items()
        }
        try:
            for name, tenant in spread.items():
                for gateway in (one, other):
                    loops.start(name, gateway.url, tenant.headers, at_once * len(engines) // 2)
            for number, url in enumerate(engines):
                headers = {"x-loraplex-internal-token": TOKEN, "x-loraplex-tenant": f"own-{number}"}
                loops.start(f"own-{number}", url, headers, AT_ONCE)
            yield loops
        finally:
            await loops.stop()


async def until_all_have_waited(loops: Loops, engines: Sequence[str], tenants: int, seconds: float) -> None:
    """Run the loops until each engine has been seen with a waiting request of each of its tenants.

    Before that, tenants get less than their shares, because they have asked for less. tenants: number of those of an
    engine. Raises AssertionError after `seconds`.
    """
    deadline, waited = time.monotonic() + seconds, {url: set[str]() for url in engines}
    async with aiohttp.ClientSession(headers={"x-loraplex-internal-token": TOKEN}) as session:
        while any(len(seen) < tenants for seen in waited.values()):
            assert time.monotonic() < deadline, f"the tenants that have waited at the engines: {waited}"
            await loops.run(0.1)
            for url, seen in waited.items():
                async with session.get(f"{url}/state") as response:
                    state = await response.json()
                seen.update(share["tenant"] for share in state["tenants"] if share["waiting"])


def entitled(engines: Sequence[str], weights: Mapping[str, float]) -> dict[str, float]:
    """Return each spread tenant's part of all tokens by its weight."""
    return {name: weight / (sum(weights.values()) + len(engines)) for name, weight in weights.items()}


def share(tokens: Counter[str], name: str) -> float:
    """Return a tenant's part of the tokens; 0 without tokens."""
    return tokens[name] / tokens.total() if tokens.total() else 0.0


def is_within(found: float, expected: float) -> bool:
    """Return whether a share is within TOLERANCE of the expected one."""
    return abs(found - expected) <= TOLERANCE * expected
