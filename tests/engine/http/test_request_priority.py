"""A request's own priority and target for its first token."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.engine import Client, RunningServer


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[RunningServer]:
    running = RunningServer(model, config={"max_num_seqs": 1})
    yield running
    running.close()


async def test_requests_are_served_by_deadline(client: Client):
    ended = []

    async def ask(name: str, **fields: float) -> None:
        await client.complete(prompt=name, max_tokens=2, **fields)
        ended.append(name)

    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    async with (
        asyncio.TaskGroup() as group,
        client.session.post(client.url + "/v1/completions", data=json.dumps(body)) as response,
    ):
        await response.content.readline()
        for name, fields in (("usual", {}), ("target", {"ttft_target": 0.5}), ("urgent", {"priority": -1})):
            group.create_task(ask(name, **fields))
        await client.wait_for(lambda state: state["waiting"] == 3)
    assert ended == ["urgent", "target", "usual"]


@pytest.mark.parametrize("fields", [{"priority": 101}, {"priority": 1.5}, {"ttft_target": 0}, {"ttft_target": 1e9}])
async def test_a_wrong_value_is_refused_by_its_name(client: Client, fields: dict[str, float]):
    [name] = fields
    status, answer = await client.post("/v1/completions", {"model": "tiny", "prompt": "Hi"} | fields)
    assert (status, answer["error"]["param"]) == (400, name)
