"""Edits of logits before sampling, in place, one launch for all rows: penalties by token counts, and masks of bits.

Same semantics as `kernels.reference.penalise` and `kernels.reference.forbid`. Both are memory-bound and read only the
rows that they change.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference import IN_PROMPT

BLOCK = 4096


def penalise(logits: Tensor, rows: Tensor, seats: Tensor, counts: Tensor, penalties: Tensor) -> None:
    """Apply penalties to the given rows of logits `[B, vocab]` fp32.

    rows, seats: `[n]` int64; counts `[num_seats, vocab]` int32; penalties `[3, n]` fp32. Raises ValueError for
    unsuitable shapes or dtypes.
    """
    _check(logits)
    if counts.shape[1] != logits.shape[1] or counts.dtype != torch.int32 or not counts.is_contiguous():
        raise ValueError(f"counts: expected contiguous int32 [seats, {logits.shape[1]}], got {tuple(counts.shape)}")
    if penalties.shape != (3, len(rows)) or penalties.dtype != torch.float32 or not penalties.is_contiguous():
        raise ValueError(f"penalties: expected contiguous float32 [3, {len(rows)}], got {tuple(penalties.shape)}")
    vocab = logits.shape[1]
    if len(rows):
        _penalise[(len(rows), triton.cdiv(vocab, BLOCK))](
            logits, rows, seats, counts, penalties, len(rows), logits.stride(0), IN_PROMPT, VOCAB=vocab, BLOCK=BLOCK
        )


def forbid(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Set the logits of tokens whose bit is 0 to -inf, in the given rows of logits `[B, vocab]` fp32.

    rows `[n]` int64; bits `[n, ceil(vocab / 32)]` int32. Raises ValueError for unsuitable shapes or dtypes.
    """
    _check(logits)
    vocab = logits.shape[1]
    if bits.shape != (len(rows), -(-vocab // 32)) or bits.dtype != torch.int32 or not bits.is_contiguous():
        raise ValueError(f"bits: expected contiguous int32 [{len(rows)}, {-(-vocab // 32)}], got {tuple(bits.shape)}")
    if len(rows):
        _forbid[(len(rows), triton.cdiv(vocab, BLOCK))](
            logits, rows, bits, logits.stride(0), bits.shape[1], VOCAB=vocab, BLOCK=BLOCK
        )


def _check(logits: Tensor) -> None:
    if logits.dim() != 2 or logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(f"logits: expected float32 [B, vocab] with contiguous rows, got {logits.dtype} {logits.shape}")


# Numbers of rows must not create new variants, nor the position of a step's arrays in their upload buffer.
@triton.jit(do_not_specialize=("num_rows",), do_not_specialize_on_alignment=("rows", "seats", "penalties"))
def _penalise(  # type: ignore[no-untyped-def]
    logits, rows, seats, counts, penalties, num_rows, stride, in_prompt, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = token < VOCAB
    count = tl.load(counts + tl.load(seats + i).to(tl.int64) * VOCAB + token, mask=mask, other=0)
    seen = count > 0
    at = logits + tl.load(rows + i).to(tl.int64) * stride + token
    x = tl.load(at, mask=mask & seen, other=0.0)
    repetition = tl.load(penalties + i)
    presence = tl.load(penalties + num_rows + i)
    frequency = tl.load(penalties + 2 * num_rows + i)
    x = tl.where(x > 0, x / repetition, x * repetition)
    used = (count % in_prompt).to(tl.float32)
    x = tl.where(used > 0, x - (presence + frequency * used), x)
    tl.store(at, x, mask=mask & seen)


@triton.jit(do_not_specialize_on_alignment=("rows", "bits"))
def _forbid(  # type: ignore[no-untyped-def]
    logits, rows, bits, stride, num_words, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    i = tl.program_id(0)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = token < VOCAB
    word = tl.load(bits + i.to(tl.int64) * num_words + token // 32, mask=mask, other=-1)
    is_forbidden = ((word >> (token % 32)) & 1) == 0
    at = logits + tl.load(rows + i).to(tl.int64) * stride + token
    tl.store(at, tl.full((BLOCK,), float("-inf"), dtype=tl.float32), mask=mask & is_forbidden)
