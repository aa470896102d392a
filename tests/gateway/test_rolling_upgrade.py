"""A rolling upgrade and a rollback under load: gateways of an earlier commit and of this one share database and Redis.

The ledger must then have exactly one row for each request that an engine served, with the engine's counts, although a
gateway of each release was killed in the middle of streams.
"""

import asyncio
import io
import json
import os
import random
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import asyncpg
import pytest
from redis.asyncio import Redis

from gateway.settings import Settings
from testing.gateway.running import HI, Gateway, settings, until
from testing.gateway.upstream import TOKEN, Upstream
from testing.stack import ROOT

# Earlier commits, and whether their gateways start on a newer schema: before `schema_support`; with schema 0019 and an
# earlier script; with schema 0022; of 30 November 2026, whose reports of engines' deaths in Redis have fewer fields.
BEFORE = {"d71ef5c9": False, "26554fec": False, "8032235b": True, "a31fc4a9": True}
CLIENTS = 12
LIMITS = {"budget_per_month": 10**12, "max_concurrent": 200, "requests_per_minute": 10**6, "tokens_per_minute": 10**8}
PROGRAM = "from loraplex.cli import main; main()"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Earlier(NamedTuple):
    """An earlier commit. tree: its files. starts: whether its gateways start on a newer schema."""

    tree: Path
    starts: bool


@pytest.fixture(params=BEFORE)
def earlier(request: pytest.FixtureRequest, tmp_path: Path) -> Earlier:
    made = subprocess.run(("git", "archive", request.param), cwd=ROOT, capture_output=True, check=False)
    if made.returncode != 0:
        pytest.skip(f"this checkout does not have the commit {request.param}: {made.stderr.decode().strip()}")
    folder = tmp_path / "earlier"
    with tarfile.open(fileobj=io.BytesIO(made.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return Earlier(folder, BEFORE[request.param])


class Release:
    """The programs of one release. tree: its files. of: the settings of its gateways."""

    def __init__(self, tree: Path, of: Settings) -> None:
        names = ("database_url", "redis_url", "adapter_store", "model_dir", "base_model", "key_pepper", "admin_key")
        self._environ = {f"LORAPLEX_{name.upper()}": str(getattr(of, name)) for name in names}
        self._environ |= {"LORAPLEX_ENGINES": ",".join(of.engines), "LORAPLEX_INTERNAL_TOKEN": TOKEN}
        self._environ |= {"LORAPLEX_LEASE_SECONDS": "2", "LORAPLEX_SHUTDOWN_SECONDS": "20", "LORAPLEX_PORT": "0"}
        self._environ |= {"PATH": os.environ["PATH"], "PYTHONPATH": str(tree)}
        self._tree = tree
        self._journals = of.journal_dir
        self._log = of.journal_dir.parent / "gateways.log"
        self._started = 0

    async def migrate(self) -> None:
        process = await self._run("migrate")
        assert await process.wait() == 0

    async def partition(self) -> None:
        process = await self._run("usage", "partition")
        assert await process.wait() == 0

    @asynccontextmanager
    async def gateway(self) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
        """Run a gateway until the block ends; yield its process and URL."""
        self._started += 1
        journal = self._journals / f"{self._tree.name}-{self._started}"
        process = await self._run("gateway", LORAPLEX_JOURNAL_DIR=str(journal))
        try:
            assert process.stdout is not None
            line = await asyncio.wait_for(process.stdout.readline(), 60)
            yield process, json.loads(line)["gateway"]
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    async def _run(self, *arguments: str, **environ: str) -> asyncio.subprocess.Process:
        command = (sys.executable, "-c", PROGRAM, *arguments)
        with open(self._log, "ab") as log:  # noqa: ASYNC230 - the child writes it
            return await asyncio.create_subprocess_exec(
                *command, env=self._environ | environ, cwd=self._tree, stdout=asyncio.subprocess.PIPE, stderr=log
            )

    def log(self) -> str:
        return self._log.read_text()


class Load:
    """Clients that stream from the live gateways.

    answered: completion tokens by request id, of whole answers. answered_by: their gateway's URL.
    """

    def __init__(self, session: aiohttp.ClientSession, key: str) -> None:
        self.live: list[str] = []
        self.answered: dict[str, int] = {}
        self.answered_by: dict[str, str] = {}
        self.refused: list[Any] = []
        self.broken = 0
        self._session = session
        self._headers = {"Authorization": f"Bearer {key}"}
        self._ended = False
        self._tasks = [asyncio.create_task(self._client(random.Random(number))) for number in range(CLIENTS)]

    async def some(self, count: int = 40) -> None:
        """Wait until `count` more requests have been answered."""
        goal = len(self.answered) + count
        await until(lambda: _is(len(self.answered) >= goal))

    async def end(self) -> None:
        self._ended = True
        await asyncio.gather(*self._tasks)

    async def _client(self, chance: random.Random) -> None:
        while not self._ended:
            if self.live:
                await self._ask(chance.choice(self.live), chance)
            await asyncio.sleep(0.01)

    async def _ask(self, url: str, chance: random.Random) -> None:
        how = {"tokens": chance.randint(2, 30), "delay": 0.01}
        body = {"model": "base", "messages": HI, "stream": True, "max_tokens": 40, "x_engine": how}
        body |= {"stream_options": {"include_usage": True}}
        try:
            async with self._session.post(f"{url}/v1/chat/completions", json=body, headers=self._headers) as answer:
                text = (await answer.read()).decode()
                if answer.status != 200:
                    self.refused.append((answer.status, text))
                    return
                events = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
        except aiohttp.ClientError:
            self.broken += 1
            return
        assert events[-1]["usage"]["completion_tokens"] == how["tokens"]
        self.answered[answer.headers["x-request-id"]] = how["tokens"]
        self.answered_by[answer.headers["x-request-id"]] = url


async def _is(value: bool) -> bool:
    return value


async def rows(url: str) -> dict[str, tuple[int, int]]:
    """Return prompt and completion tokens of each usage row, by request id."""
    connection = await asyncpg.connect(url)
    try:
        found = await connection.fetch("SELECT request_id, prompt_tokens, completion_tokens FROM usage")
    finally:
        await connection.close()
    return {row[0]: (row[1], row[2]) for row in found}


async def tables(url: str) -> set[str]:
    """Return the partitions that have usage rows."""
    connection = await asyncpg.connect(url)
    try:
        rows = await connection.fetch("SELECT DISTINCT tableoid::regclass::text FROM usage")
    finally:
        await connection.close()
    return {row[0] for row in rows}


async def stop(process: asyncio.subprocess.Process, load: Load, url: str) -> None:
    """Take a gateway out of the load balancer, then stop it as an orchestrator does."""
    load.live.remove(url)
    await asyncio.sleep(0.1)
    process.terminate()
    assert await asyncio.wait_for(process.wait(), 60) == 0


async def test_the_ledger_is_exact_through_an_upgrade_and_a_rollback_under_load(
    earlier: Earlier, postgres_url: str, redis_url: str, tmp_path: Path, model_dir: Path, upstream: Upstream
):
    of = settings(tmp_path, model_dir, [upstream.url], redis_url, database_url=postgres_url)
    old, new = Release(earlier.tree, of), Release(ROOT, of)
    await old.migrate()
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        (first, first_url), (second, second_url), (_, third_url) = [
            await stack.enter_async_context(old.gateway()) for _ in range(3)
        ]
        tenant = await Gateway(first_url, session).tenant("acme", **LIMITS)
        load = Load(session, tenant.key or "")
        load.live += [first_url, second_url, third_url]
        await load.some()

        # Upgrade: first the schema, then one gateway after another; one of the old release dies on the new schema.
        await new.migrate()
        await load.some()
        # The partitions of usage are for gateways of both releases, also after the rollback.
        await new.partition()
        await load.some()
        (fourth, fourth_url), (fifth, fifth_url) = [await stack.enter_async_context(new.gateway()) for _ in range(2)]
        load.live += [fourth_url, fifth_url]
        await stop(first, load, first_url)
        await load.some()
        load.live.remove(second_url)
        second.kill()
        await load.some()

        # Rollback: back to the old release, while a gateway of the new one dies.
        load.live.remove(fourth_url)
        fourth.kill()
        await load.some()
        await stop(fifth, load, fifth_url)
        await load.some()
        gateways = {first_url, second_url, third_url, fourth_url, fifth_url}
        if earlier.starts:
            await old.migrate()
            _, again_url = await stack.enter_async_context(old.gateway())
            load.live.append(again_url)
            gateways.add(again_url)
            await load.some()
        await load.end()

        assert load.refused == []
        assert 0 < load.broken <= 2 * CLIENTS
        await until(lambda: _has_all(postgres_url, upstream), 60)
    served = {name: (each["prompt_tokens"], each["completion_tokens"]) for name, each in upstream.finished.items()}
    # A request whose gateway died before it reached the engine has a row without tokens.
    found = {name: tokens for name, tokens in (await rows(postgres_url)).items() if tokens != (0, 0)}
    assert found == served
    assert await tables(postgres_url) == {"usage_first"}
    assert set(load.answered_by.values()) == gateways
    assert {name: found[name][1] for name in load.answered} == load.answered
    # A background task that dies is logged as critical.
    assert [line for line in new.log().splitlines() if " CRITICAL " in line] == []
    async with Redis.from_url(redis_url) as redis:
        assert [key async for key in redis.scan_iter("loraplex:*:held")] == []


async def _has_all(url: str, upstream: Upstream) -> bool:
    return (await rows(url)).keys() >= upstream.finished.keys()
