"""Fields of a config.json, present and missing."""

from typing import Any

import pytest

from engine.model.families import parse_model_config
from wire.errors import ConfigError
from wire.model_config import LARGEST_SIZE, context_length

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
        ({"rope_type": "linear", "factor": 2.0}, 65536),
        ({"type": "linear", "factor": 8.0, "original_max_position_embeddings": 4096}, 32768),
        ({"rope_type": "linear", "factor": 1e300}, LARGEST_SIZE),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 32768),
    ],
)
def test_the_context_that_yarn_or_linear_scaling_extends_is_the_extended_one(
    scaling: dict[str, Any] | None, context: int
) -> None:
    assert parse_model_config(QWEN | {"rope_scaling": scaling}).max_position_embeddings == context
    if scaling is not None:
        config = QWEN | {"rope_parameters": {"rope_theta": 1e4, **scaling}}
        assert parse_model_config(config).max_position_embeddings == context


def test_gemma_3_states_its_extended_context() -> None:
    """Gemma 3's config.json has 131,072 positions and the factor 8 that was used to train on them."""
    config = QWEN | {"architectures": ["Gemma3ForCausalLM"], "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    assert context_length(config) == 32768


def test_another_architecture_is_refused_with_those_that_are_served() -> None:
    with pytest.raises(ConfigError, match=r"GPT2LMHeadModel is not served; expected one of Gemma2.*LlamaForC"):
        parse_model_config(QWEN | {"architectures": ["GPT2LMHeadModel"]})


@pytest.mark.parametrize(
    "change",
    [
        {"rope_scaling": {"type": "longrope", "factor": 4.0}},
        {"architectures": 5},
        {"architectures": [["Qwen2ForCausalLM"]]},
        {"eos_token_id": 1.5},
        {"eos_token_id": ["x"]},
        {"partial_rotary_factor": 0.5},
        {"hidden_act": "gelu"},
        {"quantization_config": {"quant_method": "aqlm"}},
        {"num_key_value_heads": 3},
        {"vocab_size": None},
        {"hidden_size": "64"},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": 10**19},
        {"head_dim": 10**19},
        {"max_position_embeddings": "4k"},
        {"rms_norm_eps": None},
        {"rope_theta": "1e6"},
        {"rope_scaling": "linear"},
        {"rope_parameters": {"rope_type": ["yarn"]}},
    ],
)
def test_what_would_be_computed_otherwise_is_refused_by_name(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_model_config(QWEN | change)
    assert caught.value.field == next(iter(change))


def test_a_value_is_shown_as_in_config_json() -> None:
    for change, shown in (
        ({"rms_norm_eps": None}, "rms_norm_eps: expected a number above 0, got null"),
        ({"head_dim": True}, "head_dim: expected a whole number from 1 to 100000000, got true"),
        ({"hidden_size": "64"}, 'hidden_size: expected a whole number from 1 to 100000000, got "64"'),
        ({"rope_scaling": ["linear"]}, 'rope_scaling: expected an object, got ["linear"]'),
        ({"eos_token_id": [None]}, "eos_token_id: expected token ids, got [null]"),
    ):
        with pytest.raises(ConfigError) as caught:
            parse_model_config(QWEN | change)
        assert str(caught.value) == shown


@pytest.mark.parametrize(
    ("rope", "field"),
    [
        ({"type": "linear"}, "rope_scaling.factor"),
        ({"type": "yarn", "factor": "4"}, "rope_scaling.factor"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "rope_scaling.high_freq_factor"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_type": "factors"}, "rope_scaling.factors"),
        ({"rope_type": "factors", "factors": [1.0, "2"]}, "rope_scaling.factors"),
        ({"rope_type": "factors", "factors": {"a": 1}}, "rope_scaling.factors"),
        (
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": "x"},
            "rope_scaling.original_max_position_embeddings",
        ),
        ({"type": "yarn", "factor": 4.0, "beta_fast": "32"}, "rope_scaling.beta_fast"),
        ({"type": "yarn", "factor": 4.0, "attention_factor": []}, "rope_scaling.attention_factor"),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0},
            "rope_scaling.high_freq_factor",
        ),
    ],
)
def test_a_rope_without_what_its_type_needs_is_refused_by_name(rope: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_model_config(QWEN | {"rope_scaling": rope})
    assert caught.value.field == field


@pytest.mark.parametrize("kind", ["yarn", "llama3", "linear"])
def test_a_null_original_length_is_the_models_own(kind: str) -> None:
    scaling = {"rope_type": kind, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    left_out = parse_model_config(QWEN | {"rope_scaling": scaling})
    null = parse_model_config(QWEN | {"rope_scaling": scaling | {"original_max_position_embeddings": None}})
    assert null.rope == left_out.rope
    assert null.max_position_embeddings == left_out.max_position_embeddings


@pytest.mark.parametrize("fields", [{}, {"sliding_window": None}, {"sliding_window": 12}, {"num_hidden_layers": 3}])
@pytest.mark.parametrize(
    "family",
    [
        {"model_type": "mistral", "architectures": ["MistralForCausalLM"]},
        {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True},
        {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 30, "head_dim": 16}
        | {"use_sliding_window": True},
        {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"] * 2},
    ],
    ids=lambda family: f"{family['model_type']}-{len(family)}",
)
def test_windows_are_those_of_transformers_also_where_config_json_says_nothing(
    family: dict[str, Any], fields: dict[str, Any]
) -> None:
    import transformers

    raw = QWEN | family | fields
    if "layer_types" in raw:
        raw["num_hidden_layers"] = len(raw["layer_types"])
    theirs = transformers.AutoConfig.for_model(**raw)
    window = theirs.sliding_window or 0
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * theirs.num_hidden_layers
    expected = tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    assert parse_model_config(raw).sliding_windows == expected
