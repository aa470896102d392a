"""Configuration of speculative decoding, in vLLM's form. No torch."""

import json
from dataclasses import dataclass
from typing import Any

from wire.errors import ConfigError
from wire.json_values import as_json

MAX_DRAFTS, MAX_LOOKUP = 32, 64
DEFAULT_MIN, DEFAULT_MAX = 2, 5


# Fields by method; the first two are required, and so is the model.
FIELDS = {
    "ngram": ("method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"),
    "draft_model": ("method", "num_speculative_tokens", "model"),
}


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Drafts of a step: `method` proposes at most `num_speculative_tokens` tokens after a request's newest one.

    prompt_lookup_min, prompt_lookup_max: for `ngram`, the number of last tokens that must occur before in prompt or
    answer, and that are compared. If only one is given, the other has the same value. model: for `draft_model`, a model
    folder or a .gguf file. Raises ConfigError for a value out of range.
    """

    method: str
    num_speculative_tokens: int
    prompt_lookup_max: int = 0
    prompt_lookup_min: int = 0
    model: str = ""

    def __post_init__(self) -> None:
        if self.method not in FIELDS:
            raise refused("method", f"expected ngram (prompt lookup) or draft_model, got {as_json(self.method)}")
        _check("num_speculative_tokens", self.num_speculative_tokens, MAX_DRAFTS)
        if self.method == "draft_model":
            if not isinstance(self.model, str) or not self.model:
                raise refused("model", f"expected a model folder or a .gguf file, got {as_json(self.model)}")
            return
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        given = (least or most or DEFAULT_MIN, most or least or DEFAULT_MAX)
        for name, value in zip(("prompt_lookup_min", "prompt_lookup_max"), given, strict=True):
            _check(name, value, MAX_LOOKUP)
            object.__setattr__(self, name, value)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise refused("prompt_lookup_min", f"expected at most prompt_lookup_max ({most}), got {least}")

    @classmethod
    def parse(cls, text: str) -> "SpeculativeConfig":
        """Parse a JSON object. Raises ConfigError that names the field."""
        try:
            given: Any = json.loads(text, object_pairs_hook=_fields)
        except ConfigError:
            raise
        except (ValueError, RecursionError):
            given = None
        if not isinstance(given, dict):
            example = '{"method": "ngram", "num_speculative_tokens": 4}'
            raise ConfigError("speculative_config", f"expected a JSON object such as {example}, got {text!r}")
        method = given.get("method")
        known = FIELDS.get(method if isinstance(method, str) else "", FIELDS["ngram"])
        for name in known[:2]:
            if name not in given:
                raise refused(name, "expected a value, got none")
        if method in FIELDS:
            for name in given:
                if name not in known:
                    raise refused(name, f"unknown; known are {', '.join(known)}")
        for name in known[2:]:
            if name in given and name != "model":
                _check(name, given[name], MAX_LOOKUP)
        return cls(**{name: value for name, value in given.items() if name in known})


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises ConfigError for a field that is given twice."""
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise refused(name, "given twice")
        fields[name] = value
    return fields


def _check(name: str, value: Any, most: int) -> None:
    if type(value) is not int or not 1 <= value <= most:
        raise refused(name, f"expected a whole number from 1 to {most}, got {as_json(value)}")


def refused(name: str, message: str) -> ConfigError:
    """Return the error about a field of the configuration."""
    return ConfigError("speculative_config", f"{name}: {message}")
