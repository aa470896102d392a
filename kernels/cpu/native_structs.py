"""Mirrors of native_src's structs, field for field, and the signatures of its functions."""

import ctypes
from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from typing import Any


class Groups(Structure):
    _fields_ = [("bits", c_int64), ("group", c_int64), ("scale_kind", c_int64), ("offset_kind", c_int64)]


class Packed(Structure):
    _fields_ = [
        ("data", c_void_p), ("bias", c_void_p), ("in_features", c_int64), ("out_features", c_int64), ("groups", Groups),
    ]  # fmt: skip


class CacheShape(Structure):
    _fields_ = [("heads", c_int64), ("kv_heads", c_int64), ("dim", c_int64), ("block_size", c_int64)]


class Cache(Structure):
    _fields_ = [("k", c_void_p), ("v", c_void_p), ("k_scales", c_void_p), ("v_scales", c_void_p)]


class LoraGroup(Structure):
    _fields_ = [
        ("a_pages", c_void_p), ("b_pages", c_void_p), ("scales", c_void_p), ("slices", c_int64),
        ("in_features", c_int64), ("out_features", c_int64), ("a_stride", c_int64), ("b_stride", c_int64),
        ("scale_stride", c_int64), ("offsets", c_int64 * 4),
    ]  # fmt: skip


class Routing(Structure):
    _fields_ = [
        ("adapter_index", c_void_p), ("order", c_void_p), ("items", c_void_p), ("page_table", c_void_p),
        ("ranks", c_void_p), ("num_items", c_int64), ("max_pages", c_int64), ("page_rank", c_int64), ("width", c_int64),
    ]  # fmt: skip


class Norm(Structure):
    _fields_ = [("weight", c_void_p), ("is_float", c_int64)]


class Attention(Structure):
    _fields_ = [
        ("shape", CacheShape), ("q", c_void_p), ("q_stride", c_int64), ("cache", Cache),
        ("block_tables", c_void_p), ("query_start", c_void_p), ("context_lens", c_void_p), ("out", c_void_p),
        ("max_blocks", c_int64), ("window", c_int64), ("scale", c_float), ("softcap", c_float),
    ]  # fmt: skip


NORMS = ("input_norm", "q_norm", "k_norm", "mlp_norm", "attention_output_norm", "mlp_output_norm")


class Layer(Structure):
    _fields_ = [
        *((name, Norm) for name in NORMS),
        ("qkv", Packed), ("o", Packed), ("gate_up", Packed), ("down", Packed), ("cos_sin", c_void_p),
        ("cache", Cache), ("window", c_int64), ("lora", LoraGroup * 4),
    ]  # fmt: skip


class Model(Structure):
    _fields_ = [
        ("embedding", Packed), ("layers", POINTER(Layer)), ("norm", Norm), ("lm_head", Packed),
        ("num_layers", c_int64), ("hidden", c_int64), ("intermediate", c_int64), ("threads", c_int64),
        ("is_gelu", c_int64), ("cache", CacheShape), ("eps", c_float), ("scale", c_float), ("softcap", c_float),
        ("embedding_scale", c_float),
    ]  # fmt: skip


class Step(Structure):
    _fields_ = [
        ("token_ids", c_void_p), ("positions", c_void_p), ("slots", c_void_p), ("logits_rows", c_void_p),
        ("block_tables", c_void_p), ("query_start", c_void_p), ("context_lens", c_void_p),
        ("tokens", c_int64), ("requests", c_int64), ("max_blocks", c_int64), ("num_logits", c_int64),
        ("routing", POINTER(Routing)), ("logits_routing", POINTER(Routing)),
        ("residual", c_void_p), ("normed", c_void_p), ("wide", c_void_p), ("narrow", c_void_p),
        ("rounded", c_void_p), ("h", c_void_p), ("logits", c_void_p),
    ]  # fmt: skip


SIGNATURES: dict[str, list[Any]] = {
    "forward": [POINTER(Model), POINTER(Step)],
    "packed_size": [c_int64] * 2,
    "pack": [c_void_p] * 2 + [c_int64] * 3,
    "linear": [c_void_p, POINTER(Packed), POINTER(LoraGroup), POINTER(Routing), c_void_p, c_void_p] + [c_int64] * 2,
    "add_rms_norm": [c_void_p] * 2 + [POINTER(Norm), c_void_p] + [c_int64] * 2 + [c_float],
    "silu_and_mul": [c_void_p] * 2 + [c_int64] * 2,
    "gelu_and_mul": [c_void_p] * 2 + [c_int64] * 2,
    "rope_and_write_kv": [c_void_p] * 3 + [POINTER(Cache), c_void_p, c_int64, POINTER(CacheShape)],
    "attend": [POINTER(Attention), c_int64, c_int64],
    "embed": [POINTER(Packed), c_void_p, c_void_p, c_int64],
}
# Functions that do not depend on the model's dtype.
SIGNATURES_OF_GROUPS: dict[str, list[Any]] = {
    "packed_size_groups": [c_int64] * 2 + [POINTER(Groups)],
    "pack_groups": [c_void_p] * 4 + [c_int64] * 2 + [POINTER(Groups), c_int64],
    "rounded_bytes": [c_int64, POINTER(Groups)],
}


def declare(library: ctypes.CDLL, name: str, types: list[Any]) -> Any:
    """Return a function of the library with its argument and result types set."""
    function = library[name]
    function.argtypes = types
    function.restype = c_int64 if name.startswith(("packed_size", "rounded_bytes")) else None
    return function
