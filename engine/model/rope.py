"""Rotary position embedding: its fields in config.json, its frequencies and its table."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wire.errors import ConfigError
from wire.json_values import as_json
from wire.model_config import positive_number

# Parameters that each rope type requires.
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


def read_rope(raw: dict[str, Any]) -> RopeConfig:
    """Return the rotary embedding of a config. Raises ConfigError naming the field.

    transformers 5 writes rope_parameters; older versions write rope_theta and rope_scaling.
    """
    given = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    parameters = raw.get(given) or {}
    if not isinstance(parameters, dict):
        raise ConfigError(given, f"expected an object, got {as_json(parameters)}")
    parameters = dict(parameters)
    theta = positive_number("rope_theta", parameters.pop("rope_theta", None) or raw.get("rope_theta") or 10000.0)
    kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    parameters.pop("type", None)
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise ConfigError(
            given, f"rope type {as_json(kind)} is not served; expected one of default, linear, llama3, yarn"
        )
    for name in ROPE_TYPES[kind]:
        positive_number(f"{given}.{name}", parameters.get(name))
    _check_optional_rope(kind, given, parameters)
    if any(fields.get("partial_rotary_factor") not in (None, 1.0) for fields in (raw, parameters)):
        raise ConfigError("partial_rotary_factor", "only full rotary embedding is served")
    if parameters.get("original_max_position_embeddings") is None:  # null means the same as a missing field
        parameters["original_max_position_embeddings"] = raw.get("max_position_embeddings", 2048)
    return RopeConfig(theta, kind, parameters)


def _check_optional_rope(kind: str, field: str, parameters: dict[str, Any]) -> None:
    """Check the types of optional rope fields, which would fail later with a TypeError. Raises ConfigError."""
    for name in ("original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale"):
        if parameters.get(name) is not None:
            positive_number(f"{field}.{name}", parameters[name])
    if kind == "llama3" and not parameters["low_freq_factor"] < parameters["high_freq_factor"]:
        raise ConfigError(f"{field}.high_freq_factor", f"expected more than low_freq_factor, got {as_json(parameters)}")
    if kind == "factors":
        factors = parameters.get("factors")
        if not isinstance(factors, list) or not factors:
            raise ConfigError(f"{field}.factors", f"expected a list of numbers, got {as_json(factors)}")
        for factor in factors:
            positive_number(f"{field}.factors", factor)


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


def rope_table(rope: RopeConfig, head_dim: int, max_model_len: int) -> Tensor:
    """Return `[max_model_len, head_dim]` fp32: per position, cos of every frequency, then sin."""
    frequencies, factor = rope_frequencies(rope, head_dim)
    angles = torch.outer(torch.arange(max_model_len, dtype=torch.float32), torch.tensor(frequencies))
    return torch.cat((angles.cos(), angles.sin()), -1) * factor
