"""A request's own priority and target for its first token."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.scheduling.outputs import StepOutputs
from testing.engine import SLOW, Client, RunningServer


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[RunningServer]:
    running = RunningServer(model, config={"max_num_seqs": 1})
    yield running
    running.close()


@pytest.mark.usefixtures("slow_steps")
async def test_requests_are_served_by_deadline(client: Client, server: RunningServer, monkeypatch: pytest.MonkeyPatch):
    engine, ended = server.core.engine, list[int]()
    assert engine is not None
    step = engine.step

    def recorded() -> StepOutputs:
        # Recorded here, because a busy client may receive several answers at once, in any order.
        outputs = step()
        ended.extend(output.num_output_tokens for output in outputs if output.finish_reason == "length")
        return outputs

    monkeypatch.setattr(engine, "step", recorded)
    lengths = {"urgent": 2, "target": 3, "usual": 4}

    async def ask(name: str, **fields: float) -> None:
        await client.complete(prompt=name, max_tokens=lengths[name], ignore_eos=True, **fields)

    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 3500, "ignore_eos": True, "stream": True} | SLOW
    async with (
        asyncio.TaskGroup() as group,
        client.session.post(client.url + "/v1/completions", data=json.dumps(body)) as response,
    ):
        await response.content.readline()
        # The targets are far apart, because a busy machine may take seconds between two arrivals.
        for name, fields in (("usual", {}), ("target", {"ttft_target": 0.001}), ("urgent", {"priority": -20})):
            group.create_task(ask(name, **fields))
        await client.wait_for(lambda state: state["waiting"] == 3)
    assert ended == [lengths[name] for name in ("urgent", "target", "usual")]


@pytest.mark.parametrize("fields", [{"priority": 101}, {"priority": 1.5}, {"ttft_target": 0}, {"ttft_target": 1e9}])
async def test_a_wrong_value_is_refused_by_its_name(client: Client, fields: dict[str, float]):
    [name] = fields
    status, answer = await client.post("/v1/completions", {"model": "tiny", "prompt": "Hi"} | fields)
    assert (status, answer["error"]["param"]) == (400, name)
