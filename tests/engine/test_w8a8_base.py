"""Engines on FP8 and int8 checkpoints (W8A8) against transformers + peft on the dequantised weights."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.manifest import BaseShape
from adapters.tiers.host_cache import HostCache
from engine.config import EngineConfig
from engine.engine import Engine
from engine.sizing import estimate
from engine.sizing_speed import ExpectedLoad
from kernels.gpu.ops import TritonOps
from testing import quantised_files as files
from testing.peft_twin import PeftTwin
from tests.engine.test_quantised_base import ADAPTERS, SIZES, logprobs

pytestmark = [pytest.mark.heavy, pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings:UserWarning")]
PROMPTS: dict[str | None, list[int]] = {"r8": list(range(2, 10)), "r16": list(range(100, 109)), None: [5, 8, 13, 21]}
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "channel": ({"quant_method": "compressed-tensors"}, partial(files.fp8, kind="channel")),
    "block": (
        {"quant_method": "fp8", "weight_block_size": [64, 64]}, partial(files.fp8, kind="block", block=(64, 64))
    ),
    "int8": (
        {"quant_method": "compressed-tensors", "format": "int-quantized"}, partial(files.int8, symmetric=True)
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=sorted(CASES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PeftTwin]:
    import transformers

    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZES)).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.15) if parameter.dim() > 1 else parameter.data.uniform_(0.5, 1.5)
    model.save_pretrained(folder / "original")
    meaning = files.write(folder / "original", folder / "w8a8", *CASES[request.param])
    for name, parameter in model.named_parameters():
        parameter.data.copy_(meaning[name])
    model.save_pretrained(folder / "dequantised")
    return folder / "w8a8", PeftTwin(folder / "dequantised", folder / "adapters", ADAPTERS, 0.1)


@pytest.mark.parametrize("backend", ["native", "triton"])
def test_adapters_are_exact_on_a_w8a8_base(
    checkpoint: tuple[Path, PeftTwin], backend: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, where no backend rounds inputs."""
    folder, twin = checkpoint
    case = request.node.callspec.params["checkpoint"]
    if backend == "triton":
        monkeypatch.setattr("engine.build.pick_ops", lambda *_: TritonOps(fp8_products=True))
    host = HostCache(None, BaseShape.from_config_dir(folder), 64 << 20, torch.float32)
    request.addfinalizer(host.close)
    config = EngineConfig(
        model=str(folder), dtype="float32", kv_cache_memory=4 << 20, adapter_memory=16 << 20, max_lora_rank=16
    )
    engine = Engine(config, host)
    request.addfinalizer(engine.close)
    found = logprobs(engine, {name: host.add_path(path) for name, path in twin.paths.items()}, PROMPTS)
    for name, prompt in PROMPTS.items():
        expected = torch.tensor(twin.logprobs(name, prompt))
        torch.testing.assert_close(torch.tensor(found[name]), expected, atol=1e-3, rtol=0)
    weights = engine.runner.decoder.weights
    in_triton, native = {
        "block": ("fp8 with a scale for each output", "dense"),
        "channel": ("fp8 with a scale for each output", "dense"),
        "int8": ("int8 with a scale for each output", "int8 in groups of 32"),
    }[case]
    assert str(weights.layers[0].qkv.scheme) == (in_triton if backend == "triton" else native)
    if backend == "triton":
        assert weights.num_bytes == estimate(config, "h100", ExpectedLoad(1, 8, 16, 16)).memory.needs.weights
