"""LoRA on embed_tokens and lm_head. Few adapters have it, so it runs as a separate pass.

The host knows the rows of each adapter, so neither function waits for the device.
"""

from collections.abc import Mapping

from torch import Tensor

from kernels.ops import LoraTables, Ops


def add_to_inputs(
    inputs: Tensor, token_ids: Tensor, factor: float, rows: Mapping[int, Tensor], ops: Ops, lora: LoraTables
) -> None:
    """Add the deltas of embed_tokens, times `factor`, in place. inputs: `[T, hidden]`, the embeddings of token_ids
    `[T]`; rows: the tokens of each slot.
    """
    for slot, index in rows.items():
        found = lora.embeddings[slot]
        delta = ops.linear(found.table[token_ids[index]], found.expand, None, None)
        inputs[index] = (inputs[index].float() + factor * found.scale * delta.float()).to(inputs.dtype)


def add_to_logits(logits: Tensor, hidden: Tensor, rows: Mapping[int, Tensor], ops: Ops, lora: LoraTables) -> None:
    """Add the deltas of lm_head in place. logits: `[L, vocab]` fp32; hidden: `[L, hidden]`, the input of lm_head; rows:
    those of each slot.
    """
    for slot, index in rows.items():
        found = lora.heads[slot]
        delta = ops.linear(ops.linear(hidden[index], found.shrink, None, None), found.expand, None, None)
        logits.index_add_(0, index, delta.float(), alpha=found.scale)
