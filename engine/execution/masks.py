"""Masks on logits, from grammars and allowed tokens, for all constrained rows of a step; for any grammar library."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.execution.transfer import upload
from kernels.ops import Ops
from kernels.platform import platform_of


class Mask(Protocol):
    """Source of a mask: `engine.structured.compiler.Matcher` or `engine.scheduling.token_rules.AllowedTokens`."""

    def fill(self, bits: np.ndarray) -> None:
        """Set the bits of the tokens that may come next: bit i of uint32 `[ceil(vocab / 32)]`, all zero before, is
        token i.
        """


def constrain(logits: Tensor, masks: Sequence[tuple[int, Mask]], ops: Ops) -> None:
    """Set the logits of forbidden tokens to -inf in place. logits: `[n, vocab]` fp32. masks: pairs of a row and its
    mask; a row without a mask is not changed.
    """
    if not masks:
        return
    rows = [row for row, _ in masks]
    platform = platform_of(logits.device)
    # The buffer is the one that is copied to the device: another copy of 64 masks of 128k tokens takes 0.07 ms.
    words = platform.staging([len(rows), (logits.shape[1] + 31) // 32], torch.int32)
    bits = words.numpy().view(np.uint32)
    bits.fill(0)
    for row_bits, (_, mask) in zip(bits, masks, strict=True):
        mask.fill(row_bits)
    if platform.is_host:
        for row, row_bits in zip(rows, bits, strict=True):
            _forbid(logits[row].numpy(), row_bits)
    else:
        [index] = upload(logits.device, [np.array(rows)])
        ops.forbid(logits, index, words.to(logits.device, non_blocking=True))


def _forbid(row: np.ndarray, bits: np.ndarray) -> None:
    """Mask one row `[vocab]` on the CPU. A mask allows few tokens or nearly all, so only the smaller set is written.

    Uses numpy, not torch: 15 to 40 us for a row of 49k tokens; torch's threads take longer to wake (docs/lab-notes.md).
    """
    allowed = np.unpackbits(bits.view(np.uint8), count=len(row), bitorder="little").view(np.bool_)
    if np.count_nonzero(allowed) * 2 > len(row):
        row[np.flatnonzero(~allowed)] = -np.inf
    else:
        ids = np.flatnonzero(allowed)
        kept = row[ids]
        row.fill(-np.inf)
        row[ids] = kept
