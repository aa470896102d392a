"""Model folder in Hugging Face's form, made from a GGUF file: `python -m engine.model.gguf.dense_folder FILE FOLDER`.

Meant for programs that read no GGUF, such as transformers and PEFT. The weights are the file's, dequantised and rounded
to the dtype that the engine chooses for the file. Divisors of the rotary frequencies (Llama 3.1) keep the engine's form
in config.json, which other programs do not read.
"""

import json
import math
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from adapters.safetensors_header import DTYPE_BYTES, Entry
from engine.model.config import read_config
from engine.model.gguf.model import GgufWeights
from engine.model.gguf.tokenizer import Parts, read_parts
from kernels.dtypes import FILE_DTYPES
from wire.errors import ConfigError
from wire.text.tokenizer import TokenizerError

# From names in config.json to names in safetensors.
_DTYPES = {"bfloat16": "BF16", "float32": "F32"}


def write_dense_folder(gguf: Path, folder: Path) -> None:
    """Create `folder`, which must not exist. Raises ConfigError, TokenizerError or OSError."""
    config, parts = read_config(gguf), read_parts(gguf)
    tokens = {f"{name}_id": parts.backend.token_to_id(token) for name, token in parts.special.items()}
    # Older readers know a single end token as an integer only.
    ends = parts.eos[0] if len(parts.eos) == 1 else parts.eos
    bos, pad = tokens.get("bos_token_id"), tokens.get("pad_token_id")
    named = {"bos_token_id": bos, "eos_token_id": ends, "pad_token_id": pad}
    folder.mkdir()
    _write_json(folder / "config.json", _config(config) | named)
    _write_json(folder / "generation_config.json", named)
    _write_tokenizer(folder, parts)
    weights = GgufWeights(gguf)
    try:
        _write_weights(weights, folder / "model.safetensors", _DTYPES[config["dtype"]])
    finally:
        weights.close()


def _config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with the fields that transformers needs and the engine does not."""
    (architecture,) = config["architectures"]
    kind = architecture.removesuffix("ForCausalLM").lower()
    # Readers before transformers 5 look for `rope_theta` outside of `rope_parameters`.
    return config | {"model_type": kind, "hidden_act": "silu", "rope_theta": config["rope_parameters"]["rope_theta"]}


def _write_tokenizer(folder: Path, parts: Parts) -> None:
    parts.backend.save(str(folder / "tokenizer.json"))
    _write_json(folder / "tokenizer_config.json", parts.special | {"tokenizer_class": "PreTrainedTokenizerFast"})
    if parts.template is not None:
        (folder / "chat_template.jinja").write_text(parts.template, "utf-8")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", "utf-8")


def _write_weights(weights: GgufWeights, path: Path, dtype: str) -> None:
    """Write all tensors as `dtype`, one of them in memory at a time."""
    with path.open("xb") as file:
        file.write(_header(weights.entries, dtype))
        for name, entry in weights.entries.items():
            values = torch.empty(entry.shape, dtype=FILE_DTYPES[dtype])
            weights.read(name, values)
            values.view(torch.uint8).numpy().tofile(file)


def _header(entries: Mapping[str, Entry], dtype: str) -> bytes:
    # transformers refuses a file without a format.
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, entry in entries.items():
        end = position + math.prod(entry.shape) * DTYPE_BYTES[dtype]
        fields[name] = {"dtype": dtype, "shape": list(entry.shape), "data_offsets": [position, end]}
        position = end
    raw = json.dumps(fields, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw


if __name__ == "__main__":
    try:
        write_dense_folder(Path(sys.argv[1]), Path(sys.argv[2]))
    except (ConfigError, TokenizerError, OSError) as refusal:
        sys.exit(str(refusal))
