"""What a config.json says and does not say."""

from typing import Any

import pytest

from engine.config import ConfigError
from engine.model.config import parse_model_config

QWEN: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32768,
}  # fmt: skip


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        (None, 32768),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}, 32768),
        ({"rope_type": "linear", "factor": 2.0}, 32768),
    ],
)
def test_the_context_that_yarn_extends_is_the_extended_one(scaling: dict[str, Any] | None, context: int) -> None:
    assert parse_model_config(QWEN | {"rope_scaling": scaling}).max_position_embeddings == context


def test_another_architecture_is_refused_with_those_that_are_served() -> None:
    with pytest.raises(ConfigError, match="GPT2LMHeadModel is not served; these are: LlamaForCausalLM, Mistral"):
        parse_model_config(QWEN | {"architectures": ["GPT2LMHeadModel"]})


@pytest.mark.parametrize(
    "change",
    [
        {"rope_scaling": {"type": "longrope", "factor": 4.0}},
        {"partial_rotary_factor": 0.5},
        {"hidden_act": "gelu"},
        {"quantization_config": {"quant_method": "awq"}},
        {"num_key_value_heads": 3},
        {"vocab_size": None},
    ],
)
def test_what_would_be_computed_otherwise_is_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_model_config(QWEN | change)
    assert caught.value.field == next(iter(change))
