"""The order of an engine's start."""

import os
import signal
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

import engine.engine
from engine.config import EngineConfig, ServerConfig
from engine.http.app import Server
from engine.program import run, serve
from testing.tiny import save_model
from wire.event_loop import SWITCH_SECONDS


@pytest.mark.usefixtures("starts_servers")
async def test_matrix_products_run_on_the_step_thread_before_the_engine_is_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cublas has a handle and a workspace for each thread: the first product allocates them, not the first request."""
    save_model(tmp_path / "base", max_model_len=64)
    events: list[str] = []
    measure = engine.engine.measure_roofline

    def measured(*args: Any) -> Any:
        events.append(threading.current_thread().name)
        return measure(*args)

    def ready(_: int) -> None:
        events.append("ready")
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("engine.engine.measure_roofline", measured)
    config = EngineConfig(
        model=str(tmp_path / "base"),
        device="cpu",
        engine_core_mode="thread",
        kv_cache_memory=1 << 20,
        adapter_memory=1 << 20,
    )
    assert await serve(Server(config, ServerConfig(drain_seconds=0.1)), "127.0.0.1", 0, ready, None, nullcontext) == 0
    assert events == ["engine", "ready"]


def test_threads_of_an_engine_return_the_interpreter_lock_soon(tmp_path: Path) -> None:
    """A thread that encodes a large answer would hold up each step and each event by Python's default of 5 ms."""
    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(0.005)
        assert run(EngineConfig(model=str(tmp_path / "none"), device="cpu"), ServerConfig()) == 1
        assert sys.getswitchinterval() == pytest.approx(SWITCH_SECONDS)
    finally:
        sys.setswitchinterval(before)
