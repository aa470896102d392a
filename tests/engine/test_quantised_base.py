"""Engines with weights of 8 and 4 bits against transformers + peft on the dequantised weights."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.manifest import BaseShape
from adapters.tiers.host_cache import HostCache
from engine.config import EngineConfig
from engine.engine import Engine
from engine.scheduling.request import NewRequest, SamplingParams
from engine.scheduling.token_rules import AllowedTokens, BannedWords
from engine.speculative_config import SpeculativeConfig
from kernels import reference
from kernels.cpu.plain import TorchOps
from kernels.gpu.ops import TritonOps
from kernels.weights import round_to_int4, round_to_int8
from testing.engine import outputs_until_idle
from testing.peft_twin import PeftTwin
from wire.errors import ConfigError

pytestmark = [pytest.mark.heavy, pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings:UserWarning")]
SIZES: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "eos_token_id": 1, "bos_token_id": 0,
    "pad_token_id": None,
}  # fmt: skip
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "r8": {"r": 8, "lora_alpha": 16, "target_modules": PROJECTIONS},
    "r16": {"r": 16, "lora_alpha": 16, "target_modules": ["k_proj", "down_proj", "lm_head"]},
}
PROMPTS: dict[str | None, list[int]] = {
    "r8": list(range(2, 42)),
    "r16": list(range(100, 109)),
    None: list(range(5, 100, 3)),
}


@dataclass
class Case:
    """An unquantised folder, its quantization, and peft on the weights that the engine should have in memory."""

    folder: Path
    quantization: str
    twin: PeftTwin


@pytest.fixture(scope="module", params=["int8", "int4", "int8 untied"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    import transformers

    quantization, _, untied = request.param.partition(" ")
    folder = tmp_path_factory.mktemp(quantization)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=not untied)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.15) if parameter.dim() > 1 else parameter.data.uniform_(0.5, 1.5)
    model.save_pretrained(folder / "original")
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            is_layers = name.startswith("model.layers.")
            rounded = (round_to_int4 if quantization == "int4" and is_layers else round_to_int8)(parameter.data)
            parameter.data.copy_(reference.dequantize(rounded))
    model.save_pretrained(folder / "dequantised")
    return Case(folder / "original", quantization, PeftTwin(folder / "dequantised", folder / "adapters", ADAPTERS, 0.1))


@pytest.fixture
def make_engine(case: Case, request: pytest.FixtureRequest) -> Any:
    def make(**options: Any) -> tuple[Engine, dict[str, str]]:
        options = {"dtype": "float32", "quantization": case.quantization, **options}
        host = HostCache(None, BaseShape.from_config_dir(case.folder), 64 << 20, getattr(torch, options["dtype"]))
        request.addfinalizer(host.close)
        options = {"model": str(case.folder), "kv_cache_memory": 4 << 20, **options}
        config = EngineConfig(adapter_memory=16 << 20, max_lora_rank=16, **options)
        engine = Engine(config, host)
        request.addfinalizer(engine.close)
        return engine, {name: host.add_path(path) for name, path in case.twin.paths.items()}

    return make


def logprobs(
    engine: Engine, digests: dict[str, str], prompts: dict[str | None, list[int]] = PROMPTS
) -> dict[str | None, list[float]]:
    """Return the log-probabilities of each prompt's tokens after its first, of all prompts in one batch."""
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, prompt_logprobs=0)
    for name, prompt in prompts.items():
        engine.add_request(NewRequest(str(name), prompt, params, adapter_digest=digests[name] if name else None))
    found: dict[str | None, list[float]] = {name: [] for name in prompts}
    for output in outputs_until_idle(engine):
        assert output.error is None
        name = None if output.request_id == "None" else output.request_id
        found[name] += [entry.logprob for entry in output.prompt_logprobs or [] if entry is not None]
    return found


@pytest.fixture(params=["native", "torch", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param != "native":
        ops = {"torch": TorchOps, "triton": TritonOps}[request.param]
        monkeypatch.setattr("engine.build.pick_ops", lambda *_: ops())
    return request.param


def test_adapters_are_exact_on_a_quantised_base(case: Case, make_engine: Any, backend: str) -> None:
    engine, digests = make_engine()
    found = logprobs(engine, digests)
    plain, _ = make_engine(quantization="none")
    unquantised = logprobs(plain, digests)
    for name, prompt in PROMPTS.items():
        expected = torch.tensor(case.twin.logprobs(name, prompt))
        torch.testing.assert_close(torch.tensor(found[name]), expected, atol=1e-3, rtol=0)
        assert (torch.tensor(unquantised[name]) - expected).abs().max() > 1e-2, "nothing was quantised"


def test_the_fused_step_equals_the_same_step_op_by_op(case: Case, make_engine: Any) -> None:
    for dtype in ("float32", "bfloat16"):
        engine, digests = make_engine(dtype=dtype)
        fused = logprobs(engine, digests)
        engine, digests = make_engine(dtype=dtype)
        engine.runner.decoder.forward = engine.runner.decoder.forward_by_ops
        by_ops = logprobs(engine, digests)
        for name in PROMPTS:
            torch.testing.assert_close(torch.tensor(fused[name]), torch.tensor(by_ops[name]), atol=2e-2, rtol=0)


def test_in_bf16_answers_stay_close(case: Case, make_engine: Any) -> None:
    engine, digests = make_engine(dtype="bfloat16")
    found = logprobs(engine, digests)
    for name, prompt in PROMPTS.items():
        expected = torch.tensor(case.twin.logprobs(name, prompt))
        assert (torch.tensor(found[name]) - expected).abs().mean() < 0.1


def test_a_tied_embedding_is_in_memory_once(case: Case, make_engine: Any) -> None:
    engine, _ = make_engine(dtype="bfloat16")
    weights = engine.runner.decoder.weights
    tied = case.twin.model.config.tie_word_embeddings
    assert (weights.embedding is weights.lm_head) == tied
    assert weights.lm_head.scheme.kind == "int8"
    assert weights.layers[0].down.scheme.kind == case.quantization
    bits = {"int8": 8.5, "int4": 4.5}[case.quantization]
    assert weights.layers[0].qkv.num_bytes == 128 * 64 * bits / 8


def test_another_quantization_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="quantization: expected one of auto, none, int8, int4, got 'int5'"):
        EngineConfig(model="m", quantization="int5")  # type: ignore[arg-type]


# Sampling of a request each; all of them run in one batch.
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0, "seed": 1, "top_k": 20, "min_p": 0.01},
    {"temperature": 1.3, "seed": 2, "top_p": 0.9, "logprobs": 0},
    {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    {"temperature": 0.0, "repetition_penalty": 1.2, "logit_bias": {7: 4.0, 9: -20.0}, "logprobs": 1},
    {
        "temperature": 1.0,
        "seed": 4,
        "allowed": AllowedTokens(range(20, 90)),
        "bad_words": BannedWords([[21], [30, 31]]),
    },
    {"temperature": 1.0, "seed": 5, "stop_token_ids": tuple(range(0, 160, 5)), "min_tokens": 6, "ignore_eos": False},
    {"temperature": 1.0, "seed": 6, "prompt_logprobs": 1},
]


def answers(engine: Engine, digests: dict[str, str]) -> dict[str, tuple[list[int], list[float], str | None]]:
    """Return the tokens, log-probabilities and reason to finish of requests with each sampling and adapter."""
    found: dict[str, tuple[list[int], list[float], str | None]] = {}
    for number, params in enumerate(SAMPLINGS):
        for name, prompt in PROMPTS.items():
            sampling = SamplingParams(**{"max_tokens": 12, "ignore_eos": True, **params})
            digest = digests[name] if name else None
            engine.add_request(NewRequest(f"{number} {name}", prompt, sampling, adapter_digest=digest))
    for output in outputs_until_idle(engine):
        assert output.error is None
        tokens, scores, _ = found.get(output.request_id, ([], [], None))
        entries = [*(output.prompt_logprobs or []), *(output.logprobs or [])]
        scores += [score for entry in entries if entry for score in (entry.logprob, *entry.top_logprobs)]
        found[output.request_id] = tokens + output.token_ids, scores, output.finish_reason
    return found


def test_every_sampling_feature_answers_as_on_the_dequantised_weights(case: Case, make_engine: Any) -> None:
    expected = answers(*make_engine(model=str(case.folder.parent / "dequantised"), quantization="none"))
    for options in ({}, {"speculative_config": SpeculativeConfig("ngram", 3, prompt_lookup_min=1)}):
        found = answers(*make_engine(**options))
        for request_id, (tokens, scores, reason) in expected.items():
            assert (found[request_id][0], found[request_id][2]) == (tokens, reason), request_id
            torch.testing.assert_close(torch.tensor(found[request_id][1]), torch.tensor(scores), atol=1e-3, rtol=0)
    assert {reason for _, _, reason in expected.values()} == {"stop", "length"}
    unquantised = answers(*make_engine(quantization="none"))
    assert sum(unquantised[key][0] == tokens for key, (tokens, _, _) in expected.items()) < len(expected) / 2
