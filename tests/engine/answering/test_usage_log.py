"""Costs of ended requests, for settlement: exact however they ended, and kept across a restart of the engine."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.answering.usage_log import KILLED, UsageLog
from testing.engine import SLOW, Client, RunningServer

TOKEN = "internal"
PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    file = tmp_path_factory.mktemp("finished") / "file"
    running = RunningServer(model, internal_token=TOKEN, usage_log=file)
    yield running
    running.close()


def of(request_id: str) -> dict:
    return {"headers": {"x-loraplex-internal-token": TOKEN, "x-request-id": request_id}}


async def ask(client: Client, *ids: str, wait: float = 10.0) -> list[dict]:
    status, answer = await client.get(f"/finished?ids={','.join(ids)}&wait={wait}", **of("asking"))
    assert status == 200, answer
    return answer["data"]


async def ended(client: Client, request_id: str) -> dict:
    """Wait until a request has ended, and return its record."""
    deadline = time.monotonic() + 60
    while (found := await ask(client, request_id))[0]["finish_reason"] is None:
        assert time.monotonic() < deadline, found
    return found[0]


def record(request_id: str, usage: dict, reason: str) -> dict:
    return {
        "id": request_id,
        "finish_reason": reason,
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
    }


async def test_what_ended_has_cost_what_its_answer_says(client):
    body = {"model": "tiny", "prompt": [PROMPT, "another"], "n": 2, "max_tokens": 6, "ignore_eos": True}
    whole = await client.ok("/v1/completions", body, **of("whole"))
    events = await client.events(
        "/v1/completions", body | {"stream_options": {"include_usage": True}}, **of("streamed")
    )
    # Cut by a stop string: tokens generated past it are not charged.
    text = whole["choices"][0]["text"]
    stopped = await client.ok(
        "/v1/completions",
        {"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 9, "ignore_eos": True, "stop": text[2:4]},
        **of("stopped"),
    )
    found = await ask(client, "whole", "streamed", "stopped", "never")
    assert found == [
        record("whole", whole["usage"], "length"),
        record("streamed", events[-1]["usage"], "length"),
        record("stopped", stopped["usage"], stopped["choices"][0]["finish_reason"]),
    ]


@pytest.mark.usefixtures("slow_steps")
async def test_a_stream_that_is_left_has_cost_what_was_generated(client, session):
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3500, "ignore_eos": True, "stream": True} | SLOW
    before = (await client.get("/state", **of("asking")))[1]
    last = None
    async with session.post(client.url + "/v1/completions", data=json.dumps(body), **of("left")) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                last = json.loads(line[6:])["loraplex"]
                break
        [running] = await ask(client, "left", wait=0)
        assert running["prompt_tokens"] == last["prompt_tokens"]
    left = await ended(client, "left")
    assert left["finish_reason"] == "abort"
    assert last["completion_tokens"] <= left["completion_tokens"] < 3500
    assert left["prompt_tokens"] == last["prompt_tokens"]
    after = (await client.get("/state", **of("asking")))[1]
    assert after["ended_requests"] == before["ended_requests"] + 1
    assert after["ended_completion_tokens"] == before["ended_completion_tokens"] + left["completion_tokens"]
    assert after["ended_prompt_tokens"] == before["ended_prompt_tokens"] + left["prompt_tokens"]


@pytest.mark.usefixtures("slow_steps")
async def test_a_whole_answer_that_nobody_waits_for_is_counted(client):
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3500, "ignore_eos": True} | SLOW
    asking = asyncio.create_task(client.post("/v1/completions", body, **of("unwaited")))
    found: list[dict] = []
    while not any(each["completion_tokens"] for each in found):
        found = await ask(client, "unwaited", wait=0.001)
    asking.cancel()
    await asyncio.wait({asking})
    left = await ended(client, "unwaited")
    assert left["finish_reason"] == "abort"
    assert found[0]["completion_tokens"] <= left["completion_tokens"] < 3500


async def test_what_is_refused_has_cost_nothing(client):
    body = {"model": "tiny", "prompt": [10**6], "max_tokens": 2}
    assert (await client.post("/v1/completions", body, **of("refused")))[0] == 400
    [refused] = await ask(client, "refused")
    assert (refused["finish_reason"], refused["prompt_tokens"], refused["completion_tokens"]) == ("error", 0, 0)


@pytest.mark.parametrize("query", ["", "ids=", "ids=a&wait=x", "ids=a&wait=-1", "ids=a&wait=1000", "ids=a&wait=nan"])
async def test_a_question_that_makes_no_sense(client, query):
    status, answer = await client.get(f"/finished?{query}", **of("asking"))
    assert (status, answer["error"]["param"]) == (400, "wait" if "wait" in query else "ids")


async def test_a_request_id_that_is_none(client):
    status, answer = await client.post("/v1/completions", {"model": "tiny", "prompt": PROMPT}, **of("x" * 65))
    assert (status, answer["error"]["param"]) == (400, "x-request-id")


@pytest.mark.parametrize("lacking", ["", "posix_fallocate"], ids=["linux", "macos"])
async def test_the_ring_forgets_the_oldest(lacking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if lacking:
        monkeypatch.delattr(os, lacking)
    ring = UsageLog(tmp_path / "f", num_slots=3)
    running = ring.open("r0", 7)
    for i in range(1, 4):
        slot = ring.open(f"r{i}", i)
        slot.count(i, 10 * i, 0)
        slot.end("stop")
    # A request whose slot was reused is still counted.
    running.count(7, 100, 0)
    running.end("stop")
    assert ring.get("r0") is None
    assert [ring.get(f"r{i}").completion_tokens for i in (1, 2, 3)] == [10, 20, 30]
    assert (ring.num_ended, ring.prompt_tokens, ring.completion_tokens) == (4, 13, 160)
    ring.close()
    again = UsageLog(tmp_path / "f", num_slots=3)
    assert [again.get(f"r{i}") for i in range(4)] == [ring.get(f"r{i}") for i in range(4)]
    assert (again.num_ended, again.completion_tokens) == (4, 160)


DYING = """
import sys
import time
from pathlib import Path
from engine.answering.usage_log import UsageLog

ring = UsageLog(Path(sys.argv[1]))
ring.open("ended", 3).end("stop")
slot = ring.open("running", 5)
for tokens in range(1, 10**9):
    slot.count(5, tokens, 1)
    print(tokens, flush=True)
"""


def test_a_killed_engines_requests_are_known_to_the_next(tmp_path: Path):
    process = subprocess.Popen([sys.executable, "-c", DYING, str(tmp_path / "f")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    said = [1, *map(int, process.stdout.read().split())][-1]
    process.stdout.close()
    process.wait()
    ring = UsageLog(tmp_path / "f")
    ended, running = ring.get("ended"), ring.get("running")
    assert (ended.finish_reason, ended.prompt_tokens) == ("stop", 3)
    assert (running.finish_reason, running.prompt_tokens, running.cached_tokens) == (KILLED, 5, 1)
    # Written before it is reported.
    assert said <= running.completion_tokens <= said + 1
    assert (ring.num_ended, ring.completion_tokens) == (2, running.completion_tokens)


def test_one_file_is_one_engines(tmp_path: Path):
    ring = UsageLog(tmp_path / "f")
    with pytest.raises(ValueError, match="another engine uses"):
        UsageLog(tmp_path / "f")
    ring.close()
    UsageLog(tmp_path / "f").close()


@pytest.mark.parametrize("content", [b"something else", b"something else".ljust(312_080)], ids=len)
def test_another_file_is_not_overwritten(tmp_path: Path, content: bytes):
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(ValueError, match="expected a file of"):
        UsageLog(tmp_path / "f", num_slots=3000)
    assert (tmp_path / "f").read_bytes() == content


async def test_a_caller_that_leaves_while_it_waits_leaves_no_task():
    log = UsageLog(num_slots=4)
    log.open("runs", 1)
    waiting = asyncio.create_task(log.wait(["runs"], 60.0))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.wait([waiting])
    deadline = time.monotonic() + 20
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        assert time.monotonic() < deadline, others
        await asyncio.sleep(0.01)
