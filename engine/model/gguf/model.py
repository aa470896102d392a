"""A GGUF model in the decoder's terms: config.json's fields from the metadata, tensors under Hugging Face's names.

llama.cpp's converter permutes the rows of q and k of the llama architecture for its own rotary embedding; reading
restores their order.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from engine.model.gguf.blocks import KEPT, read_blocks
from engine.model.gguf.file import GgufFile, end_ids
from engine.model.tensor_files import NOT_FINITE, Entry, is_finite, tensor_error
from kernels.dtypes import FILE_DTYPES
from kernels.weights import LinearWeights, concatenated
from wire.errors import ConfigError

# general.architecture -> the family that serves it. Mistral's files contain "llama".
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<module>\w+)\.(?P<kind>weight|bias)")
# Names of Hugging Face's checkpoints, and their modules' names in GGUF files.
_HF_NAME = re.compile(r"(?:model\.layers\.(?P<layer>\d+)\.)?(?P<module>[\w.]+)\.(?P<kind>weight|bias)")
_OWN = {hf: own for names in (_TOP, _IN_LAYER) for own, hf in names.items()}
# Divisors of the rotary frequencies (Llama 3.1's scaling). They are config, not weights.
_ROPE_FACTORS = "rope_freqs.weight"
_MAX_SIZE = 1 << 24  # limit of each size in the metadata; a larger one means damage, and would be allocated


def read_config(path: Path) -> dict[str, Any]:
    """Return the fields of config.json that the engine reads. Raises ConfigError naming the metadata key."""
    gguf = GgufFile.open(path)
    try:
        return _config(gguf, path)
    finally:
        gguf.file.close()


def _config(gguf: GgufFile, path: Path) -> dict[str, Any]:
    tensors = gguf.tensors
    kind = gguf.get("general.architecture", str)
    if kind not in ARCHITECTURES:
        raise ConfigError(
            "model", f"{path}: architecture {kind!r} is not served; expected one of {', '.join(ARCHITECTURES)}"
        )
    if (parts := gguf.get("split.count", int) or 1) > 1:
        raise ConfigError("model", f"{path} is one of {parts} parts: join them with llama-gguf-split")

    def size(name: str, default: int | None = None) -> int:
        value = gguf.get(f"{kind}.{name}", int)
        value = default if value is None else value
        if value is None or not 1 <= value <= _MAX_SIZE:
            raise ConfigError(
                "model", f"{path}: {kind}.{name}: expected an integer from 1 to {_MAX_SIZE}, got {value!r}"
            )
        return value

    if gguf.get(f"{kind}.expert_count", int):
        raise ConfigError("model", f"{path}: {kind}.expert_count: mixtures of experts are not served")
    heads, hidden, layers = size("attention.head_count"), size("embedding_length"), size("block_count")
    head_dim = size("attention.key_length", hidden // heads)
    if size("attention.value_length", head_dim) != head_dim or size("rope.dimension_count", head_dim) != head_dim:
        raise ConfigError("model", f"{path}: expected values and rotary embedding as wide as keys ({head_dim})")
    for name in ("token_embd.weight", f"blk.{layers - 1}.attn_q.weight"):
        if name not in tensors:
            raise ConfigError("model", f"{path} has no tensor {name}")
    window = size("attention.sliding_window") if gguf.get(f"{kind}.attention.sliding_window", int) else None
    vocab_size = tensors["token_embd.weight"].shape[0]
    matrices = [entry.dtype for entry in tensors.values() if len(entry.shape) > 1]
    return {
        "architectures": ["MistralForCausalLM" if kind == "llama" and window else ARCHITECTURES[kind]],
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": size("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": gguf.get(f"{kind}.attention.layer_norm_rms_epsilon", float) or 1e-6,
        "max_position_embeddings": size("context_length"),
        "rope_parameters": _rope(gguf, kind, head_dim),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": kind == "llama" and "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "max_window_layers": 0,
        # A float16 file gets bfloat16 too, which covers its range and is the dtype of the CPU's fast path.
        "dtype": "float32" if set(matrices) == {"F32"} else "bfloat16",
        "bos_token_id": gguf.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": end_ids(gguf, vocab_size) or None,
    }


def _rope(gguf: GgufFile, architecture: str, head_dim: int) -> dict[str, Any]:
    """Return rope parameters in transformers 5's form, plus rope type `factors`: divisors of the frequencies, from a
    tensor of the file.
    """

    def number(name: str) -> float | None:
        value = gguf.get(f"{architecture}.rope.{name}", float) or None
        if value is not None and not 1e-3 <= value <= 1e12:
            raise ConfigError("model", f"{gguf.file.path}: {architecture}.rope.{name}: {value:g} is out of range")
        return value

    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": number("freq_base") or 10000.0}
    kind = gguf.get(f"{architecture}.rope.scaling.type", str) or "none"
    linear = number("scaling.factor") or number("scale_linear")
    if kind == "none" and linear not in (None, 1.0):
        kind = "linear"  # older files have no rope.scaling.type
    if _ROPE_FACTORS in gguf.tensors:
        entry = gguf.tensors[_ROPE_FACTORS]
        factors = torch.empty(entry.shape)
        _copy(gguf, entry, factors, None)
        if entry.shape != (head_dim // 2,) or not (factors > 0).all():
            raise tensor_error(gguf.file.path, _ROPE_FACTORS, f"expected {head_dim // 2} divisors")
        rope |= {"rope_type": "factors", "factors": factors.tolist()}
    elif kind in ("linear", "yarn"):
        if linear is None:
            raise ConfigError("model", f"{gguf.file.path}: {architecture}.rope.scaling.factor is missing")
        rope |= {"rope_type": kind, "factor": linear}
        if kind == "yarn":
            original = number("scaling.original_context_length") or gguf.get(f"{architecture}.context_length", int)
            rope["original_max_position_embeddings"] = original
            for name, key in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
                if (beta := number(f"scaling.{key}")) is not None:
                    rope[name] = beta
            if (factor := number("scaling.attn_factor")) is not None:
                rope["attention_factor"] = factor
    elif kind != "none":
        problem = f"{architecture}.rope.scaling.type {kind!r} is not served; expected one of none, linear, yarn"
        raise ConfigError("model", f"{gguf.file.path}: {problem}")
    return rope


class GgufWeights:
    """The `WeightsFile` of a GGUF file. Raises ConfigError for a tensor that the architecture does not have."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._gguf = GgufFile.open(path)
        tensors = self._gguf.tensors
        self.entries = {_hf_name(name, path): entry for name, entry in tensors.items() if name != _ROPE_FACTORS}
        heads = self._gguf.get("llama.attention.head_count", int)
        kv_heads = self._gguf.get("llama.attention.head_count_kv", int) or heads
        self._permuted_heads = {"q_proj": heads, "k_proj": kv_heads} if heads else {}

    def own_name(self, name: str) -> str:
        match = _HF_NAME.fullmatch(name)
        if match is None or match["module"] not in _OWN:
            return name
        layer = "" if match["layer"] is None else f"blk.{match['layer']}."
        return f"{layer}{_OWN[match['module']]}.{match['kind']}"

    def read(self, name: str, out: Tensor) -> None:
        _copy(self._gguf, self.entries[name], out, self._order(name, out.shape[0]))

    def stored(self, name: str) -> LinearWeights | None:
        entry = self.entries[name]
        if entry.dtype not in KEPT or len(entry.shape) != 2:
            return None
        weights = concatenated([read_blocks(entry.dtype, data) for _, _, data in self._gguf.file.rows(entry)])
        if not all(is_finite(part) for part in weights.tensors.values()):
            raise tensor_error(self.path, entry.name, NOT_FINITE)
        order = self._order(name, entry.shape[0])
        return weights if order is None else weights.rows(torch.argsort(order))

    def raw(self, name: str) -> Tensor:
        entry = self.entries[name]
        raise tensor_error(self.path, entry.name, f"type {entry.dtype} belongs to no quant_method")

    def close(self) -> None:
        self._gguf.file.close()

    def _order(self, name: str, rows: int) -> Tensor | None:
        """Return `_rotary_order` for q and k of the llama architecture, else None. Raises ConfigError."""
        heads = self._permuted_heads.get(name.split(".")[-2])
        if heads is not None and (heads < 1 or rows % (2 * heads)):
            problem = f"{rows} rows, which cannot be {heads} heads of pairs"
            raise tensor_error(self.path, self.entries[name].name, problem)
        return None if heads is None else _rotary_order(rows, heads)


def _hf_name(name: str, path: Path) -> str:
    match = _NAME.fullmatch(name)
    if match is not None and match["layer"] is None and match["module"] in _TOP:
        return f"{_TOP[match['module']]}.{match['kind']}"
    if match is not None and match["layer"] is not None and match["module"] in _IN_LAYER:
        return f"model.layers.{match['layer']}.{_IN_LAYER[match['module']]}.{match['kind']}"
    raise tensor_error(path, name, "belongs to no decoder that is served")


def _rotary_order(rows: int, heads: int) -> Tensor:
    """Return the destination row of each of the file's rows. In the file, dimensions i and i + D/2 of a head are
    adjacent.
    """
    dim = rows // heads
    return torch.arange(rows).view(heads, 2, dim // 2).transpose(1, 2).flatten()


def _copy(gguf: GgufFile, entry: Entry, out: Tensor, order: Tensor | None) -> None:
    if len(entry.shape) == 1 and entry.dtype not in FILE_DTYPES:
        raise tensor_error(gguf.file.path, entry.name, f"type {entry.dtype} is not served for a vector")
    out = out.view(entry.shape[0], -1)
    for first, last, data in gguf.file.rows(entry):
        dtype = FILE_DTYPES.get(entry.dtype)
        values = _dequantized(gguf, entry, data) if dtype is None else data.view(dtype)
        if order is None:
            out[first:last].copy_(values)
        else:
            out[order[first:last].to(out.device)] = values.to(out.device, out.dtype)


def _dequantized(gguf: GgufFile, entry: Entry, data: Tensor) -> Tensor:
    """Return uint8 `[rows, bytes]` as fp32 `[rows, columns]`. Raises ConfigError."""
    try:
        numbers = dequantize(data.numpy(), GGMLQuantizationType[entry.dtype])
    except NotImplementedError:
        raise tensor_error(gguf.file.path, entry.name, f"type {entry.dtype} is not served") from None
    values = torch.from_numpy(np.ascontiguousarray(numbers, np.float32))
    if not is_finite(values):
        raise tensor_error(gguf.file.path, entry.name, NOT_FINITE)
    return values
