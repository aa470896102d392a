"""A real server on a real engine, in a thread with its own event loop."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from engine.config import EngineConfig, ServerConfig
from engine.core.process import InThread
from wire.telemetry.spans import Tracing

if TYPE_CHECKING:
    from engine.core.service import CoreService
    from engine.engine import Engine
    from engine.model.decoder import Decoder
    from engine.scheduling.request import RequestOutput, TokenLogprobs

# Fields of a request whose steps each take at least SLOW_STEP_S, with the fixture `slow_steps` or in a process of
# `testing.broken_core`. A request of 3,500 tokens thus runs for 70 s, however fast the machine.
SLOW: dict[str, Any] = {"cache_salt": "slow"}
SLOW_STEP_S = 0.02


def outputs_until_idle(engine: "Engine") -> Iterator["RequestOutput"]:
    """Run steps until the engine has no work and yield their outputs. Sleep while all work waits for adapters."""
    while engine.has_work():
        yield from engine.step()
        if engine.is_waiting_for_adapters:
            time.sleep(0.001)


def decoder_of(engine: "Engine") -> "Decoder":
    """Return an engine's decoder. An engine on a simulated device has none."""
    from engine.execution.runner import Runner

    assert isinstance(engine.runner, Runner)
    return engine.runner.decoder


def whole_prompt_logprobs(outputs: "Iterable[RequestOutput]") -> "list[TokenLogprobs | None]":
    """Return a request's prompt log-probabilities, which its outputs have in parts."""
    found: list[TokenLogprobs | None] = []
    for output in outputs:
        entries = output.prompt_logprobs or []
        if entries and entries[0] is None:  # the prompt begins, perhaps again after a preemption
            found = []
        found += entries
    return found


class RunningServer:
    """Server that answers at `url` until `close`. config: fields of EngineConfig. server: fields of ServerConfig."""

    def __init__(
        self,
        model: Path,
        store: Path | None = None,
        config: dict[str, Any] | None = None,
        port: int = 0,
        tracing: Tracing | None = None,
        **server: Any,
    ) -> None:
        from engine.http.app import Server  # takes 4 s with torch, so it is not imported at collection

        small = EngineConfig(
            model=str(model), served_model_name="tiny", dtype="float32", device="cpu",
            max_num_seqs=8, max_num_batched_tokens=64,
            kv_cache_memory=8 << 20, adapter_memory=4 << 20, max_lora_rank=16,
        )  # fmt: skip
        self.config = replace(small, **(config or {}))
        self.store = store
        given = {"adapter_store": None if store is None else str(store), "drain_seconds": 0.2} | server
        self.server = Server(self.config, ServerConfig(**given), tracing=tracing)
        self._ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(port)))
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure

    async def _serve(self, port: int) -> None:
        from engine.http.app import listening

        self._stop = asyncio.Event()
        self._event_loop = asyncio.get_running_loop()
        try:
            async with listening(self.server, "127.0.0.1", port) as bound:
                self.url = f"http://127.0.0.1:{bound}"
                try:
                    await self.server.start()
                    self._ready.set()
                    await self._stop.wait()
                finally:
                    await self.server.stop()
        except BaseException as exc:  # noqa: BLE001 - raised again by the constructor
            self._failure = exc
        finally:
            self._ready.set()

    @property
    def core(self) -> "CoreService":
        """Return the core, which must run in a thread of this process."""
        link = self.server._core and self.server._core._link
        assert isinstance(link, InThread)
        return link.service

    def close(self) -> None:
        """Stop the server; no effect on one that has stopped."""
        if self._thread.is_alive():
            self._event_loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()


class Client:
    """Minimal client: sends one request and reads the answer."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session = session
        self.url = url

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        async with self.session.get(self.url + path, **options) as response:
            return response.status, await response.json()

    async def post(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body)
        async with self.session.post(self.url + path, data=data, **options) as response:
            return response.status, await response.json()

    async def ok(self, path: str, body: Any, **options: Any) -> Any:
        status, answer = await self.post(path, body, **options)
        assert status == 200, answer
        return answer

    async def complete(self, **fields: Any) -> Any:
        return await self.ok("/v1/completions", {"model": "tiny", "temperature": 0} | fields)

    async def chat(self, **fields: Any) -> Any:
        return await self.ok("/v1/chat/completions", {"model": "tiny", "temperature": 0} | fields)

    async def events(self, path: str, body: Any, **options: Any) -> list[Any]:
        """Return a stream's chunks without the final [DONE], which is checked."""
        async with self.session.post(self.url + path, data=json.dumps(body | {"stream": True}), **options) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            text = await response.text()
        events = text.removesuffix("\n\n").split("\n\n")
        assert all(event.startswith("data: ") for event in events)
        assert events[-1] == "data: [DONE]"
        return [json.loads(event[6:]) for event in events[:-1]]

    async def state(self, **options: Any) -> Any:
        return (await self.get("/state", **options))[1]

    async def wait_for(self, condition: Callable[[Any], bool], seconds: float = 60.0, **options: Any) -> Any:
        """Wait until the engine's state meets the condition, and return it."""
        deadline = time.monotonic() + seconds
        while True:
            state = await self.state(**options)
            if condition(state):
                return state
            assert time.monotonic() < deadline, state
            await asyncio.sleep(0.01)
