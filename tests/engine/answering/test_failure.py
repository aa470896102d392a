"""Faults injected into the real engine: a request's fault ends that request, any other ends the process, in order."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engine.answering.usage_log import UsageLog
from engine.errors import FAILED as FAILED_TEXT
from engine.errors import EngineUnavailable
from engine.program import FAILED_EXIT_CODE
from engine.scheduling.request import NewRequest
from engine.scheduling.token_rules import BannedWords
from engine.structured.compiler import Matcher
from testing.engine import Client, RunningServer

LONG = {"model": "tiny", "prompt": "go on", "max_tokens": 3500, "ignore_eos": True, "temperature": 0}
TOKEN = "secret"

PROGRAM = """
import sys, time
from engine.config import EngineConfig, ServerConfig
from engine.engine import Engine
from engine import program
from engine.execution.runner import Runner
from pathlib import Path

class Panic(BaseException):
    pass

forward = Runner.forward

def fail(self, plan):
    time.sleep(0.02)  # so long that no stream ends by itself
    if any(request.cache_salt == "die" for request in plan):
        raise Panic("of Rust")
    return forward(self, plan)

Runner.forward = fail
if sys.argv[3] == "hang":
    Engine.close = lambda self: time.sleep(1000)
    program.FAILED_EXIT_S = 3.0
else:
    program.FAILED_EXIT_S = 300.0
config = EngineConfig(model=sys.argv[1], served_model_name="tiny", device="cpu", kv_cache_memory=8 << 20,
                      adapter_memory=4 << 20, max_lora_rank=16, max_num_seqs=8)
server = ServerConfig(port=0, internal_token="secret", usage_log=Path(sys.argv[2]))
sys.exit(program.run(config, server, ready=lambda port: print("ready", port, flush=True)))
"""


@pytest.fixture
def program(model: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    arguments = [sys.executable, "-c", PROGRAM, str(model), str(tmp_path / "finished"), request.param]
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as it:
        yield it
        it.kill()


def as_request(id_: str) -> dict[str, str]:
    return {"x-loraplex-internal-token": TOKEN, "x-request-id": id_}


@pytest.mark.parametrize("program", ["exit", "hang"], indirect=True)
async def test_a_failed_engine_ends_its_requests_and_exits(
    session: aiohttp.ClientSession, program: subprocess.Popen[str], tmp_path: Path
):
    assert program.stdout is not None
    client = Client(session, f"http://127.0.0.1:{(await asyncio.to_thread(program.stdout.readline)).split()[1]}")
    assert await client.get("/livez") == (200, {"status": "ok", "reason": None})
    stream = await session.post(
        client.url + "/v1/completions", json=LONG | {"stream": True}, headers=as_request("stream")
    )
    for _ in range(6):
        await stream.content.readline()
    # A gateway's connections break, as if the process had been killed, so that it may put the request into quarantine.
    with pytest.raises(aiohttp.ClientError):
        await client.post("/v1/completions", LONG | {"cache_salt": "die"}, headers=as_request("killer"))
    with pytest.raises(aiohttp.ClientError):
        await stream.text()
    # By itself, or at the limit if it hangs: the other times are far longer.
    _, stderr = await asyncio.to_thread(program.communicate, timeout=90)
    assert program.returncode == FAILED_EXIT_CODE
    assert "the engine failed" in stderr
    assert "Panic: of Rust" in stderr
    books = UsageLog(tmp_path / "finished")
    assert {id_: entry.finish_reason for id_ in books.ids() if (entry := books.get(id_))} == {
        "stream": "error",
        "killer": "error",
    }
    reported = books.get("stream")
    assert reported is not None
    assert reported.completion_tokens > 0
    books.close()


class Panic(BaseException):
    """A BaseException, like pyo3's PanicException."""


async def test_nothing_is_accepted_once_the_engine_has_failed(
    session: aiohttp.ClientSession, model: Path, monkeypatch: pytest.MonkeyPatch
):
    server = RunningServer(model)
    try:
        client = Client(session, server.url)

        def fail(*_: object) -> None:
            raise Panic("of Rust")

        stream = await session.post(client.url + "/v1/completions", json=LONG | {"stream": True})
        for _ in range(6):
            await stream.content.readline()
        monkeypatch.setattr(server.core.engine.runner, "forward", fail)
        assert FAILED_TEXT in (last := (await stream.text()).split("\n\n")[-3])
        assert "Rust" not in last
        status, answer = await client.post("/v1/completions", LONG)
        assert (status, answer["error"]["code"], answer["error"]["message"]) == (503, "engine_unavailable", FAILED_TEXT)
        for path in ("/health", "/livez"):
            status, health = await client.get(path)
            assert (status, health["status"]) == (503, "unhealthy")
            assert health["reason"] == FAILED_TEXT
        assert (await client.post("/v1/completions", LONG))[0] == 503
        # Not even between the thread's last step and its notification of the event loop.
        assert server.server._in_flight is not None
        with pytest.raises(EngineUnavailable):
            server.server._in_flight.submit([])
    finally:
        server.close()


class Broken:
    """A wrapper of a library's matcher that panics on one call."""

    def __init__(self, state: Any, call: str) -> None:
        self._state, self._call = state, call

    def __getattr__(self, name: str) -> Any:
        if name == self._call:
            raise Panic
        return getattr(self._state, name)


@pytest.mark.parametrize("call", ["unsafe_compute_mask_ptr", "consume_token", "is_stopped"])
async def test_a_panic_in_ones_grammar_ends_that_request_only(
    client: Client, monkeypatch: pytest.MonkeyPatch, call: str
):
    made = Matcher.__init__

    def make(self: Matcher, state: Any, end_ids: frozenset[int], param: str, *more: Any) -> None:
        made(self, Broken(state, call) if param == "guided_regex" else state, end_ids, param, *more)

    monkeypatch.setattr(Matcher, "__init__", make)
    neighbour = asyncio.create_task(client.complete(prompt="x", max_tokens=300, ignore_eos=True))
    friend = asyncio.create_task(client.complete(prompt="x", max_tokens=20, guided_choice=["yes", "no"]))
    status, answer = await client.post("/v1/completions", {"model": "tiny", "prompt": "x", "guided_regex": "a+b+"})
    assert (status, answer["error"]["param"]) == (400, "guided_regex")
    assert (await neighbour)["usage"]["completion_tokens"] == 300
    assert (await friend)["choices"][0]["text"] in ("yes", "no")
    state = await client.wait_for(lambda state: not state["running"] and not state["waiting"])
    assert state["kv_blocks_free"] == state["kv_blocks_total"]
    assert (await client.get("/livez"))[0] == 200


async def test_a_request_that_cannot_be_added_is_a_500_of_its_own(
    client: Client, server: RunningServer, monkeypatch: pytest.MonkeyPatch
):
    engine = server.core.engine
    assert engine is not None
    add = engine.add_request

    def fail(new: NewRequest) -> None:
        if new.cache_salt == "die":
            raise Panic
        add(new)

    monkeypatch.setattr(engine, "add_request", fail)
    neighbour = asyncio.create_task(client.complete(prompt="x", max_tokens=50, ignore_eos=True))
    assert (await client.post("/v1/completions", LONG | {"cache_salt": "die"}))[0] == 500
    assert (await neighbour)["usage"]["completion_tokens"] == 50


async def test_a_fault_in_ones_sampling_ends_that_request_only(client: Client, monkeypatch: pytest.MonkeyPatch):
    after, may_fail = BannedWords.after, threading.Event()
    may_fail.set()

    def fail(self: BannedWords, token_ids: list[int], num_output_tokens: int) -> Any:
        # The stream below waits here until its first event has been read.
        if num_output_tokens >= 3 and self.largest == 7 and may_fail.wait(60):
            raise IndexError("private words")
        return after(self, token_ids, num_output_tokens)

    monkeypatch.setattr(BannedWords, "after", fail)
    monkeypatch.setattr("engine.answering.token_rules._encode", lambda words, _: [[{"bad": 7, "good": 8}[words[0]]]])
    asked = {"prompt": "x", "max_tokens": 100, "ignore_eos": True, "frequency_penalty": 0.5, "seed": 3}
    alone = await client.complete(**asked, bad_words=["good"])
    neighbour = asyncio.create_task(client.complete(**asked, bad_words=["good"]))
    status, answer = await client.post("/v1/completions", {"model": "tiny", "bad_words": ["bad"]} | asked)
    assert (status, answer["error"]["code"]) == (500, "generation_failed")
    assert "private" not in answer["error"]["message"]
    assert (await neighbour)["choices"][0]["text"] == alone["choices"][0]["text"]
    may_fail.clear()
    body = {"model": "tiny", "bad_words": ["bad"], "stream": True} | asked | {"max_tokens": 2000}
    async with client.session.post(client.url + "/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        await response.content.readline()
        may_fail.set()
        *_, error, done = (await response.text()).strip().split("\n\n")
    assert done == "data: [DONE]"
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "generation_failed"
    state = await client.wait_for(lambda state: not state["running"] and not state["waiting"])
    assert state["kv_blocks_free"] == state["kv_blocks_total"]
    assert (await client.get("/livez"))[0] == 200
