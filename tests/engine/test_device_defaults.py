"""Defaults of an engine's options by device; no test needs a GPU."""

from pathlib import Path

import pytest
import torch

from adapters.manifest import BaseShape
from adapters.tiers.host_cache import HostCache
from engine.config import BatchSizes, EngineConfig
from engine.engine import Engine
from engine.memory import host_adapter_bytes
from kernels.cpu.platform import CpuPlatform
from kernels.platform import platform_of
from testing.tiny import save_model
from wire.errors import ConfigError

GIB = 1 << 30


@pytest.mark.parametrize(
    ("device", "sizes", "host_adapters"),
    [("cpu", BatchSizes(64, 640), 4 * GIB), ("cuda", BatchSizes(256, 8192), 32 * GIB)],
)
def test_a_device_has_its_own_defaults(
    device: str, sizes: BatchSizes, host_adapters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform, host, config = platform_of(torch.device(device)), CpuPlatform(), EngineConfig(model="x")
    monkeypatch.setattr(CpuPlatform, "total_memory", lambda _: 100 * GIB)
    assert BatchSizes.of(config, is_host=platform.is_host) == sizes
    assert host_adapter_bytes(config, 8 * GIB, platform, host, GIB) == host_adapters
    given = EngineConfig(model="x", max_num_seqs=3, max_num_batched_tokens=5, host_adapter_memory=7)
    assert BatchSizes.of(given, is_host=platform.is_host) == BatchSizes(3, 5)
    assert host_adapter_bytes(given, 8 * GIB, platform, host, GIB) == 7
    monkeypatch.setattr(CpuPlatform, "total_memory", lambda _: 20 * GIB)
    assert host_adapter_bytes(config, 8 * GIB, platform, host, 8 * GIB) == {"cpu": 3 * GIB, "cuda": 10 * GIB}[device]


def test_an_engine_takes_the_defaults_of_a_gpu(tmp_path: Path) -> None:
    """The simulated device has those of a GPU, and nothing is computed."""
    save_model(tmp_path, max_model_len=256)
    host = HostCache(None, BaseShape.from_config_dir(tmp_path), None, torch.float32)
    memory = {"kv_cache_memory": 1 << 20, "adapter_memory": 1 << 20}
    engine = Engine(EngineConfig(model=str(tmp_path), device="simulated:0,0", **memory), host)
    try:
        assert engine.max_num_seqs == 256
        assert engine.scheduler._limits.max_num_batched_tokens == 8192
        assert engine.state().tiers.host.max_bytes == 4 << 20
    finally:
        engine.close()
        host.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 1000}, r"max_num_batched_tokens: expected at least max_num_seqs \(1000\), got 640"),
        ({"max_num_batched_tokens": 8}, r"max_num_batched_tokens: expected at least max_num_seqs \(64\), got 8"),
        ({"cuda_graph_sizes": (0, 65)}, r"cuda_graph_sizes: expected numbers from 1 to max_num_seqs \(64\)"),
    ],
)
def test_a_size_must_fit_the_defaults_of_the_others(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BatchSizes.of(EngineConfig(model="x", **options), is_host=True)
