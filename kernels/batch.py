"""Input of every op in a step: one layout for prefill, decode and mixed batches, on the CPU and the GPU."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

# `Batch.adapter_slots` of a CUDA graph's batch, whose adapters are known only on the device.
ANY_ADAPTERS = (-1,)


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of B requests, concatenated. Shapes are named as in `kernels.reference`.

    token_ids, positions, slot_mapping: `[T]` int64. query_start `[B + 1]`, context_lens `[B]`, block_tables
    `[B, max_blocks]`, adapter_index `[T]`: int32. logits_rows: `[L]` int64, distinct rows whose logits are needed,
    ascending.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_start: Tensor
    context_lens: Tensor
    block_tables: Tensor
    adapter_index: Tensor
    logits_rows: Tensor
    max_query_len: int
    adapter_slots: tuple[int, ...]
    """The distinct adapters in the batch; empty means that no LoRA runs at all."""
    has_base_rows: bool = True
    """False where the host knows that every token uses an adapter."""
    embedding_rows: Mapping[int, Tensor] = field(default_factory=dict)
    head_rows: Mapping[int, Tensor] = field(default_factory=dict)
    """By slot, for adapters with LoRA on embed_tokens or lm_head: their tokens, and their rows of `logits_rows`."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)
