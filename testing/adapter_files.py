"""Adapter folders written byte by byte, so that tests can also write broken ones."""

import json
import math
import random
import struct
from pathlib import Path

import aiohttp

from adapters.manifest import BaseShape

BASE = BaseShape.from_config(
    {
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 24,
        "num_hidden_layers": 3,
    }
)
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
WIDTH = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "I8": 1}
Tensors = dict[str, tuple[str, list[int], bytes]]


def key(layer: int, projection: str, side: str, adapter: str = "") -> str:
    block = "self_attn" if projection in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
    return f"base_model.model.model.layers.{layer}.{block}.{projection}.lora_{side}{adapter}.weight"


def numbers(count: int, rng: random.Random) -> bytes:
    return struct.pack(f"<{count}f", *(rng.gauss(0, 0.02) for _ in range(count)))


def tensors(
    modules: tuple[tuple[int, str], ...] = ((0, "q_proj"), (0, "v_proj"), (2, "down_proj")),
    rank: int = 4,
    seed: int = 0,
    base: BaseShape = BASE,
) -> Tensors:
    """Return F32 A and B tensors for the modules."""
    rng, result = random.Random(seed), {}
    for layer, projection in modules:
        out_features, in_features = base.projections[projection]
        for side, shape in (("A", [rank, in_features]), ("B", [out_features, rank])):
            result[key(layer, projection, side)] = ("F32", shape, numbers(math.prod(shape), rng))
    return result


def header_of(content: Tensors) -> dict:
    header, position = {}, 0
    for name, (dtype, shape, data) in content.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + len(data)]}
        position += len(data)
    return header


def pack(header: object, data: bytes) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def safetensors(content: Tensors) -> bytes:
    return pack({"__metadata__": {"format": "pt"}, **header_of(content)}, b"".join(t[2] for t in content.values()))


def write(folder: Path, content: Tensors | bytes | None = None, config: object = None) -> Path:
    """Write an adapter folder; `content` is tensors, or the bytes of the weights file."""
    folder.mkdir(parents=True, exist_ok=True)
    content = tensors() if content is None else content
    raw = content if isinstance(content, bytes) else safetensors(content)
    (folder / "adapter_model.safetensors").write_bytes(raw)
    config = CONFIG if config is None else config
    (folder / "adapter_config.json").write_bytes(config if isinstance(config, bytes) else json.dumps(config).encode())
    return folder


def upload_form(folder: Path, name: str = "pirate") -> aiohttp.FormData:
    """Return an upload of the folder's adapter; a folder without one gets a small one."""
    if not (folder / "adapter_model.safetensors").exists():
        write(folder)
    data = aiohttp.FormData({"name": name})
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        data.add_field(file, (folder / file).read_bytes(), filename=file)
    return data
