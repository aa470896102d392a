"""Every family's steps, with keys and weights of 8 bits too, as recorded graphs: their replays equal eager steps.

A replay repeats recorded work and runs no Python of the step, and no recorded operation waits for the device. Steps of
more than 8 tokens build LoRA's lists by sorting, as those of more than 1,024 tokens do on a GPU.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adapters.manifest import BaseShape
from adapters.tiers.host_cache import HostCache
from engine.config import EngineConfig
from engine.engine import Engine
from engine.execution import graphs as graphs_module
from engine.execution.layout import Layout, make_batch
from engine.scheduling.request import NewRequest, SamplingParams
from kernels.cpu.plain import TorchOps
from kernels.gpu.ops import TritonOps
from kernels.platform import platform_of
from testing import quantised_files
from testing.engine import outputs_until_idle
from testing.families import save_family
from testing.recorded_graph import NothingWaits, RecordingPlatform
from testing.tiny import save_adapter

pytestmark = [
    pytest.mark.heavy,
    # Padding rows hold whatever memory held; no other row reads them, but the interpreter computes them with numpy.
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        # The plain llama is in test_graphs.py.
        pytest.param("qwen2", {}, marks=pytest.mark.slow),
        pytest.param("qwen3", {}, marks=pytest.mark.slow),
        ("gemma2", {}),
        pytest.param("gemma3_text", {}, marks=pytest.mark.slow),
        pytest.param("llama", {"kv_cache_dtype": "int8", "lora_dtype": "fp8_e4m3"}, marks=pytest.mark.slow),
        pytest.param("llama", {"kv_cache_dtype": "fp8_e4m3", "lora_dtype": "int8"}, marks=pytest.mark.slow),
        pytest.param("llama", {"quant_method": "fp8"}, marks=pytest.mark.slow),
    ],
)
def test_replays_equal_eager_steps(
    family: str,
    options: dict[str, Any],
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(graphs_module, "platform_of", lambda device: RecordingPlatform(platform_of(device)))
    monkeypatch.setattr("engine.build.pick_ops", lambda *_: TritonOps())
    monkeypatch.setattr("engine.build.resolve_graph_sizes", lambda *_: (2,))
    monkeypatch.setattr("engine.build.default_token_sizes", lambda _: (20,))
    monkeypatch.setattr("kernels.gpu.segments.MAX_ROUTED", 8)
    save_family(tmp_path / "base", family)
    options, model = options.copy(), tmp_path / "base"
    if options.pop("quant_method", None):
        model = tmp_path / "quantised"
        written = partial(quantised_files.fp8, kind="channel")
        quantised_files.write(tmp_path / "base", model, {"quant_method": "fp8"}, written)
    host = HostCache(None, BaseShape.from_config_dir(model), 1 << 24, torch.float32)
    request.addfinalizer(host.close)
    config = EngineConfig(
        model=str(model), dtype="float32", device="cpu", max_lora_rank=8, adapter_memory=4 << 20, max_num_seqs=2,
        kv_cache_memory=1 << 20, max_num_batched_tokens=20, max_model_len=128, **options,
    )  # fmt: skip
    engine = Engine(config, host)
    request.addfinalizer(engine.close)
    runner, kinds = engine.runner, Counter[tuple[bool, bool]]()
    assert runner.graphs is not None
    replay, ops = runner.graphs.run, runner.decoder.ops
    # Values of 8 bits are rounded by the kernels, so the eager steps use the same.
    twin = TorchOps() if model.name == "base" and not options else TritonOps()

    def compare(layout: Layout) -> Tensor | None:
        batch = make_batch(layout, 16, runner._last_tokens, engine.adapters)
        logits = replay(layout)
        assert logits is not None, "a step left its graph"
        runner.decoder.ops = twin
        torch.testing.assert_close(logits, runner.decoder.forward_by_ops(batch), atol=1e-4, rtol=1e-4)
        runner.decoder.ops = ops
        kinds[layout.num_tokens == len(layout.seats), bool(layout.adapter_slots)] += 1
        return logits

    monkeypatch.setattr(runner.graphs, "run", compare)
    save_adapter(tmp_path / "adapter", rank=5, outputs=64)
    digest = host.add_path(tmp_path / "adapter")
    params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
    for adapter in (None, digest):
        for i, length in enumerate((3, 17)):
            prompt = [2 + 7 * i + j for j in range(length)]
            engine.add_request(NewRequest(f"{adapter} {i}", prompt, params, adapter_digest=adapter if i % 2 else None))
            engine.step()
        assert not any(output.error for output in outputs_until_idle(engine))
    assert len(kinds) == 4, "decodes and prompts, with and without an adapter"


@pytest.mark.parametrize(
    "read",
    [
        int,
        bool,
        float,
        lambda x: x.item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.numpy(),
        lambda x: x.to("cpu"),
        lambda x: x.to(device=torch.device("cpu"), dtype=torch.float64),
        torch.nonzero,
        lambda x: x[x > 0],
    ],
)
def test_a_read_of_a_value_counts_as_a_wait(read: Callable[[Tensor], object]) -> None:
    """In inference mode too, in which the engine captures."""
    value = torch.ones(1)
    with torch.inference_mode(), pytest.raises(AssertionError, match="waits"), NothingWaits():
        read(value)
    read(value)
