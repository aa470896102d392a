"""The ops of the model, and which implementation serves a device. Chosen once, when the engine starts."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.batch import Batch
from kernels.reference import LARGEST, LoraGroup, LoraRouting


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight in the layout its backend reads best. `weight` is the backend's own; bias `[out_features]` or None."""

    weight: Any
    bias: Tensor | None
    in_features: int
    out_features: int


def dense_linear(weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    """The layout of backends whose products are torch's own."""
    return PackedLinear(weight, bias, weight.shape[1], weight.shape[0])


@dataclass(frozen=True, slots=True)
class EmbeddingLora:
    """LoRA on the embedding: row t of the inputs += scale * table[token t] expand^T. table `[vocab, r]`."""

    table: Tensor
    expand: PackedLinear
    scale: float


@dataclass(frozen=True, slots=True)
class HeadLora:
    """LoRA on lm_head: logits += scale * (hidden shrink^T) expand^T. shrink `[r, hidden]`, expand `[vocab, r]`."""

    shrink: PackedLinear
    expand: PackedLinear
    scale: float


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Norms `[hidden]`; q_norm and k_norm `[head_dim]` where the family norms heads."""

    input_norm: Tensor
    qkv: PackedLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: PackedLinear
    post_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear
    sliding_window: int


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """A whole decoder. embedding `[vocab, hidden]`, cos_sin `[max_model_len, head_dim]` fp32 (cos | sin)."""

    embedding: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    lm_head: PackedLinear
    cos_sin: Tensor
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float


class KvCache(NamedTuple):
    """One layer's keys and values, `[num_blocks, num_kv_heads, block_size, head_dim]`; scales beside 8 bits only."""

    k: Tensor
    v: Tensor
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None


class LoraTables(Protocol):
    """What a step needs of the device pool: where each adapter's rank pages are, and each layer's pages.

    embeddings, heads: by slot, of the few adapters that have LoRA there.
    """

    groups: list[dict[str, LoraGroup]]
    embeddings: dict[int, EmbeddingLora]
    heads: dict[int, HeadLora]
    page_rank: int

    page_table: Tensor
    ranks: Tensor


class FusedForward(Protocol):
    """A whole step in one call."""

    def __call__(self, batch: Batch, lora: LoraTables | None, inputs: Tensor | None = None) -> Tensor:
        """`[L, vocab]` fp32 logits of the batch's `logits_rows`. inputs: `[T, hidden]`, in place of the embedding's."""
        ...

    def hidden(self, num_rows: int) -> Tensor:
        """What lm_head saw in the last call, `[num_rows, hidden]`; good until the next."""
        ...


class Ops(Protocol):
    """One step asks for a `plan` once and hands it to every op. Semantics are those of `kernels.reference`."""

    def pack_linear(self, weight: Tensor, bias: Tensor | None = None) -> PackedLinear: ...

    def fuse(self, weights: DecoderWeights, kv: list[KvCache], lora: LoraTables) -> FusedForward | None:
        """The whole forward pass over these caches and pages as one call, if the backend has it."""
        ...

    def plan(self, batch: Batch, lora: LoraTables | None) -> Any: ...

    def embed(self, weight: Tensor, token_ids: Tensor) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def linear(self, x: Tensor, packed: PackedLinear, group: LoraGroup | None, plan: Any) -> Tensor: ...

    def rope_and_write_kv(self, qkv: Tensor, cos_sin: Tensor, kv: KvCache, plan: Any) -> Tensor: ...

    def paged_attention(self, q: Tensor, kv: KvCache, plan: Any, scale: float, sliding_window: int) -> Tensor: ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor: ...

    def sample(
        self,
        logits: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        seeds: Tensor,
        positions: Tensor,
    ) -> Tensor: ...


def routing_of(batch: Batch, lora: LoraTables | None) -> LoraRouting | None:
    """None when no token of the batch uses an adapter: then no LoRA code runs at all."""
    if lora is None or not batch.adapter_slots:
        return None
    return LoraRouting(batch.adapter_index, lora.page_table, lora.ranks)


def pick_ops(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    kv_dtype: torch.dtype | None = None,
    lora_dtype: torch.dtype | None = None,
) -> Ops:
    """Triton on a GPU; on the CPU the native library where a compiler is at hand, else plain torch.

    kv_dtype, lora_dtype: of the caches and the rank pages, None for the model's. The native library has none of 8 bits:
    plain torch serves them.
    """
    if device.type == "cuda":
        from kernels.gpu.ops import TritonOps

        return TritonOps()
    from kernels.cpu.native import NativeOps
    from kernels.cpu.native_build import load
    from kernels.cpu.plain import TorchOps

    native = NativeOps.serves(dtype, head_dim, block_size) and not {kv_dtype, lora_dtype} & LARGEST.keys()
    library = load() if native else None
    if library is not None:
        return NativeOps(library)
    return TorchOps()
