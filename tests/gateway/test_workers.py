"""Several processes on one port: one ready line, dead workers replaced, all ended together."""

import asyncio
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import aiohttp
import psutil
import pytest

from gateway.settings import SettingsError
from gateway.workers import NAME, is_first_worker, reserve_port
from testing.gateway.program import START_SECONDS, program
from testing.gateway.running import Gateway, settings, until
from testing.gateway.upstream import Upstream
from testing.ports import free_ports


def children(pid: int) -> set[int]:
    return {child.pid for child in psutil.Process(pid).children()}


async def answers(url: str) -> bool:
    # A separate connection each time, so that any worker may answer.
    try:
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            return response.status == 200
    except aiohttp.ClientError:
        return False


async def test_workers_live_and_die_together(tmp_path: Path, model_dir: Path, upstream: Upstream, redis_url: str):
    metrics_port = free_ports(2)
    of = settings(tmp_path, model_dir, [upstream.url], redis_url)
    async with program(of, metrics_port) as (process, gateway):
        workers = children(process.pid)
        assert len(workers) == 2
        for port in (metrics_port, metrics_port + 1):
            assert await answers(f"http://127.0.0.1:{port}/metrics")
        acme = await gateway.tenant("acme")
        assert (await acme.complete()).status == 200

        os.kill(min(workers), signal.SIGKILL)

        async def replaced() -> bool:
            return len(children(process.pid) - {min(workers)}) == 2

        await until(replaced, START_SECONDS)
        for port in (metrics_port, metrics_port + 1):
            await until(lambda port=port: answers(f"http://127.0.0.1:{port}/metrics"), START_SECONDS)
        async with aiohttp.ClientSession() as session:
            assert (await Gateway(gateway.url, session).client(acme.key or "").complete()).status == 200

        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), START_SECONDS) == 0
        assert process.stdout is not None
        assert await process.stdout.read() == b""
    assert not await answers(f"{gateway.url}/healthz")


async def test_workers_end_with_their_parent(tmp_path: Path, model_dir: Path, upstream: Upstream, redis_url: str):
    of = settings(tmp_path, model_dir, [upstream.url], redis_url)
    async with program(of, free_ports(2)) as (process, _):
        workers = [psutil.Process(pid) for pid in children(process.pid)]
        process.kill()
        await process.wait()

        async def gone() -> bool:
            return not any(worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE for worker in workers)

        await until(gone, START_SECONDS)


@pytest.mark.usefixtures("starts_servers")
def test_a_port_is_not_shared_with_strangers():
    with reserve_port("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        with pytest.raises(SettingsError, match=str(port)):
            reserve_port("127.0.0.1", port)


def test_several_workers_need_ports_for_their_metrics(tmp_path: Path, model_dir: Path):
    with pytest.raises(SettingsError) as refused:
        settings(tmp_path, model_dir, ["http://127.0.0.1:1"], "redis://127.0.0.1:1", workers=2)
    assert refused.value.field == "LORAPLEX_METRICS_PORT"


def test_the_first_worker_logs_for_all():
    """A gateway of one process has no workers beside it."""
    assert is_first_worker()
    context, found = multiprocessing.get_context("fork"), {}
    for number in (0, 1, 10):
        ours, theirs = multiprocessing.Pipe()
        process = context.Process(target=_send_first, args=(theirs,), name=f"{NAME}{number}")
        process.start()
        found[number] = ours.recv()
        process.join()
    assert found == {0: True, 1: False, 10: False}


def _send_first(connection: Connection) -> None:
    connection.send(is_first_worker())
