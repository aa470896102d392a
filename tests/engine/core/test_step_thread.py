"""The engine's thread: how many commands it accepts between two steps, and from which tenants."""

import asyncio
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from engine.core.messages import Event, Failed, Released
from engine.core.step_thread import COMMANDS_S, StepThread
from engine.errors import EngineUnavailable
from engine.scheduling.outputs import StepOutputs
from engine.scheduling.request import NewRequest, SamplingParams
from engine.state import EngineState
from testing.engine import SLOW, Client, RunningServer
from tests.engine.answering.test_log import IDLE

LONG = {"model": "tiny", "prompt": "go on", "max_tokens": 3500, "ignore_eos": True, "temperature": 0} | SLOW


@pytest.mark.usefixtures("slow_steps")
async def test_a_tenant_leaves_others_half_of_the_queue(session, model):
    server = RunningServer(model, config={"max_num_seqs": 2}, max_waiting=6, internal_token="secret")
    try:
        client = Client(session, server.url)

        def of(tenant_id: str) -> dict[str, str]:
            return {"x-loraplex-internal-token": "secret", "x-loraplex-tenant": tenant_id}

        async def ask(tenant_id: str, **fields: object) -> tuple[int, dict]:
            return await client.post("/v1/completions", LONG | fields, headers=of(tenant_id))

        status, answer = await ask("greedy", prompt=["go on"] * 5)
        assert status == 400
        assert "prompt and n: expected at most 4 sequences" in answer["error"]["message"]
        asking = asyncio.create_task(ask("greedy", prompt=["go on"] * 2, n=2))
        await client.wait_for(lambda state: state["running"] == 2, headers=of(""))
        status, answer = await ask("greedy")
        assert (status, answer["error"]["code"]) == (429, "engine_share_used")
        assert (await ask("other", max_tokens=1))[0] == 200
        asking.cancel()
    finally:
        server.close()


class SlowToAdd:
    """An engine whose commands take 3 ms each, like those of long prompts."""

    def __init__(self) -> None:
        self.added: list[str] = []
        self.between_steps: list[int] = []
        self.is_waiting_for_adapters = False
        self.spare_seconds = 0.0

    def add_request(self, new: NewRequest) -> None:
        time.sleep(0.003)
        self.added.append(new.request_id)

    def abort(self, request_id: str, *, is_complete: bool) -> None: ...

    def has_work(self) -> bool:
        return len(self.added) < 100

    def step(self) -> StepOutputs:
        self.between_steps.append(len(self.added))
        return StepOutputs()

    def state(self) -> None: ...

    def close(self) -> None: ...


async def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


class Failing(SlowToAdd):
    """An engine whose only step fails, once it has work."""

    has_begun = False

    def has_work(self) -> bool:
        return self.has_begun

    def step(self) -> StepOutputs:
        raise RuntimeError("the step fails")

    def work(self) -> int:
        self.has_begun = True
        time.sleep(2 * COMMANDS_S)  # the next command waits for the step
        return 1


async def test_calls_end_with_the_engine_whether_they_have_run_or_not():
    engine, event_loop = Failing(), asyncio.get_running_loop()

    def send(event: Event) -> None:
        if isinstance(event, Failed):
            event_loop.call_soon_threadsafe(steps.fail_calls, event.reason)

    steps = StepThread(engine, send)
    problems: list[dict] = []
    event_loop.set_exception_handler(lambda _, context: problems.append(context))
    steps.start()
    calls = [asyncio.create_task(steps.call(function)) for function in (engine.work, int)]
    await asyncio.sleep(0)
    steps._thread.join(20)  # the loop sees the end of the first call and the failure in one iteration
    ran, waited = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20)
    assert ran == 1
    assert isinstance(waited, EngineUnavailable)
    assert problems == []


async def test_many_requests_at_once_are_added_between_several_steps():
    engine = SlowToAdd()
    events: list[Event] = []
    steps = StepThread(engine, events.append)
    steps.start()
    try:
        for i in range(100):
            steps.add(NewRequest(f"a-{i}", [1], SamplingParams()))
        await until(lambda: len(engine.added) == 100)
        assert engine.added == [f"a-{i}" for i in range(100)]
        counts = [0, *engine.between_steps, 100]
        assert max(b - a for a, b in itertools.pairwise(counts)) < 20
    finally:
        await steps.close()
    assert len(events) == len(engine.between_steps)


async def test_sequences_are_added_in_the_turns_of_their_tenants():
    engine, events = SlowToAdd(), list[Event]()
    steps = StepThread(engine, events.append)
    for tenant_id, number in (("heavy", 50), ("light", 2)):
        for i in range(number):
            steps.add(NewRequest(f"{tenant_id}-{i}", [1], SamplingParams(), tenant_id=tenant_id))
    steps.abort("heavy-40")
    steps.start()
    try:
        await until(lambda: len(engine.added) == 51)
    finally:
        await steps.close()
    assert engine.added[:4] == ["heavy-0", "light-0", "heavy-1", "light-1"]
    assert engine.added[4:] == [f"heavy-{i}" for i in range(2, 50) if i != 40], "an aborted one is not added"
    assert Released("heavy-40") in events


class Gated(SlowToAdd):
    """An engine that adds each sequence once the gate is open, and records aborts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.begun, self.aborted = threading.Event(), threading.Event(), list[str]()

    def add_request(self, new: NewRequest) -> None:
        self.begun.set()
        assert self.gate.wait(60)
        self.added.append(new.request_id)

    def abort(self, request_id: str, *, is_complete: bool) -> None:
        self.aborted.append(request_id)

    def state(self) -> EngineState:
        return replace(IDLE, num_waiting=len(self.added))


async def test_commands_wait_for_no_sequence_that_is_not_being_added():
    engine, events = Gated(), list[Event]()
    steps = StepThread(engine, events.append)
    steps.start()
    try:
        for i in range(50):
            steps.add(NewRequest(f"a-{i}", [1], SamplingParams(), tenant_id="a"))
        await asyncio.to_thread(engine.begun.wait, 60)
        for request_id in ("a-0", "a-1"):  # one that is being added, one that waits
            steps.abort(request_id)
        number, state = asyncio.create_task(steps.call(lambda: len(engine.added))), asyncio.create_task(steps.state())
        await asyncio.sleep(0)
        engine.gate.set()
        assert await number == 1
        assert [each for each in events if isinstance(each, Released)] == [Released("a-0"), Released("a-1")]
        assert (await state).num_waiting == 49, "all but the one that is never added"
        await until(lambda: len(engine.added) == 49)
    finally:
        engine.gate.set()
        await steps.close()
    assert engine.aborted == ["a-0", "a-1"], "the abort runs after the sequence was added"
    assert engine.added == ["a-0", *(f"a-{i}" for i in range(2, 50))]


class Patient:
    """An engine whose device is busy for `spare_seconds`."""

    def __init__(self) -> None:
        self.added: list[str] = []
        self.steps: list[int] = []
        self.spare_seconds = 10_000.0
        self.is_waiting_for_adapters = False

    def add_request(self, new: NewRequest) -> None:
        self.added.append(new.request_id)

    def abort(self, request_id: str, *, is_complete: bool) -> None:
        self.spare_seconds = 0.0

    def has_work(self) -> bool:
        return not self.steps

    def step(self) -> StepOutputs:
        self.steps.append(len(self.added))
        return StepOutputs()


async def test_commands_run_while_the_device_is_busy():
    engine = Patient()
    steps = StepThread(engine, lambda event: None)
    steps.start()
    try:
        for request_id in ("a", "b"):
            steps.add(NewRequest(request_id, [1], SamplingParams()))
            await until(lambda wanted=request_id: wanted in engine.added)
            assert not engine.steps
        steps.abort("a")
        await steps.call(lambda: None)
    finally:
        await steps.close()
    assert engine.steps == [2]


async def test_a_thread_that_waits_for_the_device_ends_at_once():
    engine = Patient()
    steps = StepThread(engine, lambda event: None)
    steps.start()
    steps.add(NewRequest("a", [1], SamplingParams()))
    await until(lambda: engine.added == ["a"])
    await asyncio.wait_for(steps.close(), 60)
    assert not steps._thread.is_alive()
