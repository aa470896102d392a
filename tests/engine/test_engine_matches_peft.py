"""The engine against transformers + peft, its slow twin: same weights, same adapters, greedy, fp32."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from adapters.manifest import BaseShape
from adapters.tiers.host_cache import HostCache
from engine.config import EngineConfig
from engine.engine import Engine
from engine.scheduling.request import NewRequest, SamplingParams
from kernels.cpu.plain import TorchOps
from kernels.platform import pick_ops
from testing.engine import outputs_until_idle
from testing.tiny import TEMPLATE, save_model

pytestmark = pytest.mark.heavy
SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": None,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True},
    "llama-untied-bias": {
        "model_type": "llama", "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True
    },
    "llama3-rope": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
    },
    "llama-linear-rope": {
        "model_type": "llama", "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    },
    "llama-yarn-rope": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64
        },
    },
    "mistral-window": {"model_type": "mistral", "sliding_window": 12},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    # Caps low enough to change the answers; heads wider than hidden_size / num_attention_heads, as in the real models.
    "gemma2": {
        "model_type": "gemma2", "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 12,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 6.0,
    },
    "gemma3": {
        "model_type": "gemma3_text", "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
}  # fmt: skip

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "r4": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "r8-rslora": {"r": 8, "lora_alpha": 16, "use_rslora": True, "target_modules": ALL},
    "r16-mlp": {"r": 16, "lora_alpha": 16, "target_modules": ["gate_proj", "down_proj"]},
    "r32-rslora": {"r": 32, "lora_alpha": 32, "use_rslora": True, "target_modules": ["k_proj", "o_proj", "up_proj"]},
    "r64-patterns": {
        "r": 64, "lora_alpha": 64, "target_modules": ALL, "rank_pattern": {"q_proj": 5, "layers.2.mlp.up_proj": 12},
        "alpha_pattern": {"o_proj": 96}, "layers_to_transform": [0, 2],
    },
}  # fmt: skip


@dataclass
class Twin:
    """A model folder and its adapters, with peft's answers."""

    folder: Path
    adapters: dict[str, Path]
    model: Any = field(repr=False)

    def logits(self, adapter: str | None, token_ids: list[int]) -> torch.Tensor:
        """Return logits `[len(token_ids), vocab]`."""
        ids = torch.tensor([token_ids])
        with torch.no_grad():
            if adapter is None:
                with self.model.disable_adapter():
                    return self.model(ids).logits[0]
            self.model.set_adapter(adapter)
            return self.model(ids).logits[0]

    def greedy_along(self, adapter: str | None, prompt: list[int], answer: list[int]) -> list[int]:
        """Return the greedy token at each position of `answer`, in one pass: equal to it if all of it is greedy."""
        return self.logits(adapter, prompt + answer[:-1])[len(prompt) - 1 :].argmax(-1).tolist()


def make_twin(folder: Path, family: str) -> Twin:
    import transformers
    from peft import LoraConfig, get_peft_model  # takes 5 s, so it is not imported at collection

    options = {**SIZES, **FAMILIES[family]}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(options.pop("model_type"), **options)
    ).eval()
    for parameter in model.parameters():  # the default init is so small that every adapter would look alike
        parameter.data.normal_(0, 0.15) if parameter.dim() > 1 else parameter.data.uniform_(0.5, 1.5)
    model.save_pretrained(folder / "base")
    paths: dict[str, Path] = {}
    peft_model: Any = None
    for name, fields in ADAPTERS.items():
        config = LoraConfig(**fields, task_type="CAUSAL_LM")
        if peft_model is None:
            peft_model = get_peft_model(model, config, adapter_name=name)
        else:
            peft_model.add_adapter(name, config)
        for key, parameter in peft_model.named_parameters():
            if f".{name}." in key and "lora_" in key:
                parameter.data.normal_(0, 0.1)
    assert peft_model is not None
    peft_model.save_pretrained(folder / "adapters")
    for name in ADAPTERS:
        paths[name] = folder / "adapters" / name
    return Twin(folder / "base", paths, peft_model.eval())


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return make_twin(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return make_twin(tmp_path_factory.mktemp("llama"), "llama")


Make = Callable[..., tuple[Engine, dict[str, str]]]


@pytest.fixture
def make_engine(request: pytest.FixtureRequest) -> Make:
    """Return a factory of engines on a twin's folder, and the digests of its adapters by name."""

    def make(twin: Twin, **options: Any) -> tuple[Engine, dict[str, str]]:
        dtype = getattr(torch, options.get("dtype", "float32"))
        host = HostCache(None, BaseShape.from_config_dir(twin.folder), 64 << 20, dtype)
        request.addfinalizer(host.close)
        options = {
            "dtype": "float32",
            "max_num_seqs": 16,
            "kv_cache_memory": 4 << 20,
            "adapter_memory": 32 << 20,
            **options,
        }
        engine = Engine(EngineConfig(model=str(twin.folder), **options), host)
        request.addfinalizer(engine.close)
        return engine, {name: host.add_path(path) for name, path in twin.adapters.items()}

    return make


def prompts() -> list[tuple[str | None, list[int]]]:
    rng = torch.Generator().manual_seed(7)
    wanted: list[str | None] = [None, *ADAPTERS, None, "r64-patterns", "r4"]
    lengths = [5, 17, 1, 33, 40, 16, 3, 21, 8]
    return [
        (name, torch.randint(2, 160, (n,), generator=rng).tolist()) for name, n in zip(wanted, lengths, strict=True)
    ]


def run(engine: Engine, digests: dict[str, str], n: int, **params: Any) -> list[list[int]]:
    work = prompts()
    for i, (name, prompt) in enumerate(work):
        engine.add_request(NewRequest(
            str(i), prompt, SamplingParams(max_tokens=n, temperature=0, ignore_eos=True, **params),
            adapter_digest=digests[name] if name else None, tenant_id=f"tenant-{i % 3}",
        ))  # fmt: skip
    tokens: dict[str, list[int]] = {str(i): [] for i in range(len(work))}
    for output in outputs_until_idle(engine):
        tokens[output.request_id] += output.token_ids
        assert output.error is None
    return list(tokens.values())


def test_a_mixed_batch_equals_peft_token_for_token(twin: Twin, make_engine: Make) -> None:
    engine, digests = make_engine(twin)
    n = 24
    expected = run(engine, digests, n)
    assert [len(answer) for answer in expected] == [n] * len(prompts())
    asked = zip(prompts(), expected, strict=True)
    assert expected == [twin.greedy_along(name, prompt, answer) for (name, prompt), answer in asked]
    assert engine.state().num_free_blocks == engine.state().num_blocks
    # Prompt chunks that end within blocks, then the blocks left by the first run: a window spans both.
    chunked, digests = make_engine(twin, max_num_batched_tokens=19)
    beginnings = [tokens[:4] for tokens in expected]
    assert run(chunked, digests, 4) == beginnings
    assert chunked.state().prefix_hit_tokens == 0
    assert run(chunked, digests, 4) == beginnings
    assert chunked.state().prefix_hit_tokens > 0


def test_logits_of_a_mixed_batch_are_within_1e_4_of_peft(twin: Twin, make_engine: Make) -> None:
    engine, digests = make_engine(twin)
    load_all(engine, digests)
    seen: list[torch.Tensor] = []
    forward = engine.runner.decoder.forward

    def keep(*args: Any) -> torch.Tensor:
        logits = forward(*args)
        seen.append(logits.clone())
        return logits

    engine.runner.decoder.forward = keep  # type: ignore[method-assign]
    work = prompts()
    for i, (name, prompt) in enumerate(work):
        params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, prompt_logprobs=0)
        engine.add_request(NewRequest(str(i), prompt, params, adapter_digest=digests[name] if name else None))
    list(outputs_until_idle(engine))
    assert len(seen) == 1, "the whole batch should have run in one step"
    expected = torch.cat([twin.logits(name, prompt) for name, prompt in work])
    torch.testing.assert_close(seen[0], expected, atol=1e-4, rtol=0)


def load_all(engine: Engine, digests: dict[str, str]) -> None:
    for name, digest in digests.items():
        engine.add_request(
            NewRequest(f"warm {name}", [2], SamplingParams(max_tokens=1, ignore_eos=True), adapter_digest=digest)
        )
    list(outputs_until_idle(engine))


def test_base_rows_are_bit_identical_with_and_without_lora_in_the_batch(llama: Twin, make_engine: Make) -> None:
    engine, digests = make_engine(llama, enable_prefix_caching=False)
    load_all(engine, digests)
    rows = []
    for with_lora in (True, False):
        seen: list[torch.Tensor] = []
        forward = type(engine.runner.decoder).forward

        def keep(*args: Any, forward: Any = forward, seen: list[torch.Tensor] = seen) -> torch.Tensor:
            seen.append(forward(engine.runner.decoder, *args).clone())
            return seen[-1].clone()

        engine.runner.decoder.forward = keep  # type: ignore[method-assign]
        for i, (name, prompt) in enumerate(prompts()):
            adapter = digests[name] if name and with_lora else None
            engine.add_request(
                NewRequest(str(i), prompt, SamplingParams(max_tokens=1, temperature=0), adapter_digest=adapter)
            )
        # A single step: all prompts fit the token budget. Requests are admitted in order of arrival within one tenant.
        engine.step()
        base = [i for i, (name, _) in enumerate(prompts()) if name is None]
        rows.append(seen[0][base])
        assert not engine.has_work()
    assert torch.equal(rows[0], rows[1])


def test_chunked_prefill_and_a_tiny_cache_change_nothing(llama: Twin, make_engine: Make) -> None:
    expected = run(*make_engine(llama), 24)
    chunked, digests = make_engine(llama, max_num_batched_tokens=16, block_size=16)
    assert run(chunked, digests, 24) == expected
    block_bytes = chunked.model_config.kv_elements_per_token * 4 * 16
    tiny, digests = make_engine(llama, kv_cache_memory=7 * block_bytes, max_model_len=100)
    load_all(tiny, digests)  # otherwise a request whose adapter loads late runs without the others
    assert run(tiny, digests, 24) == expected
    assert tiny.state().num_preemptions > 0
    assert tiny.state().num_free_blocks == 7


def test_adapters_swap_through_a_pool_that_holds_one_at_a_time(llama: Twin, make_engine: Make) -> None:
    expected = run(*make_engine(llama), 8)
    engine, digests = make_engine(llama)
    pool = engine.adapters
    small, digests = make_engine(llama, adapter_memory=pool.page_bytes * pool.max_pages)
    assert run(small, digests, 8) == expected
    state = small.state()
    assert state.num_adapter_loads >= len(ADAPTERS) > len(state.resident_adapters)
    assert state.num_adapter_evictions == state.num_adapter_loads - len(state.resident_adapters)


def test_the_same_prompt_twice_prefills_only_its_tail(llama: Twin, make_engine: Make) -> None:
    engine, digests = make_engine(llama)
    prompt = list(range(2, 52))

    def ask(adapter: str | None, tenant_id: str) -> tuple[list[int], int]:
        params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
        engine.add_request(NewRequest("x", prompt, params, adapter_digest=adapter, tenant_id=tenant_id))
        tokens: list[int] = []
        cached = -1
        for output in outputs_until_idle(engine):
            tokens += output.token_ids
            cached = output.num_cached_tokens
        return tokens, cached

    first, cached = ask(None, "a")
    assert cached == 0
    assert ask(None, "a") == (first, 48)
    assert ask(None, "b") == (first, 0), "another tenant must not share a block"
    assert ask(digests["r4"], "a")[1] == 0, "another adapter must not share a block"
    assert ask(digests["r4"], "a")[1] == 48


def test_plain_torch_ops_serve_where_there_is_no_compiler(
    llama: Twin, make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(*make_engine(llama), 12)
    monkeypatch.setattr("engine.build.pick_ops", lambda *_: TorchOps())
    assert run(*make_engine(llama), 12) == expected
    assert isinstance(pick_ops(torch.device("cpu"), torch.float16, 64, 16), TorchOps)


def test_the_fused_step_equals_the_same_step_op_by_op(twin: Twin, make_engine: Make) -> None:
    fused = run(*make_engine(twin), 12)
    engine, digests = make_engine(twin)
    engine.runner.decoder.forward = engine.runner.decoder.forward_by_ops  # type: ignore[method-assign]
    assert run(engine, digests, 12) == fused


def test_in_bf16_an_answer_does_not_depend_on_what_else_is_in_the_batch(llama: Twin, make_engine: Make) -> None:
    """In bf16 an answer does not depend on its batch: every sum of the CPU kernels depends only on its own row.

    vLLM calls this property batch invariance.
    """
    together = run(*make_engine(llama, dtype="bfloat16"), 24)
    engine, digests = make_engine(llama, dtype="bfloat16", max_num_batched_tokens=16)
    assert run(engine, digests, 24) == together
    for i, (name, prompt) in enumerate(prompts()):
        params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
        engine.add_request(NewRequest("alone", prompt, params, adapter_digest=digests[name] if name else None))
        tokens: list[int] = []
        for output in outputs_until_idle(engine):
            tokens += output.token_ids
        assert tokens == together[i]


def test_the_tiny_model_is_the_one_that_transformers_makes(tmp_path: Path) -> None:
    import transformers

    save_model(tmp_path)
    torch.manual_seed(0)
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    ours = load_file(tmp_path / "model.safetensors")
    assert ours.keys() == theirs.state_dict().keys()
    assert [name for name, tensor in theirs.state_dict().items() if not torch.equal(tensor, ours[name])] == []
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(tmp_path / "tokenizer.json")),
        unk_token="<unk>", bos_token="<|start|>", eos_token="<|end|>",
    )  # fmt: skip
    fast.chat_template = TEMPLATE
    fast.save_pretrained(tmp_path / "theirs")
    for file in (tmp_path / "theirs").iterdir():
        assert file.read_bytes() == (tmp_path / file.name).read_bytes(), file.name
