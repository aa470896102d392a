"""A gateway killed during uploads: its checks die with it, and its folders are removed after its restart."""

import asyncio
import gzip
import os
import signal
from pathlib import Path

import psutil

from testing.gateway.mutated_archives import tar_header
from testing.gateway.running import settings, until
from testing.gateway.upstream import Upstream
from testing.ports import free_ports
from tests.gateway.api.adapters.test_adapters import files, push
from tests.gateway.api.uploads.test_hostile_uploads import leftovers, trickle
from tests.gateway.test_workers import children, program

PATIENCE_SECONDS = 120.0


async def test_a_killed_gateway_leaves_nothing(tmp_path: Path, model_dir: Path, upstream: Upstream, redis_url: str):
    of = settings(tmp_path, model_dir, [upstream.url], redis_url)
    async with program(of, free_ports(2)) as (process, gateway):
        acme, globex = await gateway.tenant("acme"), await gateway.tenant("globex")
        slow = [trickle(acme) for _ in range(3)]
        zeros = gzip.compress(tar_header(b"zeros", b"0", b"%011o\0" % (1 << 30)) + bytes(1 << 30), 1)
        slow.append(asyncio.create_task(push(globex, "long", {"file": zeros})))
        checks: set[int] = set()

        async def all_in_flight() -> bool:
            servers = {server for worker in children(process.pid) for server in children(worker)}
            forked = {check for server in servers for check in children(server)}
            checks.update(servers, forked)
            return bool(forked) and len(leftovers(tmp_path)) == 2 * len(slow)

        await until(all_in_flight, PATIENCE_SECONDS)
        before = children(process.pid)
        for worker in before:
            os.kill(worker, signal.SIGKILL)
        await asyncio.gather(*slow, return_exceptions=True)

        async def back_and_clean() -> bool:
            alive = children(process.pid) - before
            return len(alive) == 2 and not leftovers(tmp_path) and not any(map(psutil.pid_exists, checks))

        await until(back_and_clean, PATIENCE_SECONDS)
        fresh = gateway.client(acme.key or "")
        assert (await push(fresh, "good", files())).status == 201
