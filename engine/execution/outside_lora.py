"""LoRA outside the decoder's layers, on embed_tokens and lm_head. Few adapters have it, so it runs as a separate pass.

A batch without such an adapter costs two lookups in empty dicts.
"""

import torch
from torch import Tensor

from kernels.batch import Batch
from kernels.ops import LoraTables, Ops


def embed(embedding: Tensor, factor: float, batch: Batch, ops: Ops, lora: LoraTables | None) -> Tensor | None:
    """Return `[T, hidden]` embeddings of the batch's tokens plus their adapters' deltas, times `factor`.

    Returns None if no adapter of the batch has LoRA on the embedding.
    """
    slots = [slot for slot in batch.adapter_slots if slot in lora.embeddings] if lora is not None else []
    if lora is None or not slots:
        return None
    inputs = ops.embed(embedding, batch.token_ids)
    if factor != 1:
        inputs *= factor
    for slot in slots:
        found = lora.embeddings[slot]
        rows = torch.nonzero(batch.adapter_index == slot).flatten()
        delta = ops.linear(found.table[batch.token_ids[rows]], found.expand, None, None)
        inputs[rows] = (inputs[rows].float() + factor * found.scale * delta.float()).to(inputs.dtype)
    return inputs


def add_to_logits(logits: Tensor, hidden: Tensor, batch: Batch, ops: Ops, lora: LoraTables | None) -> None:
    """Add the deltas of lm_head in place. logits: `[L, vocab]` fp32; hidden: `[L, hidden]`, the input of lm_head."""
    slots = [slot for slot in batch.adapter_slots if slot in lora.heads] if lora is not None else []
    if lora is None or not slots:
        return
    index = batch.adapter_index[batch.logits_rows]
    for slot in slots:
        found = lora.heads[slot]
        rows = torch.nonzero(index == slot).flatten()
        if len(rows):
            delta = ops.linear(ops.linear(hidden[rows], found.shrink, None, None), found.expand, None, None)
            logits.index_add_(0, rows, delta.float(), alpha=found.scale)
