"""Decode steps as CUDA graphs: one for each number of rows, with and without LoRA.

All data that changes between steps is in static buffers, which one copy refills. A graph reads them, so it replays with
any requests, contexts and mix of adapters. Rows beyond the step's own are padding: a negative slot stores no key, a
context of 0 reads none, adapter -1 is the base model. Without a GPU, a replay calls the step again.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.execution.layout import Layout
from engine.execution.transfer import upload
from kernels.batch import ANY_ADAPTERS, Batch
from kernels.ops import LoraTables
from kernels.platform import platform_of

Forward = Callable[[Batch], Tensor]
Replay = Callable[[], Tensor]

# Row indices of `DecodeGraphs._fields`.
_TOKEN_IDS, _SEATS, _POSITIONS, _SLOTS, _CONTEXT_LENS, _ADAPTERS = range(6)


def default_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the numbers of rows to capture: 1, 2, 4, then every 8 up to 64, every 16 beyond, so that few rows are
    padding.
    """
    sizes = {1, 2, 4, *range(8, 64, 8), *range(64, max_num_seqs, 16), max_num_seqs}
    return tuple(sorted(size for size in sizes if size <= max_num_seqs))


class DecodeGraphs:
    """CUDA graphs of decode steps, captured on construction.

    The largest is captured first, into one memory pool that all share, so the logits of a replay are valid until the
    next one.

    forward: returns `[L, vocab]` fp32 logits of a batch; launches only device work that a graph can contain.
    sizes: numbers of rows to capture.
    last_tokens: the newest token of each seat.
    max_model_len: tokens of the longest context, in blocks of block_size.
    progress: called with the number of captured graphs, and of all graphs.
    """

    def __init__(
        self,
        forward: Forward,
        sizes: Sequence[int],
        lora: LoraTables,
        last_tokens: Tensor,
        *,
        max_model_len: int,
        block_size: int,
        progress: Callable[[int, int], None],
    ) -> None:
        self._forward, self._lora, self._last_tokens = forward, lora, last_tokens
        self._sizes = sorted(sizes)
        self._device = last_tokens.device
        self._pool: Any = None  # torch names no type for it
        most = self._sizes[-1]
        self._tables = torch.zeros(most, -(-max_model_len // block_size), dtype=torch.int32, device=self._device)
        self._row_starts = torch.arange(most + 1, dtype=torch.int32, device=self._device)
        self._rows = torch.arange(most, device=self._device)
        self._fields = {size: self._padding(size) for size in self._sizes}
        self._replays: dict[tuple[int, bool], Replay] = {}
        for size in reversed(self._sizes):
            for with_lora in (True, False):
                self._replays[size, with_lora] = self._capture(size, with_lora)
                progress(len(self._replays), 2 * len(self._sizes))

    def run(self, layout: Layout) -> Tensor | None:
        """Return the logits of the layout's `logits_rows`. Return None for a step without a graph: one with prompt
        tokens, one with more rows than the largest graph, or one with an adapter on embed_tokens or lm_head.
        """
        num_rows, lora = len(layout.seats), self._lora
        if len(layout.token_ids) != num_rows or num_rows > self._sizes[-1]:
            return None
        adapters = layout.adapter_slots
        if any(slot in lora.embeddings or slot in lora.heads for slot in adapters):
            return None
        size = next(size for size in self._sizes if size >= num_rows)
        fields = np.zeros((6, size), np.int64)
        fields[_SLOTS] = fields[_ADAPTERS] = -1
        fields[:, :num_rows] = (
            layout.token_ids, layout.seats, layout.positions, layout.slots, layout.context_lens, layout.adapters
        )  # fmt: skip
        new_fields, new_tables, logits_rows = upload(self._device, (fields, layout.block_tables, layout.logits_rows))
        self._fields[size].copy_(new_fields)
        self._tables[:num_rows, : new_tables.shape[1]].copy_(new_tables)
        logits = self._replays[size, bool(adapters)]()
        return logits[:num_rows] if len(logits_rows) == num_rows else logits[logits_rows]

    def _padding(self, size: int) -> Tensor:
        fields = torch.zeros(6, size, dtype=torch.int64, device=self._device)
        fields[_SLOTS] = fields[_ADAPTERS] = -1
        return fields

    def _capture(self, size: int, with_lora: bool) -> Replay:
        def step() -> Tensor:
            return self._forward(self._batch(size, with_lora))

        replay, self._pool = platform_of(self._device).capture(step, self._pool)
        return replay

    def _batch(self, size: int, with_lora: bool) -> Batch:
        fields = self._fields[size]
        newest = self._last_tokens[fields[_SEATS]]
        return Batch(
            token_ids=torch.where(fields[_TOKEN_IDS] < 0, newest, fields[_TOKEN_IDS]),
            positions=fields[_POSITIONS],
            slot_mapping=fields[_SLOTS],
            query_start=self._row_starts[: size + 1],
            context_lens=fields[_CONTEXT_LENS].to(torch.int32),
            block_tables=self._tables[:size],
            adapter_index=fields[_ADAPTERS].to(torch.int32),
            logits_rows=self._rows[:size],
            max_query_len=1,
            adapter_slots=ANY_ADAPTERS if with_lora else (),
        )
