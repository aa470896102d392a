"""A gateway of two worker processes, started as an operator starts it."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from gateway.settings import Settings
from testing.gateway.running import Gateway
from testing.gateway.upstream import TOKEN
from testing.stack import ROOT

START_SECONDS = 60


@asynccontextmanager
async def program(of: Settings, metrics_port: int) -> AsyncIterator[tuple[asyncio.subprocess.Process, Gateway]]:
    """Run `loraplex gateway --workers 2` until the block ends. metrics_port: the first of two free ports."""
    names = ("database_url", "redis_url", "adapter_store", "model_dir", "base_model", "key_pepper", "admin_key")
    environ = {f"LORAPLEX_{name.upper()}": str(getattr(of, name)) for name in (*names, "journal_dir")}
    environ |= {"LORAPLEX_ENGINES": ",".join(of.engines), "LORAPLEX_INTERNAL_TOKEN": TOKEN, "LORAPLEX_PORT": "0"}
    environ |= {"LORAPLEX_MIGRATE_ON_START": "true", "PATH": os.environ["PATH"]}
    script = "from loraplex.cli import main; main()"
    flags = ("gateway", "--workers", "2", "--metrics-port", str(metrics_port))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, *flags, env=environ, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        ready = json.loads(await asyncio.wait_for(process.stdout.readline(), START_SECONDS))
        async with aiohttp.ClientSession() as session:
            yield process, Gateway(ready["gateway"], session)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
