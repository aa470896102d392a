"""Models for benchmarks: random weights of Llama-3.2-1B's shape, and copies of a model with more layers."""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from testing import gguf_files

LLAMA_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048,
    "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 64, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "dtype": "bfloat16", "eos_token_id": 2,
}  # fmt: skip


def save_config(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def random_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the model's weights by module, with a tied embedding. Norms have one dimension."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    sizes = {"self_attn.q": (hidden, hidden), "self_attn.k": (kv, hidden), "self_attn.v": (kv, hidden)}
    sizes |= {"self_attn.o": (hidden, hidden), "mlp.gate": (inner, hidden), "mlp.up": (inner, hidden)}
    sizes["mlp.down"] = (hidden, inner)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}_proj": size for name, size in sizes.items()}
        shapes |= {f"model.layers.{layer}.{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
    return shapes | {"model.norm": (hidden,)}


def random_weights(shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
    """Yield random bf16 weights by name. Every matrix is a piece of one block of random numbers."""
    block = (torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    for i, (module, shape) in enumerate(shapes.items()):
        count = math.prod(shape)
        if len(shape) == 1:
            yield f"{module}.weight", torch.ones(shape, dtype=torch.bfloat16)
        else:
            yield f"{module}.weight", block.roll(7919 * i).repeat(-(-count // len(block)))[:count].view(shape)


def save_random_model(folder: Path) -> Path:
    """Write a model of Llama-3.2-1B's shape."""
    save_config(folder, LLAMA_1B)
    save_file(dict(random_weights(random_shapes(LLAMA_1B))), folder / "model.safetensors", {"format": "pt"})
    return folder


def save_deeper_model(model: Path, folder: Path, times: int) -> Path:
    """Write a copy of a model with `times` as many layers and the same answers, for speculative decoding.

    The layers behind the model's own add nothing to the residual sum, because their last projections are zeros, but
    take the time of a layer. So the model itself is a draft model whose drafts are right, which no trained pair is.
    """
    config = json.loads((model / "config.json").read_text())
    layers = config["num_hidden_layers"]
    weights: dict[str, Tensor] = {}
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            weights |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    for name, weight in list(weights.items()):
        if not name.startswith("model.layers."):
            continue
        number, module = name.removeprefix("model.layers.").split(".", 1)
        adds = module in ("self_attn.o_proj.weight", "mlp.down_proj.weight")
        for copy in range(1, times):
            weights[f"model.layers.{int(number) + copy * layers}.{module}"] = (
                torch.zeros_like(weight) if adds else weight.clone()
            )
    for file in model.iterdir():
        if file.suffix != ".safetensors" and "index" not in file.name:
            shutil.copy(file, folder)
    save_config(folder, config | {"num_hidden_layers": layers * times})
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def save_random_gguf(base: Path, out: Path) -> Path:
    """Write a model of the shape of a folder's config.json as a Q4_0 GGUF file without vocabulary."""
    config = json.loads((base / "config.json").read_text())
    writer = GGUFWriter(out, "llama")
    gguf_files.add_config(writer, config)
    writer.add_tokenizer_model("no_vocab")
    kind = GGMLQuantizationType.Q4_0
    for name, weight in random_weights(random_shapes(config)):
        if weight.dim() == 1:
            writer.add_tensor(gguf_files.ggml_name(name), weight.float().numpy())
        else:
            writer.add_tensor(gguf_files.ggml_name(name), quantize(weight.float().numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out
