"""Deaths of either side of a core's process: the other side notices at once, and the books are kept."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import psutil
import pytest

from engine.answering.usage_log import KILLED, UsageLog
from engine.core import process
from engine.errors import FAILED as FAILED_TEXT
from engine.program import FAILED_EXIT_CODE
from testing.engine import SLOW, Client, RunningServer

LONG = {"model": "tiny", "prompt": "go on", "max_tokens": 3500, "ignore_eos": True, "temperature": 0, "stream": True}
LONG |= SLOW
# Longest time in which a death is noticed. A socket's end takes milliseconds; the rest is for a busy machine.
NOTICED_S = 10.0
HEADERS = {"x-loraplex-internal-token": "secret", "x-request-id": "stream"}
PROGRAM = """
import sys
from pathlib import Path
from engine import program
from engine.config import EngineConfig, ServerConfig
from engine.core import process

process.CHILD = "testing.broken_core"  # its steps take so long that no stream ends by itself
config = EngineConfig(model=sys.argv[1], served_model_name="tiny", device="cpu", engine_core_mode="process",
                      max_num_seqs=8, kv_cache_memory=8 << 20, adapter_memory=4 << 20, max_lora_rank=16)
server = ServerConfig(port=0, internal_token="secret", usage_log=Path(sys.argv[2]), drain_seconds=90.0)
program.FAILED_EXIT_S = 300.0
sys.exit(program.run(config, server, ready=lambda port: print("ready", port, flush=True)))
"""


@pytest.fixture
def front(model: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROGRAM, str(model), str(tmp_path / "finished")]
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as it:
        yield it
        it.kill()


async def streaming(
    session: aiohttp.ClientSession, front: subprocess.Popen[str], tokens: int = 3500
) -> aiohttp.ClientResponse:
    """Return a stream that has its first tokens."""
    assert front.stdout is not None
    url = f"http://127.0.0.1:{(await asyncio.to_thread(front.stdout.readline)).split()[1]}"
    stream = await session.post(url + "/v1/completions", json=LONG | {"max_tokens": tokens}, headers=HEADERS)
    for _ in range(6):
        await stream.content.readline()
    return stream


def core_of(front: subprocess.Popen[str]) -> psutil.Process:
    [core] = psutil.Process(front.pid).children()
    return core


async def until_gone(pid: int, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the process still runs"
        await asyncio.sleep(0.02)


async def test_a_killed_core_ends_its_requests_and_the_engine(
    session: aiohttp.ClientSession, front: subprocess.Popen[str], tmp_path: Path
):
    stream = await streaming(session, front)
    core_of(front).kill()
    async with asyncio.timeout(NOTICED_S):
        with pytest.raises(aiohttp.ClientError):
            await stream.text()
    # By itself: the limit on its end is far away.
    _, stderr = await asyncio.to_thread(front.communicate, timeout=90)
    assert front.returncode == FAILED_EXIT_CODE
    assert "ended by signal 9" in stderr
    books = UsageLog(tmp_path / "finished")
    entry = books.get("stream")
    assert entry is not None
    assert (entry.finish_reason, entry.completion_tokens > 0) == ("error", True)
    books.close()


async def test_a_killed_front_ends_its_core(
    session: aiohttp.ClientSession, front: subprocess.Popen[str], tmp_path: Path
):
    stream = await streaming(session, front)
    core = core_of(front).pid
    front.kill()
    async with asyncio.timeout(NOTICED_S):
        await until_gone(core)
        with pytest.raises(aiohttp.ClientError):
            await stream.text()
    # The front's lock on the usage log ends with its process, which may take longer than its connections.
    await asyncio.to_thread(front.wait, 60)
    books = UsageLog(tmp_path / "finished")
    entry = books.get("stream")
    assert entry is not None
    assert (entry.finish_reason, entry.completion_tokens > 0) == (KILLED, True)
    books.close()


async def test_a_signal_to_the_whole_group_drains_as_one_to_the_front(
    session: aiohttp.ClientSession, front: subprocess.Popen[str]
):
    stream = await streaming(session, front, tokens=150)
    core = core_of(front)
    core.send_signal(signal.SIGINT)
    core.send_signal(signal.SIGTERM)
    front.send_signal(signal.SIGINT)
    text = await stream.text()
    assert '"finish_reason":"length"' in text.split("\n\n")[-3]
    assert await asyncio.to_thread(front.wait, 60) == 0
    await until_gone(core.pid)


async def test_a_failing_step_in_the_process_ends_its_requests(
    session: aiohttp.ClientSession, model: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(process, "CHILD", "testing.broken_core")
    server = RunningServer(model, config={"engine_core_mode": "process"})
    try:
        client = Client(session, server.url)
        stream = await session.post(server.url + "/v1/completions", json=LONG)
        await stream.content.readline()
        status, answer = await client.post("/v1/completions", LONG | {"stream": False, "cache_salt": "die"})
        assert (status, answer["error"]["message"]) == (503, FAILED_TEXT)
        assert FAILED_TEXT in (await stream.text()).split("\n\n")[-3]
        assert (await client.get("/livez"))[0] == 503
        assert (await client.get("/state"))[0] == 503
    finally:
        server.close()


async def test_a_core_that_ends_while_it_loads_is_one_error(model: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "CHILD", "engine.core.frames")
    with pytest.raises(OSError, match="the engine's core ended while it loaded the model"):
        RunningServer(model, config={"engine_core_mode": "process"})
