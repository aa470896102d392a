"""The decoder's config, parsed from config.json of a Hugging Face folder or from a GGUF file's metadata.

Raises ConfigError with the field and the reason.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wire.errors import ConfigError
from wire.model_config import context_length, positive, positive_number

# Served families, with the properties that each implies without a field in config.json.
FAMILIES: dict[str, dict[str, bool]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": True},
    "Qwen2ForCausalLM": {"qkv_bias": True},
    "Qwen3ForCausalLM": {"qk_norm": True},
}
# Rope types, with the parameters that each requires.
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "factors": (),
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. `kind`: default, linear, llama3, yarn, or factors (GGUF's divisors of the frequencies).

    `parameters` are specific to the kind.
    """

    theta: float
    kind: str = "default"
    parameters: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int, ...]
    """One per layer, 0 = full attention."""
    dtype: str
    eos_token_ids: frozenset[int]

    @property
    def kv_elements_per_token(self) -> int:
        """Return the number of elements in one token's keys and values of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


def read_config(path: Path) -> dict[str, Any]:
    """Return config.json of a model folder, with the eos_token_id of generation_config.json, or the same fields of a
    GGUF file.

    Raises ConfigError if the path is neither.
    """
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError("model", f"{path} is a file: expected a Hugging Face model folder or a .gguf file")
        from engine.model.gguf import model as gguf_model

        return gguf_model.read_config(path)
    if not path.is_dir():
        raise ConfigError("model", f"no such folder: {path}")
    if not (path / "config.json").is_file():
        raise ConfigError("model", f"{path} has no config.json: expected a Hugging Face model folder or a .gguf file")
    raw = _read_object(path / "config.json")
    generation = path / "generation_config.json"
    if generation.is_file():
        raw["eos_token_id"] = _read_object(generation).get("eos_token_id", raw.get("eos_token_id"))
    return raw


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError("model", f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError("model", f"{path}: expected a JSON object")
    return content


def read_model_config(path: Path) -> ModelConfig:
    """Return the config of a folder or file. Raises ConfigError naming the field if it cannot be served."""
    return parse_model_config(read_config(path))


def parse_model_config(raw: dict[str, Any]) -> ModelConfig:
    architectures = raw.get("architectures") or ["none"]
    architecture = architectures[0] if isinstance(architectures, list) else architectures
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        raise ConfigError("architectures", f"{architecture} is not served; these are: {', '.join(sorted(FAMILIES))}")
    family = FAMILIES[architecture]

    def need(name: str) -> int:
        value = raw.get(name)
        if value is None:
            raise ConfigError(name, "missing from config.json")
        return positive(name, value)

    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ConfigError("hidden_act", f"expected silu, got {raw['hidden_act']!r}")
    if raw.get("quantization_config"):
        raise ConfigError("quantization_config", "quantised weights are not served; give the dense checkpoint")
    num_heads, num_layers = need("num_attention_heads"), need("num_hidden_layers")
    num_kv_heads = positive("num_key_value_heads", raw.get("num_key_value_heads") or num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError("num_key_value_heads", f"expected a divisor of num_attention_heads ({num_heads})")
    head_dim = positive("head_dim", raw.get("head_dim") or need("hidden_size") // num_heads)
    if head_dim % 2:
        raise ConfigError("head_dim", f"expected an even number, got {head_dim}")
    rope = _rope(raw)
    eos: int | list[int] | None = raw.get("eos_token_id")
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if any(type(i) is not int for i in ids):
        raise ConfigError("eos_token_id", f"expected token ids, got {str(eos)[:40]!r}")
    return ModelConfig(
        architecture=architecture,
        vocab_size=need("vocab_size"),
        hidden_size=need("hidden_size"),
        intermediate_size=need("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=positive_number("rms_norm_eps", raw.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=context_length(raw),
        rope=rope,
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
        qkv_bias=family.get("qkv_bias", False) or raw.get("attention_bias", False),
        o_bias=raw.get("attention_bias", False),
        mlp_bias=raw.get("mlp_bias", False),
        qk_norm=family.get("qk_norm", False),
        sliding_windows=_sliding_windows(raw, family, num_layers),
        dtype=raw.get("dtype") or raw.get("torch_dtype") or "float32",
        eos_token_ids=frozenset(ids),
    )


def _rope(raw: dict[str, Any]) -> RopeConfig:
    # transformers 5 writes rope_parameters; older versions write rope_theta and rope_scaling.
    given = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    parameters = raw.get(given) or {}
    if not isinstance(parameters, dict):
        raise ConfigError(given, f"expected an object, got {parameters!r}")
    parameters = dict(parameters)
    theta = positive_number("rope_theta", parameters.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0)
    kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    parameters.pop("type", None)
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise ConfigError(given, f"rope type {kind!r} is not served; these are: default, linear, llama3, yarn")
    for name in ROPE_TYPES[kind]:
        positive_number(f"{given}.{name}", parameters.get(name))
    _check_optional_rope(kind, given, parameters)
    if any(fields.get("partial_rotary_factor") not in (None, 1.0) for fields in (raw, parameters)):
        raise ConfigError("partial_rotary_factor", "only full rotary embedding is served")
    if parameters.get("original_max_position_embeddings") is None:  # null means the same as a missing field
        parameters["original_max_position_embeddings"] = raw.get("max_position_embeddings", 2048)
    return RopeConfig(theta, kind, parameters)


def _check_optional_rope(kind: str, given: str, parameters: dict[str, Any]) -> None:
    """Check optional rope fields, which would otherwise fail with a TypeError during start. Raises ConfigError."""
    for name in ("original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale"):
        if parameters.get(name) is not None:
            positive_number(f"{given}.{name}", parameters[name])
    if kind == "llama3" and not parameters["low_freq_factor"] < parameters["high_freq_factor"]:
        raise ConfigError(f"{given}.high_freq_factor", f"expected more than low_freq_factor, got {parameters}")
    if kind == "factors":
        factors = parameters.get("factors")
        if not isinstance(factors, list) or not factors:
            raise ConfigError(f"{given}.factors", f"expected a list of numbers, got {factors!r}")
        for factor in factors:
            positive_number(f"{given}.factors", factor)


def _sliding_windows(raw: dict[str, Any], family: dict[str, bool], num_layers: int) -> tuple[int, ...]:
    if not (family.get("sliding_window") or raw.get("use_sliding_window")):
        return (0,) * num_layers
    # Missing fields get transformers' defaults.
    window = raw.get("sliding_window", 4096) or 0
    if family.get("sliding_window"):
        return (window,) * num_layers
    if raw.get("layer_types"):
        return tuple(window if kind == "sliding_attention" else 0 for kind in raw["layer_types"])
    return tuple(window if layer >= raw.get("max_window_layers", 28) else 0 for layer in range(num_layers))


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[list[float], float]:
    """Return inverse frequencies `[head_dim / 2]` and the factor on cos and sin, computed as in transformers.

    linear: kaiokendev's position interpolation.
    llama3: Llama 3.1's by-wavelength scaling.
    yarn: Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", 2023, section 3.
    """
    p = rope.parameters
    base = [rope.theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    if rope.kind == "linear":
        return [f / p["factor"] for f in base], 1.0
    if rope.kind == "factors":
        return [f / divisor for f, divisor in zip(base, p["factors"], strict=True)], 1.0
    if rope.kind == "llama3":
        factor, low, high = p["factor"], p["low_freq_factor"], p["high_freq_factor"]
        context = p["original_max_position_embeddings"]
        scaled = []
        for f in base:
            wavelength = 2 * math.pi / f
            smooth = min(1.0, max(0.0, (context / wavelength - low) / (high - low)))
            scaled.append((1 - smooth) * f / factor + smooth * f)
        return scaled, 1.0
    if rope.kind == "yarn":
        factor, context = p["factor"], p["original_max_position_embeddings"]

        def correction(rotations: float) -> float:
            return head_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

        low_dim = correction(p.get("beta_fast") or 32)
        high_dim = correction(p.get("beta_slow") or 1)
        if p.get("truncate", True):
            low_dim, high_dim = math.floor(low_dim), math.ceil(high_dim)
        low_dim, high_dim = max(low_dim, 0), min(high_dim, head_dim - 1)
        span = max(high_dim - low_dim, 0.001)
        scaled = []
        for i, f in enumerate(base):
            ramp = min(1.0, max(0.0, (i - low_dim) / span))
            scaled.append(f / factor * ramp + f * (1 - ramp))
        return scaled, _yarn_attention_factor(p)
    return base, 1.0


def _yarn_attention_factor(p: dict[str, Any]) -> float:
    def mscale(scale: float, by: float = 1.0) -> float:
        return 0.1 * by * math.log(scale) + 1.0 if scale > 1 else 1.0

    if p.get("attention_factor") is not None:
        return float(p["attention_factor"])
    if p.get("mscale") and p.get("mscale_all_dim"):
        return mscale(p["factor"], p["mscale"]) / mscale(p["factor"], p["mscale_all_dim"])
    return mscale(p["factor"])
