"""The engine's log lines."""

import asyncio
import dataclasses
import time
from pathlib import Path
from typing import get_args

import pytest

from adapters.tiers.state import HostCacheStats, TierState
from engine.answering import throughput_log
from engine.answering.throughput_log import throughput_line
from engine.scheduling.drafter import DraftCount, Outcome
from engine.state import EngineState
from testing.engine import Client, RunningServer

IDLE = EngineState(
    residency_version=0,
    num_running=0,
    num_waiting=0,
    num_blocks=100,
    num_free_blocks=100,
    resident_adapters=(),
    num_adapter_pages=8,
    num_free_adapter_pages=8,
    num_adapter_loads=0,
    num_adapter_evictions=0,
    num_preemptions=0,
    num_steps=5,
    num_prompt_tokens=1000,
    num_generated_tokens=500,
    prefix_hit_tokens=10,
    prefix_query_tokens=100,
    num_met=0,
    num_missed=0,
    tenants=(),
    preempted=(),
    tiers=TierState({}, 0, 0, 0.0, {}, HostCacheStats(0, 0, 0, 0, 0)),
)


def test_the_line_has_rates_of_its_own_time_only():
    busy = dataclasses.replace(
        IDLE,
        num_running=3,
        num_waiting=2,
        num_free_blocks=75,
        num_prompt_tokens=1100,
        num_generated_tokens=520,
        prefix_hit_tokens=60,
        prefix_query_tokens=200,
    )
    assert throughput_line(IDLE, busy, 10.0) == (
        "running 3, waiting 2, prompts 10.0 tokens/s, generated 2.0 tokens/s, KV cache 25.0% used, prefix hits 50.0%, "
        "adapters resident 0"
    )


def test_the_line_says_what_holds_drafts_back():
    before = dataclasses.replace(
        IDLE, drafts=(DraftCount("", 100, 60),), draft_steps={"drafted": 20, "catching_up": 500, "measuring": 2}
    )
    steps = {"drafted": 27, "catching_up": 510, "measuring": 3, "cost": 82}
    counts = (DraftCount("", 130, 70), DraftCount("sha256:1", 10, 2))
    now = dataclasses.replace(before, num_running=1, drafts=counts, draft_steps=steps)
    line = throughput_line(before, now, 10.0)
    assert line is not None
    assert line.endswith(
        ", drafts: 12 accepted of 40, held back in 93% of steps, mostly because a draft costs more time than it saves "
        "(cost)"
    )
    always = dataclasses.replace(now, draft_steps={**steps, "drafted": 40})
    line = throughput_line(now, always, 10.0)
    assert line is not None
    assert line.endswith("adapters resident 0, drafts: 0 accepted of 0, held back in 0% of steps")
    assert "drafts" not in str(throughput_line(now, now, 10.0)), "no step"


def test_every_reason_has_words():
    assert {*throughput_log._REASONS, "drafted"} == set(get_args(Outcome))


def test_an_idle_engine_has_no_line():
    assert throughput_line(IDLE, IDLE, 10.0) is None


async def test_work_and_adapters_are_in_the_log(
    session, model: Path, adapter: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch
):
    monkeypatch.setattr(throughput_log, "EVERY_S", 0.02)
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO", "engine")
    running = RunningServer(model)
    try:
        client = Client(session, running.url)
        digest = (await client.ok("/v1/load_lora_adapter", {"lora_name": "mine", "lora_path": str(adapter)}))["digest"]
        await client.complete(prompt="a secret prompt", model="mine")
        await client.ok("/v1/unload_lora_adapter", {"lora_name": "mine"})
        status, answer = await client.post("/v1/load_lora_adapter", {"lora_name": "lost", "lora_path": "no/folder"})
        assert status == 404
        assert str(tmp_path) not in answer["error"]["message"]
        deadline = time.monotonic() + 60
        while "prefix hits" not in caplog.text:
            assert time.monotonic() < deadline, caplog.text
            await asyncio.sleep(0.01)
    finally:
        running.close()
    assert f"adapter mine loaded: {digest}, rank 4, 1 pages" in caplog.text
    assert f"adapter mine unloaded: {digest}" in caplog.text
    assert "adapter lost not loaded" in caplog.text
    assert "secret" not in caplog.text
