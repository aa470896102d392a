"""Requests that a foreign server may have: from their load on if there is one, else from their own first byte."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from adapters.manifest import AdapterNotFound
from gateway.fleet.calls.call import Call
from gateway.fleet.engines.engine import Address, EngineRecord
from gateway.fleet.engines.own_requests import NamedBody
from gateway.fleet.kinds.foreign import INLINE_TOKENS
from gateway.fleet.kinds.kind import FilesMissing
from gateway.fleet.kinds.last_uses import LastUses
from gateway.fleet.kinds.vllm import Vllm
from testing.gateway.running import until

DIGEST = "d" * 64
# An adapter whose files can be read at any time.
OTHER = "e" * 64


class Server(Vllm):
    """A vLLM server. steps: loads and requests that it gets, and the names of requests when they count as sent.

    reads: lets the adapter's files be read, on a thread. answers: ends the loads.
    """

    def __init__(self) -> None:
        services = SimpleNamespace(session=None, store=None, uses=LastUses(None, 1.0), internal_token="")
        super().__init__(cast(Any, services))
        self.engine = EngineRecord(Address("http://vllm", Vllm.traits))
        self.steps: list[str] = []
        self.reads, self.answers = threading.Event(), asyncio.Event()
        self.reads.set()
        self.has_files = True
        self.adapters._post = self._load  # type: ignore[method-assign]
        self.adapters._verified.use = self._use  # type: ignore[method-assign]

    def _use(self, _: object, digest: str) -> AbstractContextManager[Any]:
        if not self.has_files:
            raise AdapterNotFound("model", "no files")
        return self._read(digest)

    @contextmanager
    def _read(self, digest: str) -> Iterator[Any]:
        if digest != OTHER:
            self.reads.wait()
        yield SimpleNamespace(folder="/", manifest=SimpleNamespace(invocation=()))

    async def _load(self, *_: object) -> tuple[int, bytes]:
        self.steps.append("load")
        await self.answers.wait()
        return 200, b""

    async def deliver(self, engine: EngineRecord, call: Call, *_: object) -> Any:
        self.steps.append("request")
        call.on_sent()
        return SimpleNamespace(status=200)

    def ask(self, name: str, digest: str = DIGEST, tenant_id: str = "a", prompt_tokens: int = 1) -> "asyncio.Task[Any]":
        """Begin a request for an adapter."""
        model: Any = SimpleNamespace(digest=digest, mixture=None)
        body = {"model": "m", "prompt": "a", "max_tokens": 1}
        call = Call(
            request_id=name,
            path="/v1/completions",
            body=body,
            named=NamedBody(body),
            model=model,
            tenant=cast(Any, SimpleNamespace(id=tenant_id)),
            prompt_tokens=prompt_tokens,
            arrived=0.0,
            on_sent=lambda: self.steps.append(name),
        )
        return asyncio.create_task(self.send(self.engine, call))

    async def has_reached(self, step: str) -> bool:
        return step in self.steps

    async def loads(self) -> bool:
        return any(server.loads for server in self.adapters._server_loads.values())

    async def loads_nothing(self) -> bool:
        return not await self.loads()


async def test_a_request_to_a_server_that_finds_adapters_counts_from_its_first_byte():
    """It counted from before the wait for a connection, so a client that left then was blamed for a death."""
    server = Server()
    server.engine.state.finds_adapters = True
    await server.ask("one")
    assert server.steps == ["request", "one"]


async def test_a_request_whose_adapter_has_no_files_never_counts():
    server = Server()
    server.has_files = False
    with pytest.raises(FilesMissing):
        await server.ask("one")
    assert server.steps == []


async def test_all_requests_that_wait_for_a_load_count_from_its_sending():
    server = Server()
    asked = [server.ask("one"), server.ask("two")]
    await until(partial(server.has_reached, "load"))
    assert server.steps == ["one", "two", "load"]
    asked.append(server.ask("three"))
    await until(partial(server.has_reached, "three"))
    asked[0].cancel()
    server.answers.set()
    await asyncio.gather(*asked[1:])
    assert server.steps[3:] == ["three", "request", "two", "request", "three"]


async def test_a_load_whose_clients_have_all_left_is_not_sent():
    """A death by it would have no known cause."""
    server = Server()
    server.answers.set()
    server.reads.clear()
    left = server.ask("one")
    await until(server.loads)
    left.cancel()
    await asyncio.wait({left})
    server.reads.set()
    await until(server.loads_nothing)
    assert server.steps == []
    await server.ask("two")
    assert server.steps == ["two", "load", "request", "two"]


async def test_loads_of_a_tenant_delay_no_load_and_no_long_prompt_of_another():
    """The files of 40 adapters were read or downloaded in the threads that built the bodies of long prompts too."""
    server = Server()
    server.answers.set()
    server.reads.clear()
    many = [server.ask(f"{number}", f"{number:064}") for number in range(40)]
    await until(server.loads)
    try:
        async with asyncio.timeout(30.0):
            await server.ask("other", OTHER, "b", prompt_tokens=INLINE_TOKENS + 1)
        assert server.steps == ["other", "load", "request", "other"]
    finally:
        server.reads.set()
        await asyncio.gather(*many)
