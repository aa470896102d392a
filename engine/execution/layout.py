"""Layout of a step: its plan as flat arrays on the host, and these as the tensors of `kernels.batch.Batch`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from engine.execution.transfer import upload
from engine.scheduling.request import BASE_SERVED, MIXED_SERVED, Request
from kernels.batch import Batch
from wire.digests import digest_name


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The logits rows `row:row + num_tokens` of a request with prompt_logprobs, from position `first` on."""

    request: Request
    first: int
    num_tokens: int
    row: int


@dataclass(frozen=True, slots=True)
class Layout:
    """A step on the host, T tokens of B requests; dtypes and shapes as in `Batch`.

    token_ids: -1 for a token that only the device has.
    seats, adapters, counts: per request, `[B]`; adapters is -1 where no token of the step uses the adapter.
    base_rows: ranges `[start, end)` of rows before an activated LoRA applies, in requests whose later rows use it.
    sampled: the requests that receive a token; `sampled_rows`: their rows of the logits.
    """

    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    query_start: np.ndarray
    context_lens: np.ndarray
    block_tables: np.ndarray
    logits_rows: np.ndarray
    seats: np.ndarray
    adapters: np.ndarray
    counts: np.ndarray
    base_rows: list[tuple[int, int]]
    sampled: list[Request]
    sampled_rows: list[int]
    prompt_rows: list[PromptRows]

    @property
    def adapter_slots(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.adapters.tolist()) - {-1}))

    @property
    def token_adapters(self) -> np.ndarray:
        """Return the adapter's slot of each token, `[T]`."""
        slots = np.repeat(self.adapters, self.counts)
        for start, end in self.base_rows:
            slots[start:end] = -1
        return slots


class Planner:
    """Builder of layouts. Each seat's block table is kept between steps, so that only new blocks are written.

    slot_digests: the digest of the adapter in each slot of the device pool, "" for an empty slot.
    """

    def __init__(self, max_num_seqs: int, max_blocks: int, block_size: int, slot_digests: Sequence[str] = ()) -> None:
        self.block_size = block_size
        self._slot_digests = slot_digests
        self._tables = np.zeros((max_num_seqs, max_blocks), np.int32)
        self._held: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self._written = [0] * max_num_seqs

    def lay_out(self, plan: Mapping[Request, int]) -> Layout:
        """Lay out the plan's requests in its order. The rows of logits are every position of a prompt with
        prompt_logprobs, and otherwise the last token of each request whose tokens this step completes.
        """
        token_ids: list[int] = []
        seats: list[int] = []
        firsts: list[int] = []
        adapters: list[int] = []
        base_rows: list[tuple[int, int]] = []
        rows: list[int] = []
        sampled_rows: list[int] = []
        sampled: list[Request] = []
        prompt_rows: list[PromptRows] = []
        num_blocks = 1
        for request, n in plan.items():
            first, known, blocks = request.num_computed, request.token_ids, request.blocks
            self._write(request.seat, blocks)
            num_blocks = max(num_blocks, len(blocks))
            if n == 1:
                token_ids.append(known[first] if first < len(known) else -1)
            else:
                token_ids += known[first : first + n]
            seats.append(request.seat)
            firsts.append(first)
            adapters.append(_slot(request, n, len(token_ids), base_rows))
            request.record_served(self._served(request.adapter_slot))
            end = len(token_ids)
            if request.wants_prompt_logprobs:
                prompt_rows.append(PromptRows(request, first, n, len(rows)))
                rows += range(end - n, end)
            elif first + n == request.num_tokens:
                rows.append(end - 1)
            if first + n == request.num_tokens:
                sampled.append(request)
                sampled_rows.append(len(rows) - 1)
        counts = np.fromiter(plan.values(), np.int64, len(plan))
        starts = np.zeros(len(plan) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        first_at = np.array(firsts, np.int64)
        seat_of = np.array(seats, np.int64)
        positions, owners = _by_token(first_at, seat_of, starts, counts)
        size = self.block_size
        return Layout(
            token_ids=np.array(token_ids, np.int64),
            positions=positions,
            slots=self._tables[owners, positions // size].astype(np.int64) * size + positions % size,
            query_start=starts,
            context_lens=(first_at + counts).astype(np.int32),
            block_tables=np.take(self._tables[:, :num_blocks], seat_of, axis=0),
            logits_rows=np.array(rows, np.int64),
            seats=seat_of,
            adapters=np.array(adapters, np.int32),
            counts=counts,
            base_rows=base_rows,
            sampled=sampled,
            sampled_rows=sampled_rows,
            prompt_rows=prompt_rows,
        )

    def _served(self, slot: int) -> str:
        """Return the receipt of a slot. Pages of an unknown adapter count as mixed, because no request named them."""
        if slot < 0:
            return BASE_SERVED
        digest = self._slot_digests[slot]
        return digest_name(digest) if digest else MIXED_SERVED

    def _write(self, seat: int, blocks: list[int]) -> None:
        if self._held[seat] is not blocks:  # blocks of another request, or of the same one after a preemption
            self._held[seat] = blocks
            self._written[seat] = 0
        written = self._written[seat]
        if written < len(blocks):
            self._tables[seat, written : len(blocks)] = blocks[written:]
            self._written[seat] = len(blocks)


def _slot(request: Request, n: int, end: int, base_rows: list[tuple[int, int]]) -> int:
    """Return the slot of a request's next `n` tokens, which end at row `end`; -1 if none uses the adapter.

    If an activated LoRA begins to apply among them, append the rows before it to `base_rows`.
    """
    num_base = min(n, max(0, request.adapter_start - request.num_computed))
    if 0 < num_base < n:
        base_rows.append((end - n, end - n + num_base))
    return request.adapter_slot if num_base < n else -1


def _by_token(
    first_at: np.ndarray, seats: np.ndarray, starts: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the position and the seat of each token. first_at, seats, counts: per request; starts: its first row."""
    if starts[-1] == len(counts):
        return first_at, seats
    return np.arange(starts[-1]) - np.repeat(starts[:-1] - first_at, counts), np.repeat(seats, counts)


def make_batch(layout: Layout, last_tokens: Tensor) -> Batch:
    """Return the layout as tensors on the device of `last_tokens`, the newest token of each seat, which replaces ids of
    -1.
    """
    unknown = np.flatnonzero(layout.token_ids < 0)
    owners = np.searchsorted(layout.query_start, unknown, side="right") - 1
    arrays = (
        layout.token_ids, layout.positions, layout.slots, layout.query_start, layout.context_lens, layout.block_tables,
        layout.token_adapters, layout.logits_rows, unknown, layout.seats[owners],
    )  # fmt: skip
    *tensors, rows, seats = upload(last_tokens.device, arrays)
    token_ids, positions, slots, query_start, context_lens, block_tables, adapter_index, logits_rows = tensors
    if len(unknown):
        token_ids.index_copy_(0, rows, last_tokens[seats])
    return Batch(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=slots,
        query_start=query_start,
        context_lens=context_lens,
        block_tables=block_tables,
        adapter_index=adapter_index,
        logits_rows=logits_rows,
        max_query_len=int(layout.counts.max()),
        adapter_slots=layout.adapter_slots,
        has_base_rows=bool(layout.base_rows) or bool((layout.adapters < 0).any()),
    )
