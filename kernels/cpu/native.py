"""Fast path of the CPU: `native_src/`, as single ops, or as a whole step in one call.

The library is plain C++ with C functions, without a build system or torch headers; `kernels.cpu.native_build` compiles
it. `kernels.cpu.plain` replaces it if it cannot be compiled.
"""

import ctypes
from collections.abc import Callable
from ctypes import byref, c_int64
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from kernels import reference
from kernels.batch import Batch
from kernels.cpu import native_structs as structs
from kernels.cpu.native_structs import NORMS, SIGNATURES, SIGNATURES_OF_GROUPS, declare
from kernels.cpu.sampling import sample
from kernels.memory import HugePages
from kernels.ops import DecoderWeights, KvCache, LayerWeights, LoraTables, routing_of
from kernels.reference import HeadNorms, LoraGroup, LoraRouting
from kernels.weights import DENSE, GROUPS, OFFSETS, SCALE_DTYPES, LinearWeights, Scheme, dense

# Rows of one adapter that a thread processes at a time, small enough to divide a long prompt between threads.
LORA_ROWS = 16
MAX_HEAD_DIM = 1024
_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}


@dataclass(slots=True)
class NativeStepTables:
    """A step's LoRA routing in the library's form. `keep` holds the objects that its pointers refer to."""

    batch: Batch
    routing: structs.Routing | None
    keep: tuple[object, ...]


class NativeOps:
    """Ops of the native library: float32 and bfloat16, keys and values in the same dtype or in int8; block sizes and
    head dimensions in multiples of 16.

    Same semantics as `kernels.reference`, except for the order of elements inside a cache block, which only these ops
    use.
    """

    sample = staticmethod(sample)
    penalise = staticmethod(reference.penalise)
    forbid = staticmethod(reference.forbid)

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions = {
            dtype: {name: declare(library, f"{name}_{suffix}", types) for name, types in SIGNATURES.items()}
            for dtype, suffix in _SUFFIX.items()
        }
        self._packed_groups_size = declare(library, "packed_size_groups", SIGNATURES_OF_GROUPS["packed_size_groups"])
        self._pack_groups = declare(library, "pack_groups", SIGNATURES_OF_GROUPS["pack_groups"])
        self.rounded_bytes = declare(library, "rounded_bytes", SIGNATURES_OF_GROUPS["rounded_bytes"])
        self._use_matrix_unit = library.use_matrix_unit
        self._use_matrix_unit.argtypes, self._use_matrix_unit.restype = [c_int64], c_int64
        self.threads = self._pack_threads = torch.get_num_threads()
        self._empty: Callable[..., Tensor] = HugePages().empty

    @staticmethod
    def can_run(
        dtype: torch.dtype,
        head_dim: int,
        block_size: int,
        kv_dtype: torch.dtype | None = None,
        lora_dtype: torch.dtype | None = None,
    ) -> bool:
        dtypes_fit = dtype in _SUFFIX and kv_dtype in (None, dtype, torch.int8) and lora_dtype in (None, dtype)
        return dtypes_fit and head_dim % 16 == 0 and head_dim <= MAX_HEAD_DIM and block_size % 16 == 0

    def use_matrix_unit(self, *, is_on: bool) -> bool:
        """Set whether products of bf16 use the processor's matrix unit, for all `NativeOps` of this process. Return
        whether they do: False if the processor has none.
        """
        return bool(self._use_matrix_unit(is_on))

    def serves(self, scheme: Scheme) -> bool:
        if scheme.kind == "fp8":
            return False
        return scheme == DENSE or (scheme.group in GROUPS and scheme.scale_dtype in SCALE_DTYPES)

    def pack(self, weights: LinearWeights) -> LinearWeights:
        if any(tensor.is_meta for tensor in weights.tensors.values()):
            packed = self._packed_size_of(weights)
        elif weights.scheme == DENSE:
            weight = weights.tensors["weight"].contiguous()
            functions = self._functions[weight.dtype]
            packed = self._empty(functions["packed_size"](*weight.shape), dtype=weight.dtype)
            functions["pack"](weight.data_ptr(), packed.data_ptr(), *weight.shape, self._pack_threads)
        else:
            values, scales = weights.tensors["values"].contiguous(), weights.tensors["scales"].contiguous()
            offsets = weights.tensors[weights.scheme.offsets].contiguous() if weights.scheme.offsets else None
            shape, groups = (weights.out_features, weights.in_features), byref(_groups(weights.scheme))
            packed = self._empty(self._packed_groups_size(*shape, groups), dtype=torch.uint8)
            self._pack_groups(
                values.data_ptr(), scales.data_ptr(), _pointer(offsets), packed.data_ptr(), *shape, groups,
                self._pack_threads,
            )  # fmt: skip
        found = LinearWeights(weights.scheme, {"packed": packed}, weights.in_features, weights.out_features)
        return found.with_bias(weights.bias)

    def _packed_size_of(self, weights: LinearWeights) -> Tensor:
        """Return a tensor without memory, of the size of the packed weights."""
        shape = weights.out_features, weights.in_features
        if weights.scheme != DENSE:
            size = self._packed_groups_size(*shape, byref(_groups(weights.scheme)))
            return torch.empty(size, dtype=torch.uint8, device="meta")
        dtype = weights.tensors["weight"].dtype
        return torch.empty(self._functions[dtype]["packed_size"](*shape), dtype=dtype, device="meta")

    def fuse(self, weights: DecoderWeights, kv: list[KvCache], lora: LoraTables) -> "NativeForward":
        # Weights packed from now on belong to adapters and are packed on a thread beside running steps.
        self._empty, self._pack_threads = torch.empty, 1
        return NativeForward(self, weights, kv, lora)

    def forward(self, dtype: torch.dtype, model: structs.Model, step: structs.Step) -> None:
        self._functions[dtype]["forward"](byref(model), byref(step))

    def step_tables(self, batch: Batch, lora: LoraTables | None) -> NativeStepTables:
        found = routing_of(batch, lora)
        if found is None:
            return NativeStepTables(batch, None, ())
        assert lora is not None
        most = int(found.ranks.numpy()[list(batch.adapter_slots)].max())
        routing, keep = route(found, lora.page_rank, -(-most // lora.page_rank) * lora.page_rank)
        return NativeStepTables(batch, routing, keep)

    def embed(self, weights: LinearWeights, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
        if weights.scheme == DENSE:
            return weights.tensors["weight"][token_ids]
        out = torch.empty(len(token_ids), weights.in_features, dtype=dtype)
        self._functions[dtype]["embed"](byref(_packed(weights)), token_ids.data_ptr(), out.data_ptr(), len(token_ids))
        return out

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

    def linear(self, x: Tensor, weights: LinearWeights, group: LoraGroup | None, step: NativeStepTables) -> Tensor:
        y = torch.empty(len(x), weights.out_features, dtype=x.dtype)
        lora, routing, h = None, None, None
        if group is not None and step.routing is not None:
            lora, routing = byref(_lora_group(group)), byref(step.routing)
            h = torch.empty(_shrunk_size(step, len(group.offsets) - 1), dtype=x.dtype)
        self._functions[x.dtype]["linear"](
            x.data_ptr(), byref(_packed(weights)), lora, routing, y.data_ptr(), h.data_ptr() if h is not None else None,
            len(x), self.threads,
        )  # fmt: skip
        return y

    def rope_and_write_kv(
        self, qkv: Tensor, cos_sin: Tensor, kv: KvCache, step: NativeStepTables, norms: HeadNorms | None = None
    ) -> Tensor:
        """Rotate q inside qkv and return a view of it, `[T, num_heads, D]`; store k and v."""
        if norms is not None:
            heads = qkv.view(len(qkv), -1, kv.k.shape[3])
            ends = heads.shape[1] - 2 * kv.k.shape[1], heads.shape[1] - kv.k.shape[1]
            for part, weight in ((heads[:, : ends[0]], norms.q), (heads[:, ends[0] : ends[1]], norms.k)):
                part.copy_(self.rms_norm(part.reshape(-1, part.shape[2]), weight, norms.eps).view(part.shape))
        shape = _cache_shape(kv.k, qkv.shape[1] // kv.k.shape[3] - 2 * kv.k.shape[1])
        self._functions[qkv.dtype]["rope_and_write_kv"](
            qkv.data_ptr(), step.batch.positions.data_ptr(), cos_sin.data_ptr(), byref(_cache(kv)),
            step.batch.slot_mapping.data_ptr(), len(qkv), byref(shape),
        )  # fmt: skip
        return qkv.view(len(qkv), -1, shape.dim)[:, : shape.heads]

    def paged_attention(
        self, q: Tensor, kv: KvCache, step: NativeStepTables, scale: float, sliding_window: int, softcap: float = 0.0
    ) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype)
        b = step.batch
        attention = structs.Attention(
            _cache_shape(kv.k, q.shape[1]), q.data_ptr(), q.stride(0), _cache(kv),
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
        self._ops, self._weights, self._dtype = ops, weights, weights.dtype
        self._keep = (weights, kv, lora)
        layers = (structs.Layer * len(weights.layers))()
        for to, layer, caches, groups in zip(layers, weights.layers, kv, lora.groups, strict=True):
            for name in NORMS:
                setattr(to, name, _norm(getattr(layer, name)))
            to.qkv, to.o = _packed(layer.qkv), _packed(layer.o)
            to.gate_up, to.down = _packed(layer.gate_up), _packed(layer.down)
            to.cos_sin = layer.cos_sin.data_ptr()
            to.cache = _cache(caches)
            to.window = layer.sliding_window
            if groups:  # a draft model has none
                names = ("qkv", "o", "gate_up", "down")
                to.lora = (structs.LoraGroup * 4)(*(_lora_group(groups[name]) for name in names))
        first = weights.layers[0]
        hidden, intermediate = weights.embedding.in_features, first.down.in_features
        self._model = structs.Model(
            embedding=_packed(weights.embedding), layers=layers, norm=_norm(weights.norm),
            lm_head=_packed(weights.lm_head), num_layers=len(layers), hidden=hidden, intermediate=intermediate,
            threads=ops.threads, is_gelu=weights.activation == "gelu", cache=_cache_shape(kv[0].k, weights.num_heads),
            eps=weights.rms_norm_eps, scale=weights.attention_scale, softcap=weights.attention_softcap,
            embedding_scale=weights.embedding_scale,
        )  # fmt: skip
        # Elements per token in each of the four workspaces.
        narrow = max(intermediate, weights.num_heads * weights.head_dim, hidden)
        self._widths = (hidden, hidden, max(first.qkv.out_features, 2 * intermediate), narrow)
        # Bytes of a row of inputs rounded to 8 bits, for quantised weights; 0 if all weights are dense.
        self._rounded_width = max(_rounded_bytes(ops, w) for layer in weights.layers for w in _linears(layer, weights))
        self._workspaces: list[Tensor] = []
        self._rounded = torch.empty(0, dtype=torch.uint8)
        self._capacity = 0

    def __call__(self, batch: Batch, lora: LoraTables | None, inputs: Tensor | None = None) -> Tensor:
        if batch.num_tokens > self._capacity:
            self._capacity = max(64, 1 << (batch.num_tokens - 1).bit_length())
            self._workspaces = [torch.empty(self._capacity * width, dtype=self._dtype) for width in self._widths]
            self._rounded = torch.empty(self._capacity * self._rounded_width, dtype=torch.uint8)
        tables = self._ops.step_tables(batch, lora)
        logits = torch.empty(len(batch.logits_rows), self._weights.lm_head.out_features)
        h = torch.empty(_shrunk_size(tables, 3), dtype=self._dtype)
        routing = last_routing = tables.routing
        last_keep: tuple[object, ...] = ()  # kept until the call has ended
        if routing is not None and lora is not None and len(logits) < batch.num_tokens:
            last = LoraRouting(batch.adapter_index[batch.logits_rows], lora.page_table, lora.ranks)
            last_routing, last_keep = route(last, lora.page_rank, routing.width)
        model, token_ids = self._model, batch.token_ids
        if inputs is not None:  # treat the inputs as an embedding table, indexed by token number
            model, token_ids = structs.Model.from_buffer_copy(self._model), torch.arange(len(inputs))
            model.embedding, model.embedding_scale = _packed(dense(inputs)), 1.0
        step = structs.Step(
            token_ids.data_ptr(), batch.positions.data_ptr(), batch.slot_mapping.data_ptr(),
            batch.logits_rows.data_ptr(), batch.block_tables.data_ptr(), batch.query_start.data_ptr(),
            batch.context_lens.data_ptr(), batch.num_tokens, len(batch.context_lens), batch.block_tables.shape[1],
            len(logits), *(None if found is None else ctypes.pointer(found) for found in (routing, last_routing)),
            *(w.data_ptr() for w in self._workspaces), self._rounded.data_ptr(), h.data_ptr(), logits.data_ptr(),
        )  # fmt: skip
        self._ops.forward(self._dtype, model, step)
        del last_keep
        return logits

    def hidden(self, num_rows: int) -> Tensor:
        width = self._model.hidden
        return self._workspaces[3][: num_rows * width].view(num_rows, width)


def route(lora: LoraRouting, page_rank: int, width: int) -> tuple[structs.Routing, tuple[object, ...]]:
    """Return a routing in the library's form, and the objects that it points to. width: columns of h per projection."""
    order, items = segments(lora.adapter_index.numpy())
    routing = structs.Routing(
        lora.adapter_index.data_ptr(), order.ctypes.data, items.ctypes.data, lora.page_table.data_ptr(),
        lora.ranks.data_ptr(), len(items), lora.page_table.shape[1], page_rank, width,
    )  # fmt: skip
    return routing, (order, items, lora)


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


def _shrunk_size(step: NativeStepTables, slices: int) -> int:
    if step.routing is None:
        return 0
    return step.batch.num_tokens * slices * step.routing.width


def _packed(weights: LinearWeights) -> structs.Packed:
    data = weights.tensors.get("packed")
    return structs.Packed(
        (weights.tensors["weight"] if data is None else data).data_ptr(), _pointer(weights.bias), weights.in_features,
        weights.out_features, _groups(weights.scheme),
    )  # fmt: skip


def _groups(scheme: Scheme) -> structs.Groups:
    if scheme.scale_dtype is None:
        return structs.Groups()
    bits = 8 if scheme.kind == "int8" else 4
    return structs.Groups(bits, scheme.group, SCALE_DTYPES.index(scheme.scale_dtype), OFFSETS.index(scheme.offsets))


def _linears(layer: LayerWeights, weights: DecoderWeights) -> tuple[LinearWeights, ...]:
    return layer.qkv, layer.o, layer.gate_up, layer.down, weights.lm_head


def _rounded_bytes(ops: NativeOps, weights: LinearWeights) -> int:
    if weights.scheme == DENSE:
        return 0
    return ops.rounded_bytes(weights.in_features, byref(_groups(weights.scheme)))


def _norm(weight: Tensor | None) -> structs.Norm:
    return structs.Norm() if weight is None else structs.Norm(weight.data_ptr(), weight.dtype == torch.float32)


def _lora_group(group: LoraGroup) -> structs.LoraGroup:
    offsets = (c_int64 * 4)(*group.offsets)
    return structs.LoraGroup(
        group.a_pages.data_ptr(), group.b_pages.data_ptr(), group.scales.data_ptr(), len(group.offsets) - 1,
        group.a_pages.shape[3], group.offsets[-1], group.a_pages.stride(0), group.b_pages.stride(0),
        group.scales.stride(0), offsets,
    )  # fmt: skip


def _cache(kv: KvCache) -> structs.Cache:
    return structs.Cache(kv.k.data_ptr(), kv.v.data_ptr(), _pointer(kv.k_scales), _pointer(kv.v_scales))


def _cache_shape(cache: Tensor, heads: int) -> structs.CacheShape:
    return structs.CacheShape(heads, cache.shape[1], cache.shape[3], cache.shape[2])


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
