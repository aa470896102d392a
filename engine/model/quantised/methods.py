"""Table of the readers of quantised safetensors checkpoints, by config.json's `quant_method`."""

from collections.abc import Callable, Mapping
from typing import Any

from engine.model.quantised.awq import Awq
from engine.model.quantised.compressed_tensors import CompressedTensors
from engine.model.quantised.fp8 import Fp8
from engine.model.quantised.gptq import Gptq
from engine.model.quantised.method import FIELD, Method, choose
from wire.errors import ConfigError
from wire.json_values import as_json

METHODS: dict[str, Callable[[Mapping[str, Any]], Method]] = {
    "awq": Awq,
    "compressed-tensors": CompressedTensors,
    "fbgemm_fp8": Fp8,
    "fp8": Fp8,
    "gptq": Gptq,
}


def read_method(raw: Mapping[str, Any]) -> Method | None:
    """Return the reader for a model's `quantization_config`, or None if it has none. Raises ConfigError, naming the
    field, for a `quant_method` that is not served.
    """
    config = raw.get(FIELD)
    if not config:
        return None
    if not isinstance(config, dict):
        raise ConfigError(FIELD, f"expected an object, got {as_json(config)}")
    return METHODS[choose(config, "quant_method", tuple(METHODS))](config)
