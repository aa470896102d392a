"""Interface of the ops of a decoder, and the types of their arguments, independent of their implementations."""

from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from kernels.batch import Batch
from kernels.reference import HeadNorms, LoraGroup, LoraRouting
from kernels.weights import LinearWeights, Scheme


@dataclass(frozen=True, slots=True)
class EmbeddingLora:
    """LoRA on the embedding: row t of the inputs += scale * table[token t] expand^T. table `[vocab, r]`."""

    table: Tensor
    expand: LinearWeights
    scale: float


@dataclass(frozen=True, slots=True)
class HeadLora:
    """LoRA on lm_head: logits += scale * (hidden shrink^T) expand^T. shrink `[r, hidden]`, expand `[vocab, r]`."""

    shrink: LinearWeights
    expand: LinearWeights
    scale: float


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of a decoder layer: attention, then a gated MLP, each with a norm in front.

    Norms `[hidden]`; q_norm and k_norm `[head_dim]` if the family normalises heads; attention_output_norm and
    mlp_output_norm if it normalises a sublayer's output before adding it to the residual. cos_sin `[max_model_len,
    head_dim]` fp32 (cos | sin), shared by layers with the same rotary embedding. sliding_window: 0 for full attention.
    """

    input_norm: Tensor
    qkv: LinearWeights
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: LinearWeights
    mlp_norm: Tensor
    gate_up: LinearWeights
    down: LinearWeights
    cos_sin: Tensor
    sliding_window: int
    attention_output_norm: Tensor | None = None
    mlp_output_norm: Tensor | None = None


# Fields of `LayerWeights` that are tensors or None.
LAYER_TENSORS = tuple(each.name for each in fields(LayerWeights) if each.type in (Tensor, Tensor | None))


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """Weights and constants of a decoder: everything that a backend needs to fuse the forward pass.

    dtype: dtype of activations. embedding `[vocab, hidden]`: its rows are multiplied by embedding_scale; a quantised
    one is packed, and is the same object as lm_head if the two are tied. Norms are all in `dtype` or all in fp32 (see
    `kernels.reference.rms_norm`). activation: the gate's. attention_scale, attention_softcap: see
    `kernels.reference.paged_attention`.
    """

    dtype: torch.dtype
    embedding: LinearWeights
    layers: list[LayerWeights]
    norm: Tensor
    lm_head: LinearWeights
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    attention_scale: float
    attention_softcap: float = 0.0
    embedding_scale: float = 1.0
    activation: Literal["silu", "gelu"] = "silu"

    @property
    def matrices(self) -> list[LinearWeights]:
        """Return the matrices that every step reads as a whole."""
        return [*(part for each in self.layers for part in (each.qkv, each.o, each.gate_up, each.down)), self.lm_head]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all weights; those in two places count once."""
        tensors = [tensor for matrix in (self.embedding, *self.matrices) for tensor in matrix.tensors.values()]
        tensors += [
            value for each in self.layers for name in LAYER_TENSORS if (value := getattr(each, name)) is not None
        ]
        return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in (*tensors, self.norm)}.values())


class KvCache(NamedTuple):
    """The keys and values of a layer, `[num_blocks, num_kv_heads, block_size, head_dim]`.

    Only 8-bit caches have scales.
    """

    k: Tensor
    v: Tensor
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None


class LoraTables(Protocol):
    """The device pool's tables for a step: the location of each adapter's rank pages, and each layer's pages.

    embeddings, heads: by slot, for the few adapters that have LoRA there.
    """

    groups: list[dict[str, LoraGroup]]
    embeddings: dict[int, EmbeddingLora]
    heads: dict[int, HeadLora]
    page_rank: int

    page_table: Tensor
    ranks: Tensor


class FusedForward(Protocol):
    """A backend's forward pass that runs a whole step in one call."""

    def __call__(self, batch: Batch, lora: LoraTables | None, inputs: Tensor | None = None) -> Tensor:
        """Return `[L, vocab]` fp32 logits of the batch's `logits_rows`.

        inputs: `[T, hidden]`, replaces the embedding's output.
        """
        ...

    def hidden(self, num_rows: int) -> Tensor:
        """Return lm_head's input in the last call, `[num_rows, hidden]`; valid until the next call."""
        ...


class Ops(Protocol):
    """The ops of a backend.

    Each step builds its tables once (`step_tables`) and passes them to every op as `step`. Semantics are those of
    `kernels.reference`.
    """

    def serves(self, scheme: Scheme) -> bool:
        """Return whether `pack` accepts weights of this scheme. Readers dequantise a checkpoint's other weights."""
        ...

    def pack(self, weights: LinearWeights) -> LinearWeights:
        """Return weights in the backend's preferred layout. Their values do not change."""
        ...

    def fuse(self, weights: DecoderWeights, kv: list[KvCache], lora: LoraTables) -> FusedForward | None:
        """Return the whole forward pass over these caches and pages as one call, or None if the backend has none."""
        ...

    def step_tables(self, batch: Batch, lora: LoraTables | None) -> Any: ...

    def embed(self, weights: LinearWeights, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the embeddings of tokens, `[T, hidden]`. weights: unpacked if dense, else packed."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def linear(self, x: Tensor, weights: LinearWeights, group: LoraGroup | None, step: Any) -> Tensor: ...

    def rope_and_write_kv(
        self, qkv: Tensor, cos_sin: Tensor, kv: KvCache, step: Any, norms: HeadNorms | None = None
    ) -> Tensor: ...

    def paged_attention(
        self, q: Tensor, kv: KvCache, step: Any, scale: float, sliding_window: int, softcap: float = 0.0
    ) -> Tensor: ...

    def silu_and_mul(self, gate_up: Tensor) -> Tensor: ...

    def gelu_and_mul(self, gate_up: Tensor) -> Tensor: ...

    def penalise(self, logits: Tensor, rows: Tensor, seats: Tensor, counts: Tensor, penalties: Tensor) -> None: ...

    def forbid(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None: ...

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
    """Return the batch's routing, or None if no token uses an adapter; then no LoRA code runs."""
    if lora is None or not batch.adapter_slots:
        return None
    return LoraRouting(batch.adapter_index, lora.page_table, lora.ranks)
