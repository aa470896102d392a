"""Configuration of speculative decoding, in vLLM's form. No torch."""

import json
from dataclasses import dataclass, fields
from typing import Any

from wire.errors import ConfigError

MOST_DRAFTS, LONGEST_LOOKUP = 32, 64
DEFAULT_MIN, DEFAULT_MAX = 2, 5


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """Drafts of a step: `method` proposes at most `num_speculative_tokens` tokens after a request's newest one.

    prompt_lookup_min, prompt_lookup_max: number of last tokens that must occur before in prompt or answer, and that are
    compared. If only one is given, the other has the same value. Raises ConfigError for a value out of range.
    """

    method: str
    num_speculative_tokens: int
    prompt_lookup_max: int = 0
    prompt_lookup_min: int = 0

    def __post_init__(self) -> None:
        if self.method != "ngram":
            raise _refused("method", f"expected ngram (prompt lookup), which needs no draft model; got {self.method!r}")
        _check("num_speculative_tokens", self.num_speculative_tokens, MOST_DRAFTS)
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        given = (least or most or DEFAULT_MIN, most or least or DEFAULT_MAX)
        for name, value in zip(("prompt_lookup_min", "prompt_lookup_max"), given, strict=True):
            _check(name, value, LONGEST_LOOKUP)
            object.__setattr__(self, name, value)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise _refused("prompt_lookup_min", f"expected at most prompt_lookup_max ({most}), got {least}")

    @classmethod
    def parse(cls, text: str) -> "SpeculativeConfig":
        """Parse a JSON object. Raises ConfigError that names the field."""
        try:
            given: Any = json.loads(text)
        except ValueError:
            given = None
        if not isinstance(given, dict):
            example = '{"method": "ngram", "num_speculative_tokens": 4}'
            raise ConfigError("speculative_config", f"expected a JSON object such as {example}, got {text!r}")
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise _refused(name, f"unknown; known are {', '.join(known)}")
        for name in known[:2]:
            if name not in given:
                raise _refused(name, "expected a value, got none")
        for name in known[2:]:
            if name in given:
                _check(name, given[name], LONGEST_LOOKUP)
        return cls(**given)


def _check(name: str, value: Any, most: int) -> None:
    if type(value) is not int or not 1 <= value <= most:
        raise _refused(name, f"expected a whole number from 1 to {most}, got {value!r}")


def _refused(name: str, message: str) -> ConfigError:
    return ConfigError("speculative_config", f"{name}: {message}")
