"""The fields of a model's config.json that the gateway also reads."""

from typing import Any

from wire.errors import ConfigError
from wire.json_values import as_json

# Upper bound of every dimension: ten times the longest published context.
LARGEST_SIZE = 100_000_000


def positive(name: str, value: Any) -> int:
    """Return `value`. Raises ConfigError naming the field unless it is a whole number from 1 to LARGEST_SIZE."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST_SIZE:
        raise ConfigError(name, f"expected a whole number from 1 to {LARGEST_SIZE}, got {as_json(value)}")
    return value


def positive_number(name: str, value: Any) -> float:
    """Return `value` as a float. Raises ConfigError naming the field unless it is a number above 0."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ConfigError(name, f"expected a number above 0, got {as_json(value)}")
    return float(value)


def context_length(raw: dict[str, Any]) -> int:
    """Return the model's context length in tokens.

    With yarn and linear scaling, config.json states the length before its extension: transformers' documentation of
    `rope_scaling` says so, and vLLM multiplies too. Gemma 3 states the length after it.
    """
    stated = positive("max_position_embeddings", raw.get("max_position_embeddings", 2048))
    given = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    scaling = raw.get(given) or {}
    if not isinstance(scaling, dict):
        raise ConfigError(given, f"expected an object, got {as_json(scaling)}")
    kind = scaling.get("rope_type") or scaling.get("type")
    if kind not in ("yarn", "linear") or "Gemma3" in str(raw.get("architectures")):
        return stated
    original = scaling.get("original_max_position_embeddings") or stated
    factor = scaling.get("factor") or 1
    for name, value in (("original_max_position_embeddings", original), ("factor", factor)):
        positive_number(f"rope_scaling.{name}", value)
    return max(stated, int(min(original * factor, LARGEST_SIZE)))
