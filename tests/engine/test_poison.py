"""A victim beside an adapter whose weights overflow, as large as an upload may be: its tokens do not change."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from adapters.manifest import BaseShape
from adapters.tiers.host_cache import HostCache
from engine.config import EngineConfig
from engine.engine import Engine
from engine.scheduling.request import NewRequest, RequestOutput, SamplingParams
from kernels.cpu.plain import TorchOps
from kernels.gpu.ops import TritonOps
from testing.engine import outputs_until_idle
from testing.interpreter import repeated
from testing.tiny import save_adapter, save_model

BLOCK_BYTES = 2 * 2 * 2 * 16 * 4 * 16  # keys and values, layers, heads, head_dim, fp32, tokens
VOCAB_SIZE = 382  # of the model of `save_model`
ALL = {
    "self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64), "mlp.gate_proj": (128, 64), "mlp.up_proj": (128, 64), "mlp.down_proj": (64, 128),
    "embed_tokens": (64, VOCAB_SIZE), "lm_head": (VOCAB_SIZE, 64),
}  # fmt: skip
EMBEDDING_HEAD = ["embed_tokens", "lm_head"]
# Rank of the embedding and head, for which an adapter has a quarter of the pages' memory.
EMBEDDING_HEAD_RANK = 4
ATTACKS = ["everything", "values", "embedding-head", "head"]

Make = Callable[..., tuple[Engine, dict[str, str]]]


def save_huge_adapter(folder: Path, largest: float, projections: list[str]) -> None:
    """Write finite weights up to `largest` of mixed signs: products are infinite, and their differences NaN."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(9)
    tensors = {}

    def save(name: str, rows: int, columns: int) -> None:
        tensors[f"base_model.model.{name}"] = torch.randn(rows, columns, generator=generator).sign() * largest

    for name in projections:
        out, inputs = ALL[name]
        if name == "embed_tokens":
            save("model.embed_tokens.lora_embedding_A", EMBEDDING_HEAD_RANK, inputs)
            save("model.embed_tokens.lora_embedding_B", out, EMBEDDING_HEAD_RANK)
            continue
        modules = ["lm_head"] if name == "lm_head" else [f"model.layers.{layer}.{name}" for layer in range(2)]
        rank = EMBEDDING_HEAD_RANK if name == "lm_head" else 16
        for module in modules:
            save(f"{module}.lora_A.weight", rank, inputs)
            save(f"{module}.lora_B.weight", out, rank)
    save_file(tensors, folder / "adapter_model.safetensors")
    config: dict[str, Any] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 16, "lora_alpha": 32}
    config["rank_pattern"] = dict.fromkeys(set(EMBEDDING_HEAD) & set(projections), EMBEDDING_HEAD_RANK)
    targets = sorted(name.split(".")[-1] for name in projections)
    (folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": targets}))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_model(folder / "base", max_model_len=256)
    save_adapter(folder / "victim", rank=12)
    for dtype, largest, steep in (("float32", 1.7e38, 1e17), ("bfloat16", 1.7e38, 1e17), ("float16", 6e4, 1.0)):
        save_huge_adapter(folder / f"everything-{dtype}", largest, list(ALL))
        save_huge_adapter(folder / f"values-{dtype}", largest, ["self_attn.v_proj"])
        save_huge_adapter(folder / f"embedding-head-{dtype}", largest, EMBEDDING_HEAD)
        save_huge_adapter(folder / f"head-{dtype}", largest, ["lm_head"])
        save_huge_adapter(folder / f"steep-head-{dtype}", steep, ["lm_head"])
    return folder


@pytest.fixture
def make_engine(model: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Make:
    def make(ops: type | None, dtype: str, **options: Any) -> tuple[Engine, dict[str, str]]:
        if ops is not None:
            monkeypatch.setattr("engine.build.pick_ops", lambda *_: ops())
        served = getattr(torch, dtype)
        host = HostCache(None, BaseShape.from_config_dir(model / "base"), 8 << 20, served)
        request.addfinalizer(host.close)
        options = {
            "dtype": dtype, "device": "cpu", "max_lora_rank": 16, "max_num_seqs": 4, "max_num_batched_tokens": 32,
            "kv_cache_memory": 14 * BLOCK_BYTES * served.itemsize // 4, "max_model_len": 96, **options,
        }  # fmt: skip
        # Two pages: the victim's adapter takes pages that the attacker's adapter has just freed.
        options.setdefault("adapter_memory", 2 * page_bytes(host, served))
        engine = Engine(EngineConfig(model=str(model / "base"), **options), host)
        request.addfinalizer(engine.close)
        names = {"victim": "victim"} | {kind: f"{kind}-{dtype}" for kind in (*ATTACKS, "steep-head")}
        return engine, {name: host.add_path(model / folder) for name, folder in names.items()}

    def page_bytes(host: HostCache, dtype: torch.dtype) -> int:
        from adapters.tiers.device_pool import AdapterPool

        base = BaseShape.from_config_dir(model / "base")
        pool = AdapterPool(base, host, memory=8 << 20, max_rank=16, dtype=dtype, device=torch.device("cpu"))
        pool.close()
        return pool.page_bytes

    return make


def ask(
    engine: Engine, name: str, adapter: str | None, prompt: int, tenant_id: str, max_tokens: int = 6, **more: Any
) -> None:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **{"temperature": 0.0, **more})
    tokens = [3 + (prompt + 7 * i) % 370 for i in range(prompt)]
    engine.add_request(NewRequest(name, tokens, params, adapter_digest=adapter, tenant_id=tenant_id))


def step(engine: Engine, said: dict[str, list[RequestOutput]]) -> None:
    for output in engine.step():
        said.setdefault(output.request_id, []).append(output)


def run(engine: Engine, said: dict[str, list[RequestOutput]]) -> None:
    for output in outputs_until_idle(engine):
        said.setdefault(output.request_id, []).append(output)


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


BACKENDS = [
    (None, "float32"), (None, "bfloat16"), (TorchOps, "float32"), (TorchOps, "float16"), (TorchOps, "bfloat16"),
    repeated(TritonOps, "float32"), pytest.param(TritonOps, "float16", marks=pytest.mark.heavy),
]  # fmt: skip


@pytest.mark.parametrize(
    ("ops", "dtype"), BACKENDS, ids=lambda p: p if isinstance(p, str) else getattr(p, "__name__", "native")
)
@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_victims_tokens_beside_an_overflowing_adapter(
    ops: type | None, dtype: str, attack: str, async_scheduling: bool, make_engine: Make
) -> None:
    """Victims of the base model and of an adapter run before, beside and after the attacker, in its blocks and pages.

    The attacker's own requests end with an error that blames the adapter, and the engine continues.
    """
    if ops is TritonOps and (async_scheduling or attack != "everything"):
        pytest.skip("half a minute each in the interpreter; the other backends run it")
    engine, digests = make_engine(ops, dtype, async_scheduling=async_scheduling)
    prompt, max_tokens, attacks = (5, 2, (9,)) if ops is TritonOps else (21, 6, (40, 19))
    victims = {"base": None, "adapter": digests["victim"]}
    expected = {}
    for name, adapter in victims.items():
        alone: dict[str, list[RequestOutput]] = {}
        ask(engine, name, adapter, prompt, "victim", max_tokens)
        run(engine, alone)
        expected[name] = tokens(alone[name])
    # The attacker's adapter is loaded before, so that its requests share batches with the victims.
    ask(engine, "loads", digests[attack], 3, "attacker", 1)
    run(engine, {})
    assert engine.adapter_ready(digests[attack])
    said: dict[str, list[RequestOutput]] = {}
    ask(engine, "base", None, prompt, "v1", max_tokens)
    step(engine, said)
    for i, length in enumerate(attacks):
        ask(engine, f"attack-{i}", digests[attack], length, "attacker", temperature=float(i), logprobs=2)
    step(engine, said)
    step(engine, said)
    ask(engine, "adapter", digests["victim"], prompt, "v2", max_tokens)
    ask(engine, "base-again", None, prompt, "v3", max_tokens)
    run(engine, said)
    assert tokens(said["base"]) == tokens(said["base-again"]) == expected["base"]
    assert tokens(said["adapter"]) == expected["adapter"]
    for i in range(len(attacks)):
        last = said[f"attack-{i}"][-1]
        assert last.finish_reason == "error"
        assert last.error_param == "model"
        assert "too large" in str(last.error)
    assert engine.state().num_free_blocks == engine.state().num_blocks


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_finite_scores_that_overflow_at_a_low_temperature_are_drawn_from(dtype: str, make_engine: Make) -> None:
    """An exception of the sampler would end the engine with all tenants' requests."""
    engine, digests = make_engine(None, dtype)
    cuts: list[dict[str, Any]] = [{}, {"min_p": 0.1}, {"top_p": 0.5, "top_k": 3}]
    for number, params in enumerate(cuts):
        ask(engine, f"attack-{number}", digests["steep-head"], 5, "attacker", temperature=0.001, **params)
    ask(engine, "base", None, 5, "victim")
    said: dict[str, list[RequestOutput]] = {}
    run(engine, said)
    assert {name: outputs[-1].finish_reason for name, outputs in said.items()} == dict.fromkeys(said, "length")
    assert [len(tokens(outputs)) for outputs in said.values()] == [6] * (len(cuts) + 1)


def test_the_base_models_own_overflow_is_not_the_requests_fault(make_engine: Make) -> None:
    engine, _ = make_engine(TorchOps, "float32")
    engine.runner.decoder.weights.norm.fill_(torch.nan)
    said: dict[str, list[RequestOutput]] = {}
    ask(engine, "x", None, 5, "a", logprobs=1)
    run(engine, said)
    assert said["x"][-1].finish_reason == "error"
    assert said["x"][-1].error_param is None
    assert not tokens(said["x"])
