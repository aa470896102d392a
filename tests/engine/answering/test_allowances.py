"""Allowances: a gateway's bound on a running request's tokens, and the report of a whole answer that needs more."""

import asyncio
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.answering import report
from engine.answering.running import Run
from engine.answering.sequence_group import SequenceGroup
from engine.core.step_thread import StepThread
from engine.scheduling.request import RequestOutput
from testing.engine import SLOW, Client, RunningServer
from wire.responses import ASK_TOKENS

TOKEN = "internal"
PROMPT = "The quick brown fox"
BODY = {"model": "tiny", "prompt": PROMPT, "max_tokens": 300, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[RunningServer]:
    running = RunningServer(model, internal_token=TOKEN)
    yield running
    running.close()


def allowed(request_id: str, tokens: int | str | None = None) -> dict[str, Any]:
    headers = {"x-loraplex-internal-token": TOKEN, "x-request-id": request_id}
    return {"headers": headers if tokens is None else {**headers, "x-loraplex-allowance": str(tokens)}}


async def finished(client: Client, request_id: str) -> Any:
    [found] = (await client.get(f"/finished?ids={request_id}&wait=10", **allowed("asking")))[1]["data"]
    return found["completion_tokens"], found["finish_reason"]


class TooLateError(Exception):
    """The answer reached its allowance before the raise arrived."""


class Reported:
    """Reader of a whole answer as a report, which raises its allowance to each of `raises` in turn on request."""

    def __init__(self, client: Client, request_id: str, allowance: int, raises: list[int]) -> None:
        self.client, self.request_id, self.allowance, self.raises = client, request_id, allowance, raises
        self.has_raised = bool(raises)
        self.totals: list[int] = []
        self.head: Any = None
        self.answer: Any = None

    async def read(self, body: dict[str, Any]) -> None:
        options = allowed(self.request_id, self.allowance)
        async with self.client.session.post(
            self.client.url + "/v1/completions", data=json.dumps(body), **options
        ) as response:
            assert response.content_type == report.REPORT_TYPE
            while self.head is None:
                line = json.loads(await response.content.readline())
                self.totals.append(line["completion_tokens"])
                self.head = line["answer"]
                if self.raises:
                    raised = {"id": self.request_id, "tokens": self.raises.pop(0)}
                    if not (await self.client.ok("/allowances", raised, **allowed("gateway")))["is_running"]:
                        raise TooLateError
            data = await response.content.read()
        assert len(data) == self.head["length"]
        self.answer = json.loads(data)
        # The engine takes a raise for a running request, whose last step may already have met the allowance.
        if self.has_raised and "ended_by_allowance" in self.answer["loraplex"]:
            raise TooLateError


@pytest.fixture
def _reads_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the event loop handle a step's outputs before the next step, even on a busy machine."""

    async def turns() -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    def step(loop: StepThread) -> None:
        plain(loop)
        asyncio.run_coroutine_threadsafe(turns(), loop._send.__self__._event_loop).result(30)

    plain = StepThread._step
    monkeypatch.setattr(StepThread, "_step", step)


@pytest.mark.usefixtures("_reads_each_step")
async def test_an_answer_ends_at_its_allowance(client: Client):
    reported = Reported(client, "bounded", 100, [])
    await reported.read(BODY)
    [choice] = reported.answer["choices"]
    assert (reported.head["status"], choice["finish_reason"]) == (200, "length")
    assert reported.head["headers"]["x-loraplex-adapter-digest"] == "base"
    assert reported.answer["usage"]["completion_tokens"] == 100
    assert reported.answer["loraplex"]["ended_by_allowance"] is True
    # Reports begin near the allowance: one per step, then the line of the answer itself.
    assert reported.totals == [*range(100 - ASK_TOKENS + 1, 101), 100]
    assert await finished(client, "bounded") == (100, "length")


@pytest.mark.usefixtures("slow_steps")
async def test_a_raised_allowance_lets_the_answer_go_on_to_its_own_end(client: Client):
    # A busy machine may delay a raise by more steps than the allowance has left, so the request is repeated.
    body, deadline, number = BODY | {"max_tokens": 90}, time.monotonic() + 90, 0
    while True:
        reported = Reported(client, f"raised-{number}", 20, [50, 10, 90])
        try:
            await reported.read(body | SLOW)
            break
        except TooLateError:
            assert time.monotonic() < deadline
            number += 1
    plain = await client.ok("/v1/completions", body, **allowed("plain"))
    assert reported.answer["choices"] == plain["choices"]
    assert reported.answer["usage"]["completion_tokens"] == 90
    assert "ended_by_allowance" not in reported.answer["loraplex"]
    gone = {"id": reported.request_id, "tokens": 400}
    assert await client.ok("/allowances", gone, **allowed("gateway")) == {"is_running": False}


async def test_an_answer_whose_allowance_lasts_is_plain(client: Client):
    body = BODY | {"max_tokens": 30}
    answer = await client.ok("/v1/completions", body, **allowed("short", 100))
    assert answer["usage"]["completion_tokens"] == 30


@pytest.mark.usefixtures("_reads_each_step")
async def test_a_long_answer_is_reported_from_time_to_time(client: Client, monkeypatch: pytest.MonkeyPatch):
    """By a clock that moves on by a second with each step."""
    monkeypatch.setattr(report, "time", SimpleNamespace(monotonic=itertools.count().__next__))
    monkeypatch.setattr(report, "REPORT_SECONDS", 50)
    reported = Reported(client, "long", 10_000, [])
    await reported.read(BODY)
    assert reported.totals == [*range(50, 301, 50), 300]
    assert reported.answer["usage"]["completion_tokens"] == 300


async def test_all_sequences_share_an_allowance(client: Client):
    reported = Reported(client, "many", 101, [])
    await reported.read(BODY | {"prompt": [PROMPT, "another"], "n": 3})
    assert reported.answer["usage"]["completion_tokens"] == 101
    assert {choice["finish_reason"] for choice in reported.answer["choices"]} == {"length"}
    assert await finished(client, "many") == (101, "length")


async def test_a_stream_ends_at_its_allowance(client: Client):
    body = BODY | {"stream": True}
    events = await client.events("/v1/completions", body, **allowed("stream", 70))
    assert [each["loraplex"].get("ended_by_allowance") for each in events][-2:] == [None, True]
    assert events[-1]["loraplex"]["completion_tokens"] == 70
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert await finished(client, "stream") == (70, "length")


class Loop:
    """Engine loop that takes a step's time to end a request."""

    def __init__(self) -> None:
        self.aborted: list[str] = []

    def abort(self, request_id: str, *, is_complete: bool = False) -> None:
        self.aborted.append(request_id)

    def release(self, request_id: str) -> None:
        raise AssertionError(request_id)


async def test_an_allowance_holds_while_nobody_reads():
    loop = Loop()
    group = SequenceGroup(loop, ["r-0", "r-1", "r-2"])
    group.allow(5)
    for made in range(1, 10):
        for index in range(2):
            group.deliver(index, RequestOutput(f"r-{index}", [7], None, 3, 2, made))
    assert (group.total_generated, group.num_generated) == (5, [3, 2, 0])
    assert loop.aborted == ["r-0", "r-1", "r-2"]
    *made, first, second, third = await group.news()
    assert [index for index, _ in made] == [0, 1, 0, 1, 0]
    ends = [(index, end.token_ids, end.finish_reason, end.num_prompt_tokens) for index, end in (first, second, third)]
    assert ends == [(0, [], "length", 3), (1, [], "length", 3), (2, [], "length", 0)]


async def test_only_a_gateway_has_allowances_and_they_are_numbers(client: Client):
    status, answer = await client.post("/v1/completions", BODY, **allowed("bad", "many"))
    assert (status, answer["error"]["param"]) == (400, "x-loraplex-allowance")
    status, answer = await client.post("/v1/completions", BODY, **allowed("bad", -1))
    assert (status, answer["error"]["param"]) == (400, "x-loraplex-allowance")
    status, answer = await client.post("/allowances", {"id": "x", "tokens": -1}, **allowed("gateway"))
    assert (status, answer["error"]["param"]) == (400, "tokens")
    status, _ = await client.post("/allowances", {"id": "x", "tokens": 1})
    assert status == 401
    state = (await client.get("/state", **allowed("asking")))[1]
    assert state["keeps_allowances"] is True


async def test_an_error_after_the_report_has_its_status(client: Client, monkeypatch: pytest.MonkeyPatch):
    def fail(_: Run) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(Run, "_usage", fail)
    reported = Reported(client, "failed", 10, [])
    await reported.read(BODY)
    assert reported.head["status"] == 500
    assert reported.answer["error"]["code"] == "internal_error"
