"""Table of the served model families by architecture, the name in config.json. Each family has its own module."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.model import gemma, llama
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.model.weights import ModelWeights, open_weights
from engine.progress import StartProgress
from kernels.ops import Ops
from wire.errors import ConfigError
from wire.json_values import as_json


@dataclass(frozen=True, slots=True)
class Family:
    """A model family.

    parse: returns the config from config.json's content and the architecture; raises ConfigError naming the field.
    decoder: returns the decoder from that config, the ops, the weights and the maximum number of positions.
    """

    parse: Callable[[dict[str, Any], str], ModelConfig]
    decoder: Callable[[Any, Ops, ModelWeights, int], Decoder]


FAMILIES: dict[str, Family] = {
    **dict.fromkeys(llama.ARCHITECTURES, Family(llama.parse_config, llama.LlamaDecoder)),
    **dict.fromkeys(gemma.ARCHITECTURES, Family(gemma.parse_config, gemma.GemmaDecoder)),
}


def parse_model_config(raw: dict[str, Any]) -> ModelConfig:
    """Parse config.json's content. Raises ConfigError, naming the field, if the model cannot be served."""
    architectures = raw.get("architectures") or ["none"]
    architecture = architectures[0] if isinstance(architectures, list) else architectures
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        shown = architecture if isinstance(architecture, str) else as_json(architecture)
        raise ConfigError("architectures", f"{shown} is not served; expected one of {', '.join(sorted(FAMILIES))}")
    return FAMILIES[architecture].parse(raw, architecture)


def make_decoder(config: ModelConfig, ops: Ops, source: ModelWeights, max_model_len: int) -> Decoder:
    """Return the decoder for a config, with the weights of `source`."""
    return FAMILIES[config.architecture].decoder(config, ops, source, max_model_len)


def load_decoder(
    path: Path,
    config: ModelConfig,
    ops: Ops,
    dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    progress: StartProgress,
    quantization: str = "none",
) -> Decoder:
    """Load a decoder. path: a folder of safetensors, or a GGUF file. quantization: see `ModelWeights`."""
    with open_weights(path, dtype, device, progress, quantization, ops.serves) as source:
        decoder = make_decoder(config, ops, source, max_model_len)
        source.finish()
    return decoder
