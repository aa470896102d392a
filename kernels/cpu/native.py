"""Fast path of the CPU: `native_src/`, as single ops, or as a whole step in one call.

The library is plain C++ with C functions, without a build system or torch headers; `kernels.cpu.native_build` compiles
it. `kernels.cpu.plain` replaces it if it cannot be compiled.
"""

import ctypes
from collections.abc import Callable
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels import reference
from kernels.batch import Batch
from kernels.cpu.sampling import sample
from kernels.memory import HugePages
from kernels.ops import DecoderWeights, KvCache, LoraTables, PackedLinear, routing_of
from kernels.reference import HeadNorms, LoraGroup, LoraRouting

# Rows of one adapter that a thread processes at a time, small enough to divide a long prompt between threads.
LORA_ROWS = 16
MAX_HEAD_DIM = 1024
_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}


# The structs of native_src, field for field.


class _Packed(Structure):
    _fields_ = [("data", c_void_p), ("bias", c_void_p), ("in_features", c_int64), ("out_features", c_int64)]


class _CacheShape(Structure):
    _fields_ = [("heads", c_int64), ("kv_heads", c_int64), ("dim", c_int64), ("block_size", c_int64)]


class _LoraGroup(Structure):
    _fields_ = [
        ("a_pages", c_void_p), ("b_pages", c_void_p), ("scales", c_void_p), ("slices", c_int64),
        ("in_features", c_int64), ("out_features", c_int64), ("a_stride", c_int64), ("b_stride", c_int64),
        ("scale_stride", c_int64), ("offsets", c_int64 * 4),
    ]  # fmt: skip


class _Routing(Structure):
    _fields_ = [
        ("adapter_index", c_void_p), ("order", c_void_p), ("items", c_void_p), ("page_table", c_void_p),
        ("ranks", c_void_p), ("num_items", c_int64), ("max_pages", c_int64), ("page_rank", c_int64), ("width", c_int64),
    ]  # fmt: skip


class _Norm(Structure):
    _fields_ = [("weight", c_void_p), ("is_float", c_int64)]


class _Attention(Structure):
    _fields_ = [
        ("shape", _CacheShape), ("q", c_void_p), ("q_stride", c_int64), ("k_cache", c_void_p), ("v_cache", c_void_p),
        ("block_tables", c_void_p), ("query_start", c_void_p), ("context_lens", c_void_p), ("out", c_void_p),
        ("max_blocks", c_int64), ("window", c_int64), ("scale", c_float), ("softcap", c_float),
    ]  # fmt: skip


_NORMS = ("input_norm", "q_norm", "k_norm", "mlp_norm", "attention_output_norm", "mlp_output_norm")


class _Layer(Structure):
    _fields_ = [
        *((name, _Norm) for name in _NORMS),
        ("qkv", _Packed), ("o", _Packed), ("gate_up", _Packed), ("down", _Packed), ("cos_sin", c_void_p),
        ("k_cache", c_void_p), ("v_cache", c_void_p), ("window", c_int64), ("lora", _LoraGroup * 4),
    ]  # fmt: skip


class _Model(Structure):
    _fields_ = [
        ("embedding", c_void_p), ("layers", POINTER(_Layer)), ("norm", _Norm), ("lm_head", _Packed),
        ("num_layers", c_int64), ("hidden", c_int64), ("intermediate", c_int64), ("threads", c_int64),
        ("is_gelu", c_int64), ("cache", _CacheShape), ("eps", c_float), ("scale", c_float), ("softcap", c_float),
        ("embedding_scale", c_float),
    ]  # fmt: skip


class _Step(Structure):
    _fields_ = [
        ("token_ids", c_void_p), ("positions", c_void_p), ("slots", c_void_p), ("logits_rows", c_void_p),
        ("block_tables", c_void_p), ("query_start", c_void_p), ("context_lens", c_void_p),
        ("tokens", c_int64), ("requests", c_int64), ("max_blocks", c_int64), ("num_logits", c_int64),
        ("routing", POINTER(_Routing)), ("logits_routing", POINTER(_Routing)),
        ("residual", c_void_p), ("normed", c_void_p), ("wide", c_void_p), ("narrow", c_void_p),
        ("h", c_void_p), ("logits", c_void_p),
    ]  # fmt: skip


@dataclass(slots=True)
class NativePlan:
    """A step's LoRA routing in the library's form. `keep` holds the objects that its pointers refer to."""

    batch: Batch
    routing: _Routing | None
    keep: tuple[object, ...]


class NativeOps:
    """Ops of the native library: float32 and bfloat16; block sizes and head dimensions in multiples of 16.

    Same semantics as `kernels.reference`, except for the order of elements inside a cache block, which only these ops
    use.
    """

    sample = staticmethod(sample)
    penalise = staticmethod(reference.penalise)
    forbid = staticmethod(reference.forbid)

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions = {
            dtype: {name: _declare(library, f"{name}_{suffix}", types) for name, types in _SIGNATURES.items()}
            for dtype, suffix in _SUFFIX.items()
        }
        self._use_matrix_unit = library.use_matrix_unit
        self._use_matrix_unit.argtypes, self._use_matrix_unit.restype = [c_int64], c_int64
        self.threads = self._pack_threads = torch.get_num_threads()
        self._empty: Callable[..., Tensor] = HugePages().empty

    @staticmethod
    def serves(dtype: torch.dtype, head_dim: int, block_size: int) -> bool:
        return dtype in _SUFFIX and head_dim % 16 == 0 and head_dim <= MAX_HEAD_DIM and block_size % 16 == 0

    def use_matrix_unit(self, *, is_on: bool) -> bool:
        """Set whether products of bf16 use the processor's matrix unit, for all `NativeOps` of this process. Return
        whether they do: False if the processor has none.
        """
        return bool(self._use_matrix_unit(is_on))

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        weight = weight.contiguous()
        functions = self._functions[weight.dtype]
        packed = self._empty(functions["packed_size"](*weight.shape), dtype=weight.dtype)
        functions["pack"](weight.data_ptr(), packed.data_ptr(), *weight.shape, self._pack_threads)
        return PackedLinear(packed, bias, weight.shape[1], weight.shape[0])

    def fuse(self, weights: DecoderWeights, kv: list[KvCache], lora: LoraTables) -> "NativeForward":
        # Weights packed from now on belong to adapters and are packed on a thread beside running steps.
        self._empty, self._pack_threads = torch.empty, 1
        return NativeForward(self, weights, kv, lora)

    def forward(self, dtype: torch.dtype, model: _Model, step: _Step) -> None:
        self._functions[dtype]["forward"](byref(model), byref(step))

    def plan(self, batch: Batch, lora: LoraTables | None) -> NativePlan:
        found = routing_of(batch, lora)
        if found is None:
            return NativePlan(batch, None, ())
        assert lora is not None
        most = int(found.ranks.numpy()[list(batch.adapter_slots)].max())
        routing, keep = route(found, lora.page_rank, -(-most // lora.page_rank) * lora.page_rank)
        return NativePlan(batch, routing, keep)

    def embed(self, weight: Tensor, token_ids: Tensor) -> Tensor:
        return weight[token_ids]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        self._functions[x.dtype]["add_rms_norm"](
            None, x.data_ptr(), byref(_norm(weight)), out.data_ptr(), x.numel() // x.shape[-1], x.shape[-1], eps
        )
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(x)
        self._functions[x.dtype]["add_rms_norm"](
            x.data_ptr(), residual.data_ptr(), byref(_norm(weight)), out.data_ptr(), *x.shape, eps
        )
        return out

    def linear(self, x: Tensor, packed: PackedLinear, group: LoraGroup | None, plan: NativePlan) -> Tensor:
        y = torch.empty(len(x), packed.out_features, dtype=x.dtype)
        lora, routing, h = None, None, None
        if group is not None and plan.routing is not None:
            lora, routing = byref(_lora_group(group)), byref(plan.routing)
            h = torch.empty(_shrunk_size(plan, len(group.offsets) - 1), dtype=x.dtype)
        self._functions[x.dtype]["linear"](
            x.data_ptr(), byref(_packed(packed)), lora, routing, y.data_ptr(), h.data_ptr() if h is not None else None,
            len(x), self.threads,
        )  # fmt: skip
        return y

    def rope_and_write_kv(
        self, qkv: Tensor, cos_sin: Tensor, kv: KvCache, plan: NativePlan, norms: HeadNorms | None = None
    ) -> Tensor:
        """Rotate q inside qkv and return a view of it, `[T, num_heads, D]`; store k and v."""
        if norms is not None:
            heads = qkv.view(len(qkv), -1, kv.k.shape[3])
            ends = heads.shape[1] - 2 * kv.k.shape[1], heads.shape[1] - kv.k.shape[1]
            for part, weight in ((heads[:, : ends[0]], norms.q), (heads[:, ends[0] : ends[1]], norms.k)):
                part.copy_(self.rms_norm(part.reshape(-1, part.shape[2]), weight, norms.eps).view(part.shape))
        shape = _cache_shape(kv.k, qkv.shape[1] // kv.k.shape[3] - 2 * kv.k.shape[1])
        self._functions[qkv.dtype]["rope_and_write_kv"](
            qkv.data_ptr(), plan.batch.positions.data_ptr(), cos_sin.data_ptr(), kv.k.data_ptr(),
            kv.v.data_ptr(), plan.batch.slot_mapping.data_ptr(), len(qkv), byref(shape),
        )  # fmt: skip
        return qkv.view(len(qkv), -1, shape.dim)[:, : shape.heads]

    def paged_attention(
        self, q: Tensor, kv: KvCache, plan: NativePlan, scale: float, sliding_window: int, softcap: float = 0.0
    ) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype)
        b = plan.batch
        attention = _Attention(
            _cache_shape(kv.k, q.shape[1]), q.data_ptr(), q.stride(0), kv.k.data_ptr(), kv.v.data_ptr(),
            b.block_tables.data_ptr(), b.query_start.data_ptr(), b.context_lens.data_ptr(), out.data_ptr(),
            b.block_tables.shape[1], sliding_window, scale, softcap,
        )  # fmt: skip
        self._functions[q.dtype]["attend"](byref(attention), len(b.context_lens), self.threads)
        return out

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return self._activate_and_mul("silu_and_mul", gate_up)

    def gelu_and_mul(self, gate_up: Tensor) -> Tensor:
        return self._activate_and_mul("gelu_and_mul", gate_up)

    def _activate_and_mul(self, name: str, gate_up: Tensor) -> Tensor:
        rows, n = len(gate_up), gate_up.shape[1] // 2
        out = torch.empty(rows, n, dtype=gate_up.dtype)
        self._functions[gate_up.dtype][name](gate_up.data_ptr(), out.data_ptr(), rows, n)
        return out


class NativeForward:
    """A step in one call: embedding to logits in one parallel region, over fixed weights, caches and rank pages."""

    def __init__(self, ops: NativeOps, weights: DecoderWeights, kv: list[KvCache], lora: LoraTables) -> None:
        self._ops, self._weights, self._dtype = ops, weights, weights.embedding.dtype
        self._keep = (weights, kv, lora)
        layers = (_Layer * len(weights.layers))()
        for to, layer, caches, groups in zip(layers, weights.layers, kv, lora.groups, strict=True):
            for name in _NORMS:
                setattr(to, name, _norm(getattr(layer, name)))
            to.qkv, to.o = _packed(layer.qkv), _packed(layer.o)
            to.gate_up, to.down = _packed(layer.gate_up), _packed(layer.down)
            to.cos_sin = layer.cos_sin.data_ptr()
            to.k_cache, to.v_cache = caches.k.data_ptr(), caches.v.data_ptr()
            to.window = layer.sliding_window
            to.lora = (_LoraGroup * 4)(*(_lora_group(groups[name]) for name in ("qkv", "o", "gate_up", "down")))
        first = weights.layers[0]
        hidden, intermediate = weights.embedding.shape[1], first.down.in_features
        self._model = _Model(
            embedding=weights.embedding.data_ptr(), layers=layers, norm=_norm(weights.norm),
            lm_head=_packed(weights.lm_head), num_layers=len(layers), hidden=hidden, intermediate=intermediate,
            threads=ops.threads, is_gelu=weights.activation == "gelu", cache=_cache_shape(kv[0].k, weights.num_heads),
            eps=weights.rms_norm_eps, scale=weights.attention_scale, softcap=weights.attention_softcap,
            embedding_scale=weights.embedding_scale,
        )  # fmt: skip
        # Elements per token in each of the four workspaces.
        narrow = max(intermediate, weights.num_heads * weights.head_dim, hidden)
        self._widths = (hidden, hidden, max(first.qkv.out_features, 2 * intermediate), narrow)
        self._workspaces: list[Tensor] = []
        self._capacity = 0

    def __call__(self, batch: Batch, lora: LoraTables | None, inputs: Tensor | None = None) -> Tensor:
        if batch.num_tokens > self._capacity:
            self._capacity = max(64, 1 << (batch.num_tokens - 1).bit_length())
            self._workspaces = [torch.empty(self._capacity * width, dtype=self._dtype) for width in self._widths]
        plan = self._ops.plan(batch, lora)
        logits = torch.empty(len(batch.logits_rows), self._weights.lm_head.out_features)
        h = torch.empty(_shrunk_size(plan, 3), dtype=self._dtype)
        routing = last_routing = plan.routing
        last_keep: tuple[object, ...] = ()  # kept until the call has ended
        if routing is not None and lora is not None and len(logits) < batch.num_tokens:
            last = LoraRouting(batch.adapter_index[batch.logits_rows], lora.page_table, lora.ranks)
            last_routing, last_keep = route(last, lora.page_rank, routing.width)
        model, token_ids = self._model, batch.token_ids
        if inputs is not None:  # treat the inputs as an embedding table, indexed by token number
            model, token_ids = _Model.from_buffer_copy(self._model), torch.arange(len(inputs))
            model.embedding, model.embedding_scale = inputs.data_ptr(), 1.0
        step = _Step(
            token_ids.data_ptr(), batch.positions.data_ptr(), batch.slot_mapping.data_ptr(),
            batch.logits_rows.data_ptr(), batch.block_tables.data_ptr(), batch.query_start.data_ptr(),
            batch.context_lens.data_ptr(), batch.num_tokens, len(batch.context_lens), batch.block_tables.shape[1],
            len(logits), *(None if found is None else ctypes.pointer(found) for found in (routing, last_routing)),
            *(w.data_ptr() for w in self._workspaces), h.data_ptr(), logits.data_ptr(),
        )  # fmt: skip
        self._ops.forward(self._dtype, model, step)
        del last_keep
        return logits

    def hidden(self, num_rows: int) -> Tensor:
        width = self._model.hidden
        return self._workspaces[3][: num_rows * width].view(num_rows, width)


def route(found: LoraRouting, page_rank: int, width: int) -> tuple[_Routing, tuple[object, ...]]:
    """Return a routing in the library's form, and the objects that it points to. width: columns of h per projection."""
    order, items = segments(found.adapter_index.numpy())
    routing = _Routing(
        found.adapter_index.data_ptr(), order.ctypes.data, items.ctypes.data, found.page_table.data_ptr(),
        found.ranks.data_ptr(), len(items), found.page_table.shape[1], page_rank, width,
    )  # fmt: skip
    return routing, (order, items, found)


def segments(adapter_index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens that use adapters, sorted by adapter, and their work items.

    Work items `[n, 3]` are (slot, first, last) into the tokens. Both are int32.
    """
    order = np.argsort(adapter_index, kind="stable").astype(np.int32)
    order = np.ascontiguousarray(order[int(np.searchsorted(adapter_index[order], 0)) :])
    slots = adapter_index[order]
    bounds = [0, *(np.flatnonzero(np.diff(slots)) + 1).tolist(), len(slots)]
    items = [
        (int(slots[first]), at, min(at + LORA_ROWS, last))
        for first, last in pairwise(bounds)
        for at in range(first, last, LORA_ROWS)
    ]
    return order, np.array(items, np.int32).reshape(-1, 3)


def _shrunk_size(plan: NativePlan, slices: int) -> int:
    if plan.routing is None:
        return 0
    return plan.batch.num_tokens * slices * plan.routing.width


def _packed(linear: PackedLinear) -> _Packed:
    return _Packed(linear.weight.data_ptr(), _pointer(linear.bias), linear.in_features, linear.out_features)


def _norm(weight: Tensor | None) -> _Norm:
    return _Norm() if weight is None else _Norm(weight.data_ptr(), weight.dtype == torch.float32)


def _lora_group(group: LoraGroup) -> _LoraGroup:
    offsets = (c_int64 * 4)(*group.offsets)
    return _LoraGroup(
        group.a_pages.data_ptr(), group.b_pages.data_ptr(), group.scales.data_ptr(), len(group.offsets) - 1,
        group.a_pages.shape[3], group.offsets[-1], group.a_pages.stride(0), group.b_pages.stride(0),
        group.scales.stride(0), offsets,
    )  # fmt: skip


def _cache_shape(cache: Tensor, heads: int) -> _CacheShape:
    return _CacheShape(heads, cache.shape[1], cache.shape[3], cache.shape[2])


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


_SIGNATURES: dict[str, list[Any]] = {
    "forward": [POINTER(_Model), POINTER(_Step)],
    "packed_size": [c_int64] * 2,
    "pack": [c_void_p] * 2 + [c_int64] * 3,
    "linear": [c_void_p, POINTER(_Packed), POINTER(_LoraGroup), POINTER(_Routing), c_void_p, c_void_p] + [c_int64] * 2,
    "add_rms_norm": [c_void_p] * 2 + [POINTER(_Norm), c_void_p] + [c_int64] * 2 + [c_float],
    "silu_and_mul": [c_void_p] * 2 + [c_int64] * 2,
    "gelu_and_mul": [c_void_p] * 2 + [c_int64] * 2,
    "rope_and_write_kv": [c_void_p] * 6 + [c_int64, POINTER(_CacheShape)],
    "attend": [POINTER(_Attention), c_int64, c_int64],
}


def _declare(library: ctypes.CDLL, name: str, types: list[Any]) -> Any:
    function = library[name]
    function.argtypes = types
    function.restype = c_int64 if name.startswith("packed_size") else None
    return function
