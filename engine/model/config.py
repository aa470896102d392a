"""Config of a decoder, read from config.json of a Hugging Face folder or from a GGUF file's metadata.

This module reads the fields that all families share. `engine.model.families` selects the family, whose module reads its
own fields. Errors are ConfigErrors with the field and the reason.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.model.quantised.methods import read_method
from engine.model.rope import RopeConfig
from wire.errors import ConfigError
from wire.json_values import as_json
from wire.model_config import context_length, positive, positive_number


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Fields of a decoder's config that all families share. A family adds its own fields in a subclass."""

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
    """Rotary embedding of the layers with full attention."""
    tie_word_embeddings: bool
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


def required(raw: dict[str, Any], name: str) -> int:
    """Return a required field. Raises ConfigError, naming the field, if it is missing."""
    if raw.get(name) is None:
        raise ConfigError(name, "missing from config.json")
    return positive(name, raw[name])


def shared_fields(raw: dict[str, Any], architecture: str) -> dict[str, Any]:
    """Return the fields of ModelConfig except rope and sliding_windows, which the families read in different ways.

    Raises ConfigError naming the field.
    """
    read_method(raw)
    num_heads = required(raw, "num_attention_heads")
    num_kv_heads = positive("num_key_value_heads", raw.get("num_key_value_heads") or num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError("num_key_value_heads", f"expected a divisor of num_attention_heads ({num_heads})")
    head_dim = positive("head_dim", raw.get("head_dim") or required(raw, "hidden_size") // num_heads)
    if head_dim % 2:
        raise ConfigError("head_dim", f"expected an even number, got {head_dim}")
    eos: int | list[int] | None = raw.get("eos_token_id")
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if any(type(i) is not int for i in ids):
        raise ConfigError("eos_token_id", f"expected token ids, got {as_json(eos)}")
    return {
        "architecture": architecture,
        "vocab_size": required(raw, "vocab_size"),
        "hidden_size": required(raw, "hidden_size"),
        "intermediate_size": required(raw, "intermediate_size"),
        "num_layers": required(raw, "num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": positive_number("rms_norm_eps", raw.get("rms_norm_eps", 1e-6)),
        "max_position_embeddings": context_length(raw),
        "tie_word_embeddings": raw.get("tie_word_embeddings", False),
        "dtype": raw.get("dtype") or raw.get("torch_dtype") or "float32",
        "eos_token_ids": frozenset(ids),
    }


def windows_by_type(raw: dict[str, Any], window: int) -> tuple[int, ...]:
    """Return each layer's window by config.json's layer_types. Raises ConfigError unless every layer has a type."""
    types, num_layers = raw["layer_types"], required(raw, "num_hidden_layers")
    known = {"sliding_attention": window, "full_attention": 0}
    if not isinstance(types, list) or len(types) != num_layers or not all(kind in known for kind in types):
        raise ConfigError("layer_types", f"expected {num_layers} of {', '.join(known)}, got {as_json(types)}")
    return tuple(known[kind] for kind in types)
