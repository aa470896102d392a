"""Any body gets an answer, never a 500; nothing hangs, and everything is free at the end.

200 bodies by default; `LORAPLEX_FUZZ_BODIES=10000` in the environment runs more.
"""

import asyncio
import json
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from testing.engine import Client, RunningServer
from tests.engine.answering.tools import save_tool_model
from tests.engine.http.bodies import bodies

AT_ONCE = 4
BODIES = int(os.environ.get("LORAPLEX_FUZZ_BODIES", "200"))
STUCK_S = 90.0


class Fuzzer:
    """Client that sends groups of bodies at once, some from connections that it closes early."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.statuses: Counter[int] = Counter()

    async def send(self, group: list[tuple[tuple[str, bytes], bool]]) -> None:
        async with aiohttp.ClientSession() as session:
            async with asyncio.timeout(STUCK_S):
                await asyncio.gather(*(self._send(session, path, raw, gone) for (path, raw), gone in group))

    async def _send(self, session: aiohttp.ClientSession, path: str, raw: bytes, gone: bool) -> None:
        async with session.post(self.url + path, data=raw) as response:
            self.statuses[response.status] += 1
            if gone and response.status == 200:
                response.close()
                return
            text = await response.text()
        if response.content_type == "text/event-stream":
            assert text.endswith("data: [DONE]\n\n"), text[-300:]
            answers = [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]
        else:
            answers = [json.loads(text)]
        for answer in answers:
            if "error" in answer:
                error = answer["error"]
                served = response.status < 500 and error["type"] != "server_error"
                assert served or error["code"] == "engine_overloaded", (path, raw[:2000], error)
                assert error["message"]
            else:
                assert response.status == 200


@pytest.fixture(scope="module")
def server(starts_servers: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = save_tool_model(tmp_path_factory.mktemp("fuzz") / "model", "hermes")
    running = RunningServer(folder, config={"max_model_len": 256})
    yield running
    running.close()


@pytest.mark.timeout(3600 if BODIES > 1000 else 300)
def test_fuzzed_bodies_are_answered_and_leave_nothing_behind(server):
    fuzzer = Fuzzer(server.url)
    with asyncio.Runner() as runner:

        @settings(
            max_examples=BODIES // AT_ONCE,
            deadline=None,
            database=None,
            derandomize=BODIES <= 1000,
            suppress_health_check=list(HealthCheck),
        )
        @given(st.lists(st.tuples(bodies(), st.booleans()), min_size=AT_ONCE, max_size=AT_ONCE))
        def fuzz(group: list[Any]) -> None:
            runner.run(fuzzer.send(group))

        fuzz()
        state = runner.run(_rest(server))
    print(f"{fuzzer.statuses.total()} bodies: {dict(fuzzer.statuses)}")
    assert fuzzer.statuses.total() >= BODIES // 2
    assert fuzzer.statuses[200] > fuzzer.statuses.total() // 20, "too few are served for this to mean anything"
    assert state["kv_blocks_free"] == state["kv_blocks_total"]
    assert state["adapter_pages_free"] == state["adapter_pages_total"]


async def _rest(server: RunningServer) -> Any:
    async with aiohttp.ClientSession() as session:
        client = Client(session, server.url)
        assert (await client.complete(prompt="still here", max_tokens=2))["choices"]

        def is_idle(state: Any) -> bool:
            return not state["running"] and not state["waiting"] and server.server._in_flight.number == 0

        return await client.wait_for(is_idle)
