"""Writer of GGUF files as llama.cpp's converter writes them for a small Hugging Face model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.numpy import load_file
from tokenizers import Tokenizer

NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
}  # fmt: skip
F32 = GGMLQuantizationType.F32


def ggml_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module.startswith("model.layers."):
        _, _, layer, rest = module.split(".", 3)
        return f"blk.{layer}.{NAMES[rest]}.{kind}"
    return f"{NAMES[module]}.{kind}"


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Permute Q or K rows as llama.cpp's convert_hf_to_gguf.py does (LlamaModel.permute)."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write(
    model: Path,
    out: Path,
    kind: GGMLQuantizationType = F32,
    architecture: str = "llama",
    extra: dict[str, np.ndarray] | None = None,
    rope: dict[str, Any] | None = None,
    vocabulary: bool = False,
) -> Path:
    """Write the GGUF file.

    kind: type of every matrix; vectors stay F32. extra: more tensors, by ggml name. rope: scaling fields.
    """
    config = json.loads((model / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = GGUFWriter(out, architecture)
    add_config(writer, config, architecture)
    for key, value in (rope or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(f"{architecture}.rope.scaling.{key}", value)
    if vocabulary:
        add_vocabulary(writer, model)
    for name, tensor in load_file(model / "model.safetensors").items():
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            tensor = permuted(tensor, heads if "q_proj" in name else kv_heads)
        if tensor.ndim == 1 or kind == F32:
            writer.add_tensor(ggml_name(name), np.ascontiguousarray(tensor, np.float32))
        else:
            writer.add_tensor(ggml_name(name), quantized(np.ascontiguousarray(tensor), kind), raw_dtype=kind)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def add_config(writer: GGUFWriter, config: dict[str, Any], architecture: str = "llama") -> None:
    """Write the fields of a config.json."""
    heads = config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_key_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config.get("sliding_window") and architecture == "llama":
        writer.add_sliding_window(config["sliding_window"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def quantized(tensor: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    try:
        return quantize(tensor, kind)
    except NotImplementedError:  # gguf cannot write K-quants: any bytes are valid, small ones have finite scales
        block, block_bytes = GGML_QUANT_SIZES[kind]
        shape = (*tensor.shape[:-1], tensor.shape[-1] // block * block_bytes)
        return np.random.default_rng(0).integers(0, 32, shape, np.uint8)


def add_vocabulary(writer: GGUFWriter, model: Path) -> None:
    content = json.loads((model / "tokenizer.json").read_text())
    backend = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokens = [backend.id_to_token(i) or f"<unused{i}>" for i in range(backend.get_vocab_size())]
    added = {token["id"]: token["special"] for token in content["added_tokens"]}
    pieces = content["model"]["byte_fallback"]
    types = [3 if added.get(i) else 4 if i in added else 1 for i in range(len(tokens))]
    if pieces:
        types = [6 if len(t) == 6 and t.startswith("<0x") else found for t, found in zip(tokens, types, strict=True)]
    writer.add_tokenizer_model("llama" if pieces else "gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if pieces:
        rank = {"".join(pair): i for i, pair in reversed(list(enumerate(content["model"]["merges"])))}
        writer.add_token_scores([-float(rank.get(token, len(tokens) + i)) for i, token in enumerate(tokens)])
    else:
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template((model / "chat_template.jinja").read_text())
