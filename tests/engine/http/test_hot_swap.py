"""Running streams beside adapters that are loaded, replaced and unloaded: their tokens stay the same."""

import asyncio
import threading
from pathlib import Path

import aiohttp
import pytest

from testing.engine import SLOW, Client, RunningServer
from testing.tiny import save_adapter

STREAMS, SWAPS = 6, 24
FIELDS = {"max_tokens": 1000, "ignore_eos": True, "temperature": 0}


async def test_swaps_of_other_adapters_change_no_running_stream(
    session: aiohttp.ClientSession,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    slow_steps: threading.Event,
) -> None:
    # Without rests between the loads, so that all of them take place while the streams run.
    monkeypatch.setattr("engine.answering.model_names.NAMED_SHARE", 1.0)
    # Device memory for four adapters of rank 8, so that each one in use makes others leave.
    running = RunningServer(model, config={"adapter_memory": 4 * 8 * 2 * 3000 * 4, "enable_prefix_caching": False})
    client = Client(session, running.url)
    try:
        for i in range(SWAPS + 1):
            save_adapter(tmp_path / f"a{i}", rank=8, seed=i)
        await client.ok("/v1/load_lora_adapter", {"lora_name": "mine", "lora_path": str(tmp_path / f"a{SWAPS}")})

        async def stream(i: int, **fields: str) -> str:
            body = FIELDS | fields | {"model": "mine" if i % 2 else "tiny", "prompt": f"Number {i}"}
            return (await client.ok("/v1/completions", body))["choices"][0]["text"]

        alone = await asyncio.gather(*map(stream, range(STREAMS)))
        streams = [asyncio.create_task(stream(i, **SLOW)) for i in range(STREAMS)]
        await client.wait_for(lambda state: state["running"] == STREAMS)
        before = (await client.state())["adapter_loads"]
        for i in range(SWAPS):
            load = {"lora_name": "other", "lora_path": str(tmp_path / f"a{i}"), "load_inplace": True}
            await client.ok("/v1/load_lora_adapter", load)
            await client.ok("/v1/completions", {"model": "other", "prompt": "Hi", "max_tokens": 1})
            if i % 4 == 3:
                await client.ok("/v1/unload_lora_adapter", {"lora_name": "other"})
        state = await client.state()
        assert state["adapter_loads"] >= before + SWAPS, "each of them was on the device"
        assert state["running"] == STREAMS, "the streams outlasted the swaps"
        slow_steps.set()
        assert await asyncio.gather(*streams) == alone
    finally:
        running.close()
