"""The store's canonical form of an adapter: stable digest, identical bytes for a digest, identical results in PEFT."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.canonical import write_canonical
from adapters.checkpoint import open_checkpoint
from testing.adapter_files import CONFIG, key, safetensors, tensors, write

NAME = "adapter_config.json"


def canonical(source: Path, target: Path) -> Path:
    target.mkdir()
    write_canonical(source, target)
    return target


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"lora_alpha": 7, "use_rslora": True},
        {"lora_alpha": 0.1},
        {"lora_alpha": -0.0},
        {"alpha_pattern": {"v_proj": 1, r".*layers\.2\..*": 1 / 3}},
        {"r": 8, "rank_pattern": {"(q|v|down)_proj": 4}, "use_rslora": True, "lora_alpha": 1e-7},
    ],
)
def test_the_digest_stays_and_twice_is_once(change: dict, tmp_path: Path):
    source = write(tmp_path / "a", config=CONFIG | change)
    once = canonical(source, tmp_path / "b")
    twice = canonical(once, tmp_path / "c")
    before, after = open_checkpoint(source), open_checkpoint(once)
    assert after.digest == before.digest
    assert [(m.rank, m.scale) for m in after.modules.values()] == [(m.rank, m.scale) for m in before.modules.values()]
    for name in (NAME, "adapter_model.safetensors"):
        assert (once / name).read_bytes() == (twice / name).read_bytes()


def test_two_ways_to_say_the_same_are_one(tmp_path: Path):
    backwards = dict(reversed(tensors().items()))
    one = canonical(write(tmp_path / "a"), tmp_path / "b")
    other = write(
        tmp_path / "c", safetensors(backwards), CONFIG | {"rank_pattern": {".*proj": 4}, "r": 3, "lora_dropout": 0.3}
    )
    assert open_checkpoint(other).digest == open_checkpoint(one).digest
    two = canonical(other, tmp_path / "d")
    for name in (NAME, "adapter_model.safetensors"):
        assert (one / name).read_bytes() == (two / name).read_bytes()


def test_ranks_that_differ_are_kept_by_full_name(tmp_path: Path):
    content = tensors() | tensors(((1, "v_proj"),), rank=2)
    config = CONFIG | {"rank_pattern": {r"layers\.1\..*": 2}, "alpha_pattern": {r"layers\.1\..*": 3}}
    folder = canonical(write(tmp_path / "a", content, config), tmp_path / "b")
    kept = json.loads((folder / NAME).read_bytes())
    assert (kept["r"], kept["lora_alpha"]) == (4, 8)
    assert kept["rank_pattern"] == {"model.layers.1.self_attn.v_proj": 2}
    assert kept["alpha_pattern"] == {"model.layers.1.self_attn.v_proj": 3}
    assert open_checkpoint(folder).modules[1, "v_proj"].scale == 1.5


def test_it_is_read_without_a_regular_expression(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = CONFIG | {"target_modules": r".*(q|v|down)_proj", "alpha_pattern": {"(.*)v_proj": 1}}
    folder = canonical(write(tmp_path / "a", config=config), tmp_path / "b")
    monkeypatch.setattr("adapters.manifest.pattern_key_matcher", None)
    monkeypatch.setattr("adapters.manifest.ModulePattern", None)
    assert open_checkpoint(folder).rank == 4
    assert key(0, "q_proj", "A").encode() in (folder / "adapter_model.safetensors").read_bytes()


def tiny() -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.filterwarnings("ignore::UserWarning:peft")
@pytest.mark.parametrize("rslora", [False, True])
def test_peft_computes_the_same_from_it(rslora: bool, tmp_path: Path):
    import peft  # takes 5 s, so it is not imported at collection

    """PEFT computes the same with rank and alpha patterns, on some layers, with the embedding and the head."""
    config = peft.LoraConfig(
        r=8,
        lora_alpha=12,
        target_modules=["q_proj", "v_proj", "gate_proj", "embed_tokens", "lm_head"],
        layers_to_transform=None,
        rank_pattern={r"layers\.[12]\.self_attn\.q_proj": 3, "gate_proj": 5},
        alpha_pattern={r".*\.1\..*v_proj": 1, "gate_proj": 7},
        use_rslora=rslora,
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(tiny(), config)
    rng = random.Random(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(
                    torch.randn(parameter.shape, generator=torch.Generator().manual_seed(rng.randrange(1 << 30)))
                )
    model.save_pretrained(tmp_path / "a")
    folder = canonical(tmp_path / "a", tmp_path / "b")
    assert open_checkpoint(folder).digest == open_checkpoint(tmp_path / "a").digest
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        expected = peft.PeftModel.from_pretrained(tiny(), tmp_path / "a").eval()(tokens).logits
        found = peft.PeftModel.from_pretrained(tiny(), folder).eval()(tokens).logits
        plain = tiny()(tokens).logits
    assert torch.equal(found, expected)
    assert not torch.allclose(found, plain)
