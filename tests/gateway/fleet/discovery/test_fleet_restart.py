"""Real engines that announce themselves to a gateway and stop one after the other under load."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from testing.gateway.running import BASE_MODEL, Client, Gateway, running, settings
from testing.gateway.upstream import TOKEN
from testing.ports import free_port
from testing.tiny import save_model

START_SECONDS = 100.0


def start(model: Path, gateway: Gateway, log: Path) -> "subprocess.Popen[bytes]":
    """Start `loraplex engine` as a separate process."""
    command = [sys.executable, "-m", "loraplex.cli", "engine", "--model", str(model), "--device", "cpu"]
    command += ["--port", str(free_port()), "--served-model-name", BASE_MODEL, "--gateway", gateway.url]
    command += ["--kv-cache-memory", "16MiB", "--adapter-memory", "4MiB", "--max-num-seqs", "8"]
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "LORAPLEX_INTERNAL_TOKEN": TOKEN}
    with open(log, "wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, env=environment)


@asynccontextmanager
async def engine(model: Path, gateway: Gateway, log: Path) -> AsyncIterator["subprocess.Popen[bytes]"]:
    """Yield an engine, killed at the end if it still runs."""
    process = await asyncio.to_thread(start, model, gateway, log)
    try:
        yield process
    finally:
        process.kill()
        await asyncio.to_thread(process.wait)


async def keep_asking(client: Client, number: int, enough: asyncio.Event) -> int:
    """Send requests in a loop and return their number; any incomplete answer fails the test."""
    asked = 0
    while not enough.is_set():
        stream = (number + asked) % 2 == 0
        got = await client.complete(prompt=f"{number} {asked}", max_tokens=12, ignore_eos=True, stream=stream)
        assert got.status == 200, got.body
        if stream:
            assert got.events[-1] == "[DONE]", got.body
            assert got.events[-2]["choices"][0]["finish_reason"] == "length", got.body
        else:
            assert got.json["usage"]["completion_tokens"] == 12
        asked += 1
        # A pause, so that the load takes only a part of the cores that the starting engine needs.
        await asyncio.sleep(0.05)
    return asked


@pytest.mark.timeout(300)
async def test_a_rolling_restart_fails_no_request(tmp_path: Path, redis_url: str):
    model = tmp_path / "tiny"
    save_model(model)
    of = settings(tmp_path, model, ["announced"], redis_url, redis_timeout=30.0)
    async with running(of) as gateway:
        tenant = await gateway.tenant("acme", requests_per_minute=1_000_000, tokens_per_minute=100_000_000)
        assert (await tenant.complete()).error["code"] == "no_engine"
        enough = asyncio.Event()
        async with engine(model, gateway, tmp_path / "one") as one, engine(model, gateway, tmp_path / "two") as two:
            await gateway.engines_up(2, START_SECONDS)
            load = [asyncio.create_task(keep_asking(tenant, number, enough)) for number in range(6)]
            try:
                await leave(one, gateway)
                async with engine(model, gateway, tmp_path / "three"):
                    await gateway.engines_up(2, START_SECONDS)
                    await leave(two, gateway)
                    served = [task for task in load if not task.done()]
                    assert len(served) == len(load), [task.exception() for task in load if task.done()]
                    enough.set()
                    assert sum(await asyncio.gather(*load)) > 0
            finally:
                for task in load:
                    task.cancel()
                await asyncio.gather(*load, return_exceptions=True)


async def leave(process: "subprocess.Popen[bytes]", gateway: Gateway) -> None:
    """Send SIGTERM: the engine finishes its requests and withdraws its announcement."""
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(asyncio.to_thread(process.wait), START_SECONDS) == 0
    await gateway.engines_up(1, START_SECONDS)
