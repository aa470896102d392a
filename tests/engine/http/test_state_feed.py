"""The state that the engine pushes to its followers."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from engine.http.state_feed import spacing
from testing.engine import SLOW, Client, RunningServer

LONG = {"model": "tiny", "prompt": "go on", "max_tokens": 3500, "ignore_eos": True} | SLOW
SECONDS = 60.0


class Follower:
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.reports: list[dict[str, Any]] = []

    async def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Return the first new report that meets the condition; `reports` has all reports until then."""
        async with asyncio.timeout(SECONDS):
            async for line in self._response.content:
                self.reports.append(json.loads(line))
                if condition(self.reports[-1]):
                    return self.reports[-1]
        raise AssertionError("the engine has ended")

    async def ended(self) -> bool:
        async with asyncio.timeout(SECONDS):
            return await self._response.content.read() is not None


@asynccontextmanager
async def following(client: Client) -> AsyncIterator[Follower]:
    async with client.session.get(client.url + "/state", params={"watch": "true"}) as response:
        assert (response.status, response.content_type) == (200, "application/x-ndjson")
        yield Follower(response)


def is_idle(state: dict[str, Any]) -> bool:
    return not state["running"] and not state["waiting"]


@pytest.mark.usefixtures("slow_steps")
async def test_load_is_pushed_as_it_comes_and_goes(client: Client):
    async with following(client) as one, following(client) as other:
        await one.until(is_idle)
        stream = await client.session.post(client.url + "/v1/completions", json=LONG | {"stream": True})
        for follower in (one, other):
            await follower.until(lambda state: state["running"] == 1)
        # A client that disconnects ends its request without a step.
        stream.close()
        for follower in (one, other):
            await follower.until(is_idle)
            revisions = [state["revision"] for state in follower.reports]
            assert revisions == sorted(revisions)
    assert (await client.state())["revision"] >= max(revisions)


async def test_an_adapter_that_comes_to_the_device_is_pushed_and_one_that_goes(client: Client, adapter: Any):
    async with following(client) as follower:
        before = await follower.until(is_idle)
        status, loaded = await client.post("/v1/load_lora_adapter", {"lora_name": "one", "lora_path": str(adapter)})
        assert status == 200
        digest = loaded["digest"].removeprefix("sha256:")
        assert digest not in before["adapters_resident"]
        assert (await client.post("/v1/completions", {"model": "one", "prompt": "hi", "max_tokens": 2}))[0] == 200
        there = await follower.until(lambda state: digest in state["adapters_resident"])
        assert there["revision"] > before["revision"]
        assert (await client.post("/v1/unload_lora_adapter", {"lora_name": "one"}))[0] == 200
        gone = await follower.until(lambda state: digest not in state["adapters_resident"])
        assert gone["revision"] > there["revision"]
        assert gone["instance"] == before["instance"]


async def test_host_memory_is_repeated_after_a_change_only(client: Client, adapter: Any):
    async with following(client) as follower:
        assert "adapters_host" in await follower.until(is_idle)
        status, loaded = await client.post("/v1/load_lora_adapter", {"lora_name": "one", "lora_path": str(adapter)})
        assert status == 200
        digest = loaded["digest"].removeprefix("sha256:")
        await follower.until(lambda state: digest in state.get("adapters_host", ()))
        follower.reports.clear()
        await follower.until(lambda state: len(follower.reports) >= 2)
        assert not any("adapters_host" in state for state in follower.reports)
        assert digest in (await client.state())["adapters_host"], "a poll always has the list"
        assert (await client.post("/v1/unload_lora_adapter", {"lora_name": "one"}))[0] == 200
        await follower.until(lambda state: digest not in state.get("adapters_host", (digest,)))


def test_changes_are_pushed_less_often_to_many_followers():
    assert spacing(0) == spacing(16) == 0.05
    assert spacing(48) == pytest.approx(0.15)
    assert spacing(10**6) == 0.5


async def test_something_is_said_without_any_change(client: Client):
    async with following(client) as follower:
        await follower.until(is_idle)

        def is_repeated(state: dict[str, Any]) -> bool:
            # Changes by the tests before may still arrive.
            return [each["revision"] for each in follower.reports[-2:]] == [state["revision"]] * 2

        await follower.until(is_repeated)


@pytest.mark.parametrize("watch", ["", "1", "yes"])
async def test_what_watch_may_be(client: Client, watch: str):
    status, answer = await client.get("/state", params={"watch": watch})
    assert (status, answer["error"]["param"]) == (400, "watch")


@pytest.mark.usefixtures("slow_steps")
async def test_an_engine_on_its_way_out_says_so_and_lets_its_followers_go(session: aiohttp.ClientSession, model: Any):
    server = RunningServer(model)
    client = Client(session, server.url)
    async with following(client) as follower:
        instance = (await follower.until(is_idle))["instance"]
        stream = await session.post(server.url + "/v1/completions", json=LONG | {"stream": True})
        await follower.until(lambda state: state["running"] == 1)
        closing = asyncio.create_task(asyncio.to_thread(server.close))
        try:
            assert (await follower.until(lambda state: state["draining"]))["instance"] == instance
            assert await follower.ended()
        finally:
            stream.close()
            await closing


async def test_an_engine_that_failed_lets_its_followers_go(
    session: aiohttp.ClientSession, model: Any, monkeypatch: pytest.MonkeyPatch
):
    server = RunningServer(model)
    try:
        client = Client(session, server.url)
        async with following(client) as follower:
            await follower.until(is_idle)

            def fail(*_: object) -> None:
                raise RuntimeError("the device is gone")

            monkeypatch.setattr(server.core.engine.runner, "forward", fail)
            assert (await client.post("/v1/completions", LONG))[0] == 503
            assert await follower.ended()
        assert (await client.get("/state", params={"watch": "true"}))[0] == 503
    finally:
        server.close()


async def test_the_state_names_the_largest_adapter_served(client: Client):
    state = await client.state()
    assert (state["max_lora_rank"], state["max_adapter_bytes"]) == (16, 4 << 30)


async def test_the_state_has_the_last_seconds_of_steps(client: Client):
    await client.complete(prompt="hello", max_tokens=4, ignore_eos=True)
    [first, *_] = (await client.wait_for(lambda state: state["recent_steps"]))["recent_steps"]
    assert first["steps"] >= 1
    assert 0 < first["longest"] <= first["seconds"]
    assert first["prompt_tokens"] + first["decodes"] >= first["steps"]
    # Only a program of its own measures its device.
    assert first["roofline"] is None
