"""Estimates of engines, compared with engines that were built, and those for described GPUs."""

import json
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
from click.testing import CliRunner

from adapters.manifest import BaseShape
from adapters.tiers.host_cache import HostCache
from engine.build import resolve_dtypes
from engine.config import EngineConfig
from engine.engine import Engine
from engine.execution.runner import Runner
from engine.gpus import GPUS
from engine.model.config import read_config
from engine.model.families import parse_model_config
from engine.scheduling.plan import Plan
from engine.sizing import Estimate, describe_decoder, estimate
from engine.sizing_speed import (
    HOST_SECONDS,
    PAGES_REACHED,
    REACHED_GPU,
    ExpectedLoad,
    Step,
    StepTime,
    Throughput,
    steady_throughput,
)
from engine.sizing_steps import MeasuredSteps, Sizes
from engine.step_log import StepWork
from kernels.platform import pick_ops, platform_of
from kernels.roofline import Roofline
from loraplex.cli import main
from loraplex.models import ensure_demo_model
from testing import quantised_files as files
from testing.stack import CACHE
from testing.tiny import save_model

# A single stream: the fewest steps whose times are measured.
LOAD = ExpectedLoad(adapters=64, rank=16, prompt_tokens=64, output_tokens=32, streams=1)
# The first test that needs the demo model may fetch and convert it; the end-to-end tests have as long.
FETCH_SECONDS = 420
# The shape of Llama-3.1-8B.
EIGHT_BILLION = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_model(folder)
    return folder


@pytest.fixture(scope="module")
def smollm(takes_a_core: None) -> Path:
    """Return the demo model's folder: 135 million weights in bf16, with a tied embedding."""
    return ensure_demo_model(CACHE / "models", print)


@pytest.fixture
def eight_billion(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(EIGHT_BILLION))
    return tmp_path


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure no step: a test of the memory needs no times, which take 7 s of computing for each estimate."""
    monkeypatch.setattr(MeasuredSteps, "seconds", lambda _, sizes: 0.01)


def build(config: EngineConfig, request: pytest.FixtureRequest) -> Engine:
    host = HostCache(None, BaseShape.from_config_dir(config.model), 1 << 20, torch.bfloat16)
    request.addfinalizer(host.close)
    engine = Engine(config, host)
    request.addfinalizer(engine.close)
    return engine


@pytest.mark.timeout(FETCH_SECONDS)
@pytest.mark.parametrize(
    ("model", "quantization"),
    [("tiny", "auto"), ("tiny", "int8"), ("tiny", "int4"), ("smollm", "auto"), ("smollm", "int8")],
)
def test_an_engine_on_the_cpu_has_exactly_the_estimated_memory(
    model: str, quantization: str, request: pytest.FixtureRequest, unmeasured: None
) -> None:
    path = request.getfixturevalue(model)
    options: dict[str, Any] = {"quantization": quantization, "adapter_memory": 64 << 20, "kv_cache_memory": 64 << 20}
    config = EngineConfig(model=str(path), device="cpu", **options)
    found = estimate(config, None, LOAD).memory
    engine = build(config, request)
    assert found.needs.weights == engine.runner.decoder.weights.num_bytes
    assert (found.kv_tokens, found.context) == (engine.scheduler.cache.num_blocks * 16, engine.max_model_len)
    assert (found.num_pages, found.page_bytes) == (engine.adapters.num_pages, engine.adapters.page_bytes)
    kv = sum(part.nbytes for cache in engine.runner.decoder.kv for part in (cache.k, cache.v))
    assert found.kv_cache == kv


def estimated_and_built_tokens(model: str) -> tuple[int, int]:
    """Return the estimated and the built size of the KV cache, in tokens, of an engine that measures its memory."""
    config = EngineConfig(
        model=model,
        device="cpu",
        gpu_memory_utilization=(3 << 30) / platform_of(torch.device("cpu")).total_memory(),
        adapter_memory=256 << 20,
        max_num_seqs=16,
        max_num_batched_tokens=128,
    )
    with patch.object(MeasuredSteps, "seconds", return_value=0.01):  # in another process than the fixture `unmeasured`
        found = estimate(config, None, LOAD).memory
    host = HostCache(None, BaseShape.from_config_dir(model), 1 << 20, torch.bfloat16)
    try:
        engine = Engine(config, host)
        built = engine.scheduler.cache.num_blocks * 16
        engine.close()
    finally:
        host.close()
    return found.kv_tokens, built


@pytest.mark.timeout(FETCH_SECONDS)
def test_an_engine_that_measures_its_memory_finds_the_estimate_within_a_tenth(smollm: Path) -> None:
    # Both count the memory of their process, which is new here: one that has freed memory grows by less.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        estimated, built = process.submit(estimated_and_built_tokens, str(smollm)).result()
    assert estimated == pytest.approx(built, rel=0.1)


def test_a_gpus_memory_is_divided_as_an_engine_divides_it(eight_billion: Path) -> None:
    def sizes(gpu: str, **options: Any) -> Estimate:
        config = EngineConfig(model=str(eight_billion), max_model_len=8192, **options)
        return estimate(config, gpu, ExpectedLoad(500, 16, 512, 256))

    h100, h200 = sizes("h100"), sizes("h200")
    dense = h100.memory.needs.weights
    # 8.03 billion weights of 2 bytes, and the table of the rotary embedding.
    assert dense == pytest.approx(2 * 8.03e9, rel=0.01)
    assert h100.memory.usable == int(0.9 * GPUS["h100"].memory)
    assert h100.memory.needs.total + h100.memory.kv_cache == pytest.approx(h100.memory.usable, rel=0.001)
    # 84 MB an adapter of rank 16 (docs/lab-notes.md): 102 of them in the 8 GiB of pages.
    assert h100.memory.resident == (8 << 30) // (2 * h100.memory.page_bytes)
    assert h100.memory.resident * 84e6 == pytest.approx(8 << 30, rel=0.02)
    assert h200.memory.kv_tokens > h100.memory.kv_tokens
    assert h200.throughput.tokens_per_second > h100.throughput.tokens_per_second
    eight_bits, four_bits = (sizes("h100", quantization=kind).memory.needs.weights for kind in ("int8", "int4"))
    assert eight_bits / dense == pytest.approx(0.53, abs=0.01)
    assert four_bits / dense == pytest.approx(0.31, abs=0.01)


def test_a_gpu_keeps_fp8_weights_in_a_byte_each(tiny: Path, tmp_path: Path) -> None:
    files.write(tiny, tmp_path / "fp8", {"quant_method": "fbgemm_fp8"}, partial(files.fp8, kind="channel"))

    def weights(gpu: str, quantization: Literal["auto", "none"]) -> int:
        config = EngineConfig(model=str(tmp_path / "fp8"), dtype="bfloat16", quantization=quantization)
        return estimate(config, gpu, LOAD).memory.needs.weights

    model = parse_model_config(read_config(tiny))
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    elements = model.hidden_size * (2 * q + 2 * kv + 3 * model.intermediate_size) * model.num_layers
    outputs = (q + 2 * kv + 2 * model.hidden_size + 2 * model.intermediate_size) * model.num_layers
    for gpu in ("h100", "a100-40gb"):
        # A byte a weight instead of two, and a scale of four bytes for each output.
        assert weights(gpu, "none") - weights(gpu, "auto") == elements - 4 * outputs


WORK = StepWork(layer_elements=1000, head_elements=100, weight_bytes=2200, kv_bytes=0)
MODEL = parse_model_config(
    EIGHT_BILLION | {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
)


def speed(streams: int, load: ExpectedLoad, measured: Callable[[Sizes], float] | None) -> Throughput:
    return steady_throughput(StepTime(WORK, MODEL, Roofline(1e6, 1e9), measured), load, streams, 0, 0.0, stretch=2.0)


def test_a_lone_stream_waits_for_its_prompts() -> None:
    """A mean of the rows would hide the prompts: a step with one takes four times as long."""
    found = speed(
        1, ExpectedLoad(0, 1, prompt_tokens=41, output_tokens=10), lambda sizes: 4.0 if sizes.prompts else 1.0
    )
    prompt, decode = 4.0 + HOST_SECONDS, 1.0 + HOST_SECONDS
    assert found.first_token_seconds == pytest.approx(prompt)
    assert found.tokens_per_second == pytest.approx(10 / (prompt + 9 * decode))


def test_many_streams_have_prompts_in_each_step() -> None:
    measured = list[Sizes]()

    def one_second(sizes: Sizes) -> float:
        measured.append(sizes)
        return 1.0

    found = speed(30, ExpectedLoad(0, 1, prompt_tokens=6, output_tokens=20), one_second)
    # Each request has 16 tokens on average. A request and a half begin in a step.
    assert Sizes(16, 28, (6, 3)) in measured
    assert found.step_seconds == pytest.approx(1 + HOST_SECONDS)
    assert found.tokens_per_second == pytest.approx(30 / found.step_seconds)


def test_a_prompt_beside_streams_is_computed_in_chunks() -> None:
    """Each 10 tokens take as long as a step without prompts, and a step may take twice as long as that one."""
    load = ExpectedLoad(0, 1, prompt_tokens=40, output_tokens=100)
    found = speed(10, load, lambda sizes: 1.0 + 0.1 * sum(sizes.prompts))
    # A prompt begins in every tenth step, so four of ten steps have a chunk.
    assert found.step_seconds == pytest.approx(0.4 * 2 + 0.6 * 1 + HOST_SECONDS, rel=0.01)
    # Three of a request's four chunks have no output.
    assert found.tokens_per_second == pytest.approx(10 * 100 / 103 / found.step_seconds, rel=0.01)
    # Prompts that arrive faster fill each step.
    found = speed(50, load, lambda sizes: 1.0 + 0.1 * sum(sizes.prompts))
    assert found.step_seconds == pytest.approx(1 + 0.1 * 20 + HOST_SECONDS, rel=0.01)


def test_a_step_reads_its_adapters() -> None:
    time = StepTime(WORK, MODEL, Roofline(1e6, 1e9), lambda _: 1.0)
    with_adapters = time.seconds(Step(2, 10, adapter_bytes=4e6))
    assert with_adapters - time.seconds(Step(2, 10)) == pytest.approx(4 / PAGES_REACHED)


def test_a_gpus_step_takes_its_bound_over_its_share() -> None:
    found = speed(1, ExpectedLoad(0, 1, prompt_tokens=1, output_tokens=10), None)
    assert found.bound_seconds == pytest.approx(2200 / 1e6)
    assert found.step_seconds == pytest.approx(found.bound_seconds / REACHED_GPU)


def steps_of(model: Path, quantization: Literal["auto", "int8", "int4"], most_tokens: int) -> MeasuredSteps:
    config = EngineConfig(model=str(model), device="cpu", quantization=quantization)
    raw = read_config(model)
    parsed = parse_model_config(raw)
    dtype, kv_dtype, lora_dtype = resolve_dtypes(config, parsed)
    ops = pick_ops(torch.device("cpu"), dtype, parsed.head_dim, config.block_size, kv_dtype, lora_dtype)
    return MeasuredSteps(describe_decoder(config, raw, parsed, ops, 64), config.block_size, most_tokens, kv_dtype)


@pytest.mark.parametrize("quantization", ["auto", "int8", "int4"])
def test_measured_steps_compute_all_rows_and_no_step_is_larger_than_the_engines(
    tiny: Path, quantization: Literal["auto", "int8", "int4"], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, planned = Runner.forward, list[list[int]]()

    def record(runner: Runner, plan: Plan) -> Any:
        planned.append(list(plan.values()))
        launched = forward(runner, plan)
        assert launched.layout.num_tokens == sum(plan.values())
        return launched

    monkeypatch.setattr(Runner, "forward", record)
    assert steps_of(tiny, quantization, 16).seconds(Sizes(20, 3, (25, 4))) > 0
    steps = [[1, 1, 1, 13], [12, 4]]
    assert planned == steps * (len(planned) // 2)


def test_further_layers_take_as_long_as_the_measured_ones(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head of 5 s, and layers of 2 s, of which three are measured."""
    monkeypatch.setattr(MeasuredSteps, "_median", lambda _, num_layers, sizes: 5.0 + 2.0 * num_layers)
    steps = steps_of(tiny, "auto", 16)
    for measured in (3, 2):
        monkeypatch.setattr(steps, "_num_layers", 40)
        monkeypatch.setattr(steps, "_most", measured)
        assert steps.seconds(Sizes(20, 3, (4,))) == pytest.approx(85.0)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--gpu", "l4", "--gpu-memory-utilization", "0.65"],
            "--gpu-memory-utilization: the model does not fit: 0.65 of this L4's 23034 MiB",
        ),
        (["--gpu", "h100", "--rank", "128"], "--rank: expected at most 64 (--max-lora-rank), got 128"),
        (
            ["--gpu", "h100", "--prompt-tokens", "8000", "--output-tokens", "200", "--max-model-len", "8192"],
            "--prompt-tokens: a request has 8200 tokens with its output; at most 8192 fit",
        ),
        (["--device", "simulated:1,1"], "--device: expected auto, cpu or cuda, or a --gpu"),
    ],
)
def test_what_cannot_be_served_is_one_line(eight_billion: Path, flags: list[str], message: str) -> None:
    found = CliRunner().invoke(main, ["size", "--model", str(eight_billion), *flags])
    assert found.exit_code == 1
    assert message in found.output


def test_an_unknown_gpu_is_a_wrong_command_line(eight_billion: Path) -> None:
    found = CliRunner().invoke(main, ["size", "--model", str(eight_billion), "--gpu", "h900"])
    assert found.exit_code == 2
    assert "--gpu: expected one of a10, a100-40gb" in found.output
    assert len(found.output.strip().splitlines()) == 1


def test_a_quantised_model_without_weights_is_one_line(eight_billion: Path) -> None:
    config = EIGHT_BILLION | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}}
    (eight_billion / "config.json").write_text(json.dumps(config))
    found = CliRunner().invoke(main, ["size", "--model", str(eight_billion), "--gpu", "h100"])
    assert "its weights" in found.output
    assert found.exit_code == 1


def test_the_command_prints_every_size(eight_billion: Path) -> None:
    flags = ["size", "--model", str(eight_billion), "--gpu", "h100", "--streams", "64"]
    found = CliRunner().invoke(main, flags)
    assert found.exit_code == 0, found.output
    for part in ("weights", "adapters", "activations", "CUDA graphs", "KV cache", "64 streams of 512 + 256 tokens"):
        assert part in found.output
    as_json = json.loads(CliRunner().invoke(main, [*flags, "--json"]).output)
    assert as_json["streams"] == 64
    assert as_json["step_seconds"] > as_json["bound_seconds"] > 0
