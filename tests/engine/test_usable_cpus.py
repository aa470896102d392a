"""Threads of an engine whose cgroup allows less CPU time than the machine has."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from adapters.manifest import BaseShape
from adapters.tiers.host_cache import HostCache
from engine.config import EngineConfig
from engine.engine import Engine
from engine.execution.runner import Runner
from kernels.cpu.native import NativeOps
from testing.tiny import save_model


@pytest.fixture
def threads() -> Iterator[int]:
    """Give torch two threads, and restore its number."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield 2
    torch.set_num_threads(before)


@pytest.mark.parametrize(("usable", "configured", "expected"), [(1, None, 1), (8, None, 2), (1, 2, 2)])
def test_an_engine_computes_with_as_many_threads_as_cpus_are_usable(
    usable: int, configured: int | None, expected: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.build.usable_cpus", lambda: usable)
    save_model(tmp_path / "base", max_model_len=64)
    host = HostCache(None, BaseShape.from_config_dir(tmp_path / "base"), 8 << 20, torch.float32)
    options = {} if configured is None else {"threads": configured}
    config = EngineConfig(
        model=str(tmp_path / "base"), dtype="float32", device="cpu", kv_cache_memory=1 << 20, adapter_memory=1 << 20,
        max_lora_rank=16, **options,
    )  # fmt: skip
    engine = Engine(config, host)
    try:
        assert torch.get_num_threads() == expected
        assert isinstance(engine.runner, Runner)
        ops = engine.runner.decoder.ops
        assert isinstance(ops, NativeOps)
        assert ops.threads == expected
    finally:
        engine.close()
        host.close()
