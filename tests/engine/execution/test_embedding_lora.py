"""LoRA on embed_tokens and lm_head against transformers + peft, in mixed batches, and its refusals."""

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from adapters.checkpoint import open_checkpoint
from adapters.manifest import AdapterError, BaseShape
from adapters.tiers.host_cache import HostCache
from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.config import read_config
from engine.model.families import parse_model_config
from engine.model.weights import base_tensor
from engine.scheduling.request import NewRequest, SamplingParams
from kernels.cpu.plain import TorchOps
from testing.engine import outputs_until_idle

# peft warns that tied weights complicate merging and that it saves the base's embedding; both are intended here.
pytestmark = [
    pytest.mark.heavy,
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`"),
]

SIZES: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": 1, "bos_token_id": 0,
    "pad_token_id": None,
}  # fmt: skip
BASES: dict[str, dict[str, Any]] = {
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama-untied": {"model_type": "llama", "tie_word_embeddings": False},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    # The embedding factor multiplies the adapters' part too, and the logits' cap applies after the adapters' part.
    "gemma2-tied": {
        "model_type": "gemma2",
        "head_dim": 32,
        "sliding_window": 12,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 6.0,
    },
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "layers": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
    "embedding": {"r": 3, "lora_alpha": 6, "target_modules": ["embed_tokens"]},
    "head": {"r": 8, "lora_alpha": 8, "use_rslora": True, "target_modules": ["lm_head"]},
    "all": {
        "r": 16, "lora_alpha": 24, "target_modules": ["embed_tokens", "lm_head", "q_proj", "down_proj"],
        "rank_pattern": {"lm_head": 5, "q_proj": 9}, "alpha_pattern": {"embed_tokens": 7},
    },
    "head-and-one-layer": {"r": 4, "target_modules": ["lm_head", "up_proj"], "layers_to_transform": [1]},
}  # fmt: skip
# peft saves its base's own embedding and head with these by default; adapters with and without them must load.
WITH_COPIES = ("embedding", "head")


class Twin:
    """A base model, its adapters, and peft's answers."""

    def __init__(self, folder: Path, base: str) -> None:
        import transformers
        from peft import LoraConfig, get_peft_model  # takes 5 s, so it is not imported at collection

        options = {**SIZES, **BASES[base]}
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(options.pop("model_type"), **options)
        ).eval()
        for parameter in model.parameters():
            parameter.data.normal_(0, 0.15) if parameter.dim() > 1 else parameter.data.uniform_(0.5, 1.5)
        self.folder = folder / "base"
        model.save_pretrained(self.folder)
        self.adapters = {name: folder / name for name in ADAPTERS}
        for name, fields in ADAPTERS.items():
            fresh = transformers.AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
            adapted = get_peft_model(fresh, LoraConfig(**fields, task_type="CAUSAL_LM"))
            for key, parameter in adapted.named_parameters():
                if "lora_" in key:
                    parameter.data.normal_(0, 0.15)
            adapted.save_pretrained(folder / name, save_embedding_layers=name in WITH_COPIES)
        self._models: dict[str | None, Any] = {None: model}

    def logits(self, adapter: str | None, token_ids: list[int]) -> torch.Tensor:
        """Return logits `[len(token_ids), vocab]` of the adapter as peft loads it."""
        import transformers

        if adapter not in self._models:
            from peft import PeftModel

            fresh = transformers.AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
            self._models[adapter] = PeftModel.from_pretrained(fresh, self.adapters[adapter]).eval()
        with torch.no_grad():
            return self._models[adapter](torch.tensor([token_ids])).logits[0]

    def greedy_along(self, adapter: str | None, prompt: list[int], answer: list[int]) -> list[int]:
        """Return the greedy token at each position of `answer`, in one pass: equal to it if all of it is greedy."""
        return self.logits(adapter, prompt + answer[:-1])[len(prompt) - 1 :].argmax(-1).tolist()


@pytest.fixture(scope="module", params=sorted(BASES))
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return Twin(tmp_path_factory.mktemp(request.param), request.param)


Make = Callable[..., tuple[Engine, dict[str, str]]]


@pytest.fixture
def make_engine(request: pytest.FixtureRequest) -> Make:
    def make(twin: Twin, **options: Any) -> tuple[Engine, dict[str, str]]:
        dtype = getattr(torch, options.get("dtype", "float32"))
        config = parse_model_config(read_config(twin.folder))
        compare = partial(base_tensor, twin.folder, config, dtype)
        host = HostCache(None, BaseShape.from_config_dir(twin.folder), 64 << 20, dtype, base_tensor=compare)
        request.addfinalizer(host.close)
        options = {"dtype": "float32", "kv_cache_memory": 4 << 20, "adapter_memory": 8 << 20, **options}
        engine = Engine(EngineConfig(model=str(twin.folder), **options), host)
        request.addfinalizer(engine.close)
        return engine, {name: host.add_path(path) for name, path in twin.adapters.items()}

    return make


def work() -> list[tuple[str | None, list[int]]]:
    generator = torch.Generator().manual_seed(3)
    names: list[str | None] = [None, *ADAPTERS, "all", None, "embedding"]
    lengths = [5, 17, 1, 33, 20, 16, 3, 9, 8]
    return [
        (name, torch.randint(2, 160, (n,), generator=generator).tolist())
        for name, n in zip(names, lengths, strict=True)
    ]


def run(engine: Engine, digests: dict[str, str], n: int) -> list[list[int]]:
    tokens: dict[str, list[int]] = {}
    for i, (name, prompt) in enumerate(work()):
        params = SamplingParams(max_tokens=n, temperature=0, ignore_eos=True)
        engine.add_request(NewRequest(str(i), prompt, params, adapter_digest=digests[name] if name else None))
        tokens[str(i)] = []
    for output in outputs_until_idle(engine):
        assert output.error is None
        tokens[output.request_id] += output.token_ids
    return list(tokens.values())


def load_all(engine: Engine, digests: dict[str, str]) -> None:
    for digest in digests.values():
        engine.add_request(NewRequest(digest, [2], SamplingParams(max_tokens=1), adapter_digest=digest))
    list(outputs_until_idle(engine))


def seen_logits(engine: Engine) -> Iterator[torch.Tensor]:
    """Return the logits of every position of `work()`, computed in one step."""
    forward, seen = engine.runner.decoder.forward, []

    def keep(*args: Any) -> torch.Tensor:
        seen.append(forward(*args).clone())
        return seen[-1].clone()

    engine.runner.decoder.forward = keep  # type: ignore[method-assign]
    return iter(seen)


@pytest.mark.parametrize("by_ops", [False, True], ids=["fused", "by-ops"])
def test_logits_of_a_mixed_batch_are_within_1e_4_of_peft(twin: Twin, make_engine: Make, by_ops: bool) -> None:
    engine, digests = make_engine(twin)
    load_all(engine, digests)
    decoder = engine.runner.decoder
    if by_ops:
        decoder.forward = decoder.forward_by_ops  # type: ignore[method-assign]
    seen = seen_logits(engine)
    for i, (name, prompt) in enumerate(work()):
        params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, prompt_logprobs=0)
        engine.add_request(NewRequest(str(i), prompt, params, adapter_digest=digests[name] if name else None))
    list(outputs_until_idle(engine))
    logits = list(seen)
    assert len(logits) == 1, "the whole batch should have run in one step"
    expected = torch.cat([twin.logits(name, prompt) for name, prompt in work()])
    torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=0)
    plain = torch.cat([twin.logits(None, prompt) for _, prompt in work()])
    assert (expected - plain).abs().max() > 0.5, "adapters that change nothing prove nothing"


def test_a_mixed_batch_equals_peft_token_for_token(twin: Twin, make_engine: Make) -> None:
    engine, digests = make_engine(twin)
    expected = run(engine, digests, 12)
    assert [len(answer) for answer in expected] == [12] * len(work())
    asked = zip(work(), expected, strict=True)
    assert expected == [twin.greedy_along(name, prompt, answer) for (name, prompt), answer in asked]
    chunked, digests = make_engine(twin, max_num_batched_tokens=16, max_num_seqs=4)
    assert run(chunked, digests, 12) == expected


def test_plain_torch_ops_give_the_same(twin: Twin, make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(*make_engine(twin), 8)
    monkeypatch.setattr("engine.build.pick_ops", lambda *_: TorchOps())
    assert run(*make_engine(twin), 8) == expected


def test_in_bf16_an_answer_does_not_depend_on_what_else_is_in_the_batch(twin: Twin, make_engine: Make) -> None:
    together = run(*make_engine(twin, dtype="bfloat16"), 12)
    alone, digests = make_engine(twin, dtype="bfloat16", max_num_seqs=1)
    assert run(alone, digests, 12) == together


def test_a_pool_without_room_for_two_swaps_them(twin: Twin, make_engine: Make) -> None:
    expected = run(*make_engine(twin), 6)
    # 64 KiB beside the pages: less than the adapters of rank 16 and 8 together, more than either.
    pool = make_engine(twin)[0].adapters
    pages = pool.page_bytes * pool.max_pages
    small, digests = make_engine(twin, adapter_memory=max(pages, 4 * (16 + 8) * (160 + 64) * 4))
    assert run(small, digests, 6) == expected
    assert small.adapters.embeddings.keys() | small.adapters.heads.keys()
    for digest in digests.values():
        assert small.unload_adapter(digest)
    assert not small.adapters.embeddings
    assert not small.adapters.heads


def test_adapters_too_large_beside_the_pages_are_refused(twin: Twin, make_engine: Make) -> None:
    engine, digests = make_engine(twin)
    engine.adapters._limits["max_embedding_head_bytes"] = 1000
    engine.add_request(NewRequest("a", [3, 4], SamplingParams(max_tokens=2), adapter_digest=digests["all"]))
    outputs = list(outputs_until_idle(engine))
    assert outputs[-1].finish_reason == "error"
    assert "--adapter-memory" in str(outputs[-1].error)


def changed(source: Path, target: Path, config: dict[str, Any] | None = None, **tensors: torch.Tensor) -> Path:
    shutil.copytree(source, target)
    fields = json.loads((source / "adapter_config.json").read_text())
    (target / "adapter_config.json").write_text(json.dumps(fields | (config or {})))
    content = load_file(source / "adapter_model.safetensors")
    save_file(content | tensors, target / "adapter_model.safetensors")
    return target


def test_copies_of_the_base_s_embedding_must_be_the_base_s(twin: Twin, make_engine: Make, tmp_path: Path) -> None:
    engine, digests = make_engine(twin)
    checkpoint = open_checkpoint(twin.adapters["embedding"])
    assert set(checkpoint.base_copies) == {"embed_tokens"}
    name = checkpoint.base_copies["embed_tokens"].name
    original = load_file(twin.adapters["embedding"] / "adapter_model.safetensors")[name]
    host = engine.adapters._host
    trained = host.add_path(changed(twin.adapters["embedding"], tmp_path / "trained", **{name: original * 1.5}))
    assert trained != digests["embedding"]
    with pytest.raises(AdapterError, match="differs from the base model's embed_tokens"):
        host.fetch(trained).result()
    larger = changed(twin.adapters["embedding"], tmp_path / "larger", **{name: torch.zeros(170, 64)})
    with pytest.raises(AdapterError, match="another size is not served"):
        host.add_path(larger)
    without = HostCache(None, BaseShape.from_config_dir(twin.folder), 1 << 20, torch.float32)
    with pytest.raises(AdapterError, match="cannot be compared with"):
        without.fetch(without.add_path(twin.adapters["embedding"])).result()
    without.close()


def test_fan_in_fan_out_means_nothing_to_peft_either(twin: Twin, tmp_path: Path) -> None:
    import transformers
    from peft import PeftModel

    marked = changed(twin.adapters["layers"], tmp_path / "marked", {"fan_in_fan_out": True})
    assert open_checkpoint(marked).digest == open_checkpoint(twin.adapters["layers"]).digest
    base = transformers.AutoModelForCausalLM.from_pretrained(twin.folder, dtype=torch.float32)
    with pytest.warns(UserWarning, match="Setting fan_in_fan_out to False"):
        model = PeftModel.from_pretrained(base, marked).eval()
    with torch.no_grad():
        assert torch.equal(model(torch.tensor([[5, 6, 7]])).logits[0], twin.logits("layers", [5, 6, 7]))


def test_what_peft_would_do_otherwise_is_refused(twin: Twin, tmp_path: Path) -> None:
    tied = changed(twin.adapters["all"], tmp_path / "tied", {"ensure_weight_tying": True})
    with pytest.raises(AdapterError, match="ensure_weight_tying"):
        open_checkpoint(tied)
    wrong = changed(twin.adapters["head"], tmp_path / "wrong", {"target_modules": ["q_proj"]})
    with pytest.raises(AdapterError, match="do not select this module"):
        open_checkpoint(wrong)
    other = BaseShape.from_config_dir(twin.folder)
    other = BaseShape(other.num_layers, other.projections, {"embed_tokens": (64, 320), "lm_head": (320, 64)})
    with pytest.raises(AdapterError, match="another model"):
        open_checkpoint(twin.adapters["all"]).check_base(other)
    unknown = BaseShape(other.num_layers, other.projections)
    with pytest.raises(AdapterError, match="no vocab_size"):
        open_checkpoint(twin.adapters["all"]).check_base(unknown)
