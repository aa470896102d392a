"""The minimum of prompt tokens of a device reaches the pacer of its engine."""

from pathlib import Path

import pytest
import torch

from adapters.manifest import BaseShape
from adapters.tiers.host_cache import HostCache
from engine.config import EngineConfig
from engine.engine import Engine
from engine.scheduling.pacing import Pacer
from kernels.platform import platform_of
from kernels.simulated.platform import SimulatedPlatform
from testing.tiny import save_model


@pytest.mark.parametrize(("device", "least"), [("cuda", 256), ("cpu", 4)])
def test_an_engines_pacer_has_the_minimum_of_its_device(
    device: str, least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulated device takes the place of the device, so no GPU is needed. Nothing is known about its steps yet."""
    monkeypatch.setattr(SimulatedPlatform, "min_prompt_tokens", platform_of(torch.device(device)).min_prompt_tokens)
    save_model(tmp_path, max_model_len=256)
    host = HostCache(None, BaseShape.from_config_dir(tmp_path), None, torch.float32)
    memory = {"kv_cache_memory": 1 << 20, "adapter_memory": 1 << 20}
    engine = Engine(EngineConfig(model=str(tmp_path), device="simulated:0,0", **memory), host)
    try:
        pacer = engine.scheduler._pacer
        assert isinstance(pacer, Pacer)
        assert pacer.paced_tokens(8, 4096) == least
    finally:
        engine.close()
        host.close()
