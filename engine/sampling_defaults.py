"""Sampling defaults of a model, from its generation_config.json as vLLM reads it, for fields that a request omits."""

import json
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from wire.errors import ConfigError

FILE_NAME = "generation_config.json"


class SamplingDefaults(msgspec.Struct, frozen=True):
    """OpenAI's defaults, replaced by the model's values. Other fields of the file (`do_sample`, `max_length`, ...) are
    ignored.
    """

    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] = 1.0


OPENAIS = SamplingDefaults()


def read_sampling_defaults(folder: Path) -> SamplingDefaults:
    """Return the defaults of a model folder; OpenAI's if it has no such file. Raises ConfigError for a value out of
    range.
    """
    file = folder / FILE_NAME
    if not file.is_file():
        return OPENAIS
    try:
        given = json.loads(file.read_text("utf-8"))
        return msgspec.convert({k: v for k, v in given.items() if v is not None}, SamplingDefaults)
    except (ValueError, AttributeError) as exc:
        raise ConfigError("generation_config", f"{file}: {exc}; `none` ignores the file") from None
