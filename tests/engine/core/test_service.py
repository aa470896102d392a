"""The core's side: sequences whose rules are being compiled, and a front that does not read."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adapters.manifest import BaseShape
from adapters.store import DirectoryStore
from adapters.tiers.adapter_reader import HostAdapter
from engine.core import service
from engine.core.child import FrontSocket
from engine.core.frames import Frames
from engine.structured.compiler import Grammar, GrammarCompiler
from testing.engine import Client, RunningServer
from wire.structured import GrammarSpec


async def until_in_flight(server: RunningServer, number: int) -> None:
    deadline = time.monotonic() + 30
    assert server.server._in_flight is not None
    while server.server._in_flight.number != number:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_requests_may_leave_while_their_grammar_compiles(
    client: Client, server: RunningServer, monkeypatch: pytest.MonkeyPatch
):
    gate, compile_now = threading.Event(), GrammarCompiler.compile
    compiled: list[str] = []

    def compile_later(self: GrammarCompiler, spec: GrammarSpec) -> Grammar:
        gate.wait(60)
        compiled.append(spec.text)
        return compile_now(self, spec)

    monkeypatch.setattr(GrammarCompiler, "compile", compile_later)
    try:
        body = {"prompt": "x", "guided_regex": "ab{3}", "n": 2}
        leaves, stays = (asyncio.create_task(client.complete(**body)) for _ in range(2))
        await until_in_flight(server, 4)
        leaves.cancel()
        await until_in_flight(server, 2)
        alone = asyncio.create_task(client.complete(prompt="x", guided_regex="never"))
        await until_in_flight(server, 3)
        alone.cancel()
        await until_in_flight(server, 2)
        gate.set()
        assert [choice["text"] for choice in (await stays)["choices"]] == ["abbb"] * 2
    finally:
        gate.set()
    await until_in_flight(server, 0)
    assert server.core._preparing == {}
    assert compiled == ["ab{3}"], "a grammar that no request waits for leaves the queue"


async def test_an_adapters_weights_are_inspected_on_a_thread(
    server: RunningServer, model: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
):
    """LoRA on the embedding of a large vocabulary takes tenths of a second; the event loop serves all tenants."""
    ran_on: list[threading.Thread] = []

    def recording(inspect: Callable[[HostAdapter], Any]) -> Callable[[HostAdapter], Any]:
        def run(adapter: HostAdapter) -> Any:
            ran_on.append(threading.current_thread())
            return inspect(adapter)

        return run

    for name in ("has_effect", "trained_tokens"):
        monkeypatch.setattr(service, name, recording(getattr(service, name)))
    assert server.store is not None
    digest = DirectoryStore(server.store).put(adapter, BaseShape.from_config_dir(model)).digest
    found = asyncio.run_coroutine_threadsafe(server.core._inspect(digest, ""), server._event_loop)
    assert (await asyncio.wrap_future(found)).num_modules
    assert len(ran_on) == 2
    assert server._thread not in ran_on


def test_a_front_that_does_not_read_stops_the_steps_and_loses_nothing():
    ours, theirs = socket.socketpair()
    core, frames = FrontSocket(theirs), [bytes([i % 256]) * 20_000 for i in range(200)]
    sent: list[int] = []

    def steps() -> None:
        for i, frame in enumerate(frames):
            core.send(frame)
            sent.append(i)

    thread = threading.Thread(target=steps)
    thread.start()
    try:
        deadline, before = time.monotonic() + 20, -1
        while len(sent) != before or not sent:
            assert time.monotonic() < deadline
            before = len(sent)
            time.sleep(0.2)
        assert len(sent) < len(frames), "what is unsent has a bound"
        reader, found = Frames(), []
        while len(found) < len(frames):
            found += reader.feed(ours.recv(65_536))
        assert found == frames
    finally:
        thread.join(20)
        ours.close()
        theirs.close()
