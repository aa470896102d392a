"""Share of a tenant that is spread over all engines, through two gateways with two workers each and real engines."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import aiohttp
import pytest

from testing.engine import RunningServer
from testing.gateway.program import program
from testing.gateway.running import settings
from testing.gateway.upstream import TOKEN
from testing.ports import free_ports
from testing.tiny import save_model

NUM_ENGINES = 3
SEATS = 4
# Requests of each tenant at an engine at all times. A share is for a tenant that always has requests waiting there;
# those of the spread tenant spend time in gateways too, more on a busy machine.
AT_ONCE, SPREAD_AT_ONCE = 8, 16
WARM_SECONDS, SECONDS = 2.0, 4.0
# Time in which the service since the start of the measurement has to reach the share: a busy machine takes longer.
LIMIT_SECONDS = 40.0
BODY = {"model": "tiny", "prompt": "The quick brown fox", "max_tokens": 24, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_model(folder)
    return folder


@pytest.fixture(scope="module")
def engines(tiny: Path, starts_servers: None, takes_a_core: None) -> Iterator[list[str]]:
    with ExitStack() as stack:
        config = {"max_num_seqs": SEATS}
        servers = [RunningServer(tiny, config=config, internal_token=TOKEN) for _ in range(NUM_ENGINES)]
        for server in servers:
            stack.enter_context(closing(server))
        yield [server.url for server in servers]


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


async def test_a_tenant_spread_over_all_engines_has_one_share(
    tmp_path: Path, tiny: Path, engines: list[str], redis_url: str, migrated_postgres_url: str
):
    """Each engine has a tenant of its own, which asks it directly; the spread tenant comes through both gateways.

    By the engines' own counters alone it would get half of each engine.
    """
    of = settings(tmp_path, tiny, engines, redis_url, base_model="tiny", database_url=migrated_postgres_url)
    loops = Loops()
    async with program(of, free_ports(2)) as (_, one), program(of, free_ports(2)) as (_, other):
        spread = await one.tenant("spread", max_concurrent=2 * SPREAD_AT_ONCE * NUM_ENGINES)
        try:
            for gateway in (one, other):
                loops.start("spread", gateway.url, spread.headers, SPREAD_AT_ONCE * NUM_ENGINES // 2)
            for number, url in enumerate(engines):
                headers = {"x-loraplex-internal-token": TOKEN, "x-loraplex-tenant": f"own-{number}"}
                loops.start(f"own-{number}", url, headers, AT_ONCE)
            await loops.run(WARM_SECONDS)
            tokens = await loops.run(SECONDS)
            deadline = time.monotonic() + LIMIT_SECONDS
            while not _is_fair(tokens) and time.monotonic() < deadline:
                tokens += await loops.run(1.0)
        finally:
            await loops.stop()
    assert _is_fair(tokens), tokens


def _is_fair(tokens: Counter[str]) -> bool:
    return tokens["spread"] / tokens.total() == pytest.approx(1 / (1 + NUM_ENGINES), rel=0.1)
