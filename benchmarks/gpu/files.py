"""Random models and adapters as folders, in the layout that the engine, transformers and peft all read."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.model.config import ModelConfig
from engine.model.families import parse_model_config


def projections(c: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return out_features and in_features of each projection of a layer."""
    q, kv, hidden, inner = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.hidden_size, c.intermediate_size
    return {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def write_model(raw: dict[str, Any], folder: Path, dtype: torch.dtype, device: torch.device) -> Path:
    """Write config.json and one file of weights per layer; matrices are generated on the device."""
    folder.mkdir(parents=True)
    c = parse_model_config(raw)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, device=device).mul_(columns**-0.5).to("cpu", dtype)

    ones = torch.ones(c.hidden_size, dtype=dtype)
    files: list[dict[str, Tensor]] = [
        {
            # Embeddings as large as the layers' additions to them, and a head with a clear most likely token.
            "model.embed_tokens.weight": matrix(c.vocab_size, c.hidden_size) * c.hidden_size**0.5,
            "model.norm.weight": ones,
            "lm_head.weight": matrix(c.vocab_size, c.hidden_size) * 4,
        }
    ]
    for i in range(c.num_layers):
        layer = f"model.layers.{i}."
        files.append({f"{layer}{name}.weight": matrix(*shape) for name, shape in projections(c).items()})
        for norm in ("input_layernorm", "post_attention_layernorm"):
            files[-1][f"{layer}{norm}.weight"] = ones.clone()
    index: dict[str, str] = {}
    for number, tensors in enumerate(files):
        name = f"model-{number:05}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, name)
        tensors.clear()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    config = raw | {"dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_adapter(
    raw: dict[str, Any], folder: Path, rank: int, dtype: torch.dtype, device: torch.device, seed: int
) -> Path:
    """Write an adapter on all seven projections, as PEFT does; strong enough to change the generated text."""
    folder.mkdir(parents=True)
    c = parse_model_config(raw)
    generator = torch.Generator(device).manual_seed(seed)

    def matrix(rows: int, columns: int, scale: float) -> Tensor:
        drawn = torch.randn(rows, columns, device=device, generator=generator)
        return drawn.mul_(scale).to("cpu", dtype)

    tensors = {}
    for i in range(c.num_layers):
        for name, (out_features, in_features) in projections(c).items():
            key = f"base_model.model.model.layers.{i}.{name}.lora_"
            tensors[key + "A.weight"] = matrix(rank, in_features, in_features**-0.5)
            tensors[key + "B.weight"] = matrix(out_features, rank, 0.3 * rank**-0.5)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    targets = [name.partition(".")[2] for name in projections(c)]
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
