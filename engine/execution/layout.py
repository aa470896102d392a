"""Layout of a step: its plan as flat arrays on the host, and these as the tensors of `kernels.batch.Batch`."""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from torch import Tensor

from engine.execution.transfer import upload
from engine.scheduling.plan import Plan, Streams
from engine.scheduling.request import BASE_SERVED, MIXED_SERVED, Request, Status
from kernels.batch import Batch
from kernels.ops import LoraTables
from wire.digests import digest_name


@dataclass(frozen=True, slots=True)
class PromptRows:
    """The logits rows `row:row + num_tokens` of a request with prompt_logprobs, from position `first` on."""

    request: Request
    first: int
    num_tokens: int
    row: int


class Places(NamedTuple):
    """Places of the text whose tokens are sampled together. requests: each place's request. rows: each place's row of
    the logits. ahead: number of drafts before each place that are not among its request's tokens, `[n]` or for all.
    streams: the requests, if they are streams that all have their seats.
    """

    requests: list[Request]
    rows: list[int]
    ahead: np.ndarray | int = 0
    streams: Streams | None = None

    @property
    def seats(self) -> np.ndarray:
        """Return each place's seat, int64 `[n]`."""
        if self.streams is not None:
            return self.streams.seats
        return np.array([request.seat for request in self.requests], np.int64)


@dataclass(frozen=True, slots=True)
class Layout:
    """A step on the host, T tokens of B requests; dtypes and shapes as in `Batch`.

    token_ids: -1 for a token that only the device has.
    seats, firsts, counts, adapters, adapter_starts: `[B]` int64, per request: its seat, the position of its first token
    of the step, the number of its tokens, its adapter's slot or -1, and the position from which the adapter applies.
    tables: every seat's blocks, `[max_num_seqs, max_blocks]`; the next step changes them. num_blocks: maximum
    blocks of any request in the step. new_blocks: entries of the tables that changed since the previous step, `[3, n]`:
    seat, index, block.
    sampled: the requests that receive a token; `sampled_rows`: their rows of the logits, each followed by those of the
    request's drafts.
    streams: the plan's streams. None where the outputs may have news: if the layout was made from the plan again
    although the streams have moved on.
    """

    token_ids: np.ndarray
    query_start: np.ndarray
    logits_rows: np.ndarray
    seats: np.ndarray
    firsts: np.ndarray
    counts: np.ndarray
    adapters: np.ndarray
    adapter_starts: np.ndarray
    tables: np.ndarray
    num_blocks: int
    new_blocks: np.ndarray
    sampled: list[Request]
    sampled_rows: list[int]
    prompt_rows: list[PromptRows]
    streams: Streams | None

    @property
    def num_tokens(self) -> int:
        return int(self.query_start[-1])

    @property
    def context(self) -> int:
        """Return the number of tokens of all requests, those of this step included."""
        return int(self.firsts.sum()) + self.num_tokens

    @property
    def adapter_slots(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.adapters.tolist()) - {-1}))

    def next_places(self) -> Places:
        """Return the place of each sampled request's next token, followed by those after its drafts if it is plain: the
        draws of a plain request do not depend on the tokens before them. Requests that have ended or been preempted
        since are skipped.
        """
        requests, rows = self.sampled, self.sampled_rows
        if self.streams is not None and self.streams.are_seated:
            return Places(self.streams.requests, rows, streams=self.streams)
        if any(request.status is not Status.RUNNING for request in requests):
            found = [
                (request, row) for request, row in zip(requests, rows, strict=True) if request.status is Status.RUNNING
            ]
            requests, rows = [request for request, _ in found], [row for _, row in found]
        if not any(request.drafts and request.is_plain for request in requests):
            return Places(requests, rows)
        counts = [1 + len(request.drafts) if request.is_plain else 1 for request in requests]
        ahead = np.concatenate([np.arange(count) for count in counts])
        owners = [request for request, count in zip(requests, counts, strict=True) for _ in range(count)]
        return Places(owners, (np.repeat(rows, counts) + ahead).tolist(), ahead)

    def places_after(self, requests: Sequence[Request], number: int) -> Places:
        """Return the place after the first `number` drafts of each of these requests, which have them as tokens."""
        first = dict(zip(self.sampled, self.sampled_rows, strict=True))
        return Places(list(requests), [first[request] + number for request in requests])

    def positions(self) -> np.ndarray:
        """Return the position of each token, `[T]`."""
        starts = self.query_start
        if starts[-1] == len(self.counts):
            return self.firsts
        return np.arange(starts[-1]) - self.by_token(starts[:-1] - self.firsts)

    def by_token(self, values: np.ndarray) -> np.ndarray:
        """Repeat values `[B]` for the tokens of each request, `[T]`."""
        return values if self.query_start[-1] == len(self.counts) else np.repeat(values, self.counts)

    def token_adapters(self, positions: np.ndarray) -> np.ndarray:
        """Return the adapter's slot of each token, `[T]`."""
        if self.query_start[-1] == len(self.counts):
            return self.adapters
        return np.where(positions < self.by_token(self.adapter_starts), -1, self.by_token(self.adapters))


def rows_by_slot(adapters: np.ndarray, slots: Container[int]) -> dict[int, np.ndarray]:
    """Return the rows `[n]` of those slots that are among `adapters`.

    slots: only asked for the slots of `adapters`, because the loader's thread may add others meanwhile.
    """
    found = sorted(slot for slot in set(adapters.tolist()) if slot in slots)
    return {slot: np.flatnonzero(adapters == slot) for slot in found}


@dataclass(slots=True)
class _Kept:
    """The last layout of streams. slots: each request's adapter slot. receipts: the receipt of each slot."""

    streams: Streams
    step: int
    layout: Layout
    slots: list[int]
    receipts: dict[int, str]


class Planner:
    """Builder of layouts. Each seat's block table is kept between steps, so that only new blocks are written. The other
    arrays are kept for the next step of the same streams.

    slot_digests: the digest of the adapter in each slot of the device pool, "" for an empty slot.
    """

    def __init__(self, max_num_seqs: int, max_blocks: int, slot_digests: Sequence[str] = ()) -> None:
        self._slot_digests = slot_digests
        self._tables = np.zeros((max_num_seqs, max_blocks), np.int32)
        self._held: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self._written = [0] * max_num_seqs
        self._new: list[tuple[int, int, int]] = []
        self._receipts: dict[int, str] = {}  # of the slots of the last step that was laid out anew
        self._kept: _Kept | None = None

    def lay_out(self, plan: Plan) -> Layout:
        """Lay out the plan's requests in its order. The rows of logits are every position of a prompt with
        prompt_logprobs, and otherwise the last token of each request whose tokens this step completes, and its drafts.
        """
        streams, kept = plan.streams, self._kept
        if streams is None:
            self._kept = None
            return self._lay_out(plan)
        if kept is not None and kept.streams is streams and streams.step == kept.step + 1 and self._is_valid(kept):
            kept.step, kept.layout = streams.step, self._next(kept.layout, streams)
            return kept.layout
        layout, slots = self._lay_out(plan), [request.adapter_slot for request in streams.requests]
        self._kept = _Kept(streams, streams.step, layout, slots, self._receipts)
        return layout

    def _is_valid(self, kept: _Kept) -> bool:
        """Return whether each request still has the same slot, and each slot the same adapter. A change would be a
        defect elsewhere; then the layout is made anew, so that the receipts name the adapters that the step reads.
        """
        return [request.adapter_slot for request in kept.streams.requests] == kept.slots and all(
            self._served(slot) == receipt for slot, receipt in kept.receipts.items()
        )

    def _next(self, last: Layout, streams: Streams) -> Layout:
        """Lay out the next token of each stream."""
        requests, num_blocks = streams.requests, last.num_blocks
        for request in streams.grown:
            self._write(request.seat, request.blocks)
            num_blocks = max(num_blocks, len(request.blocks))
        token_ids = last.token_ids
        # Either all tokens are in flight now, or none. In the layout before, which may be the first one, a request that
        # resumed from cached blocks has a known token beside those in flight.
        if not requests[0].num_pending:
            token_ids = np.array([request.token_ids[-1] for request in requests], np.int64)
        elif token_ids.max() >= 0:
            token_ids = np.full(len(requests), -1, np.int64)
        return replace(
            last, token_ids=token_ids, firsts=last.firsts + 1, num_blocks=num_blocks, new_blocks=self._take_new()
        )

    def _take_new(self) -> np.ndarray:
        new, self._new = np.array(self._new, np.int64).reshape(-1, 3).T, []
        return new

    def _lay_out(self, plan: Plan) -> Layout:
        token_ids: list[int] = []
        seats: list[int] = []
        firsts: list[int] = []
        adapters: list[int] = []
        adapter_starts: list[int] = []
        rows: list[int] = []
        sampled_rows: list[int] = []
        sampled: list[Request] = []
        prompt_rows: list[PromptRows] = []
        num_blocks, end = self._update_seats(plan), 0
        for request, n in plan.items():
            first, known, drafts = request.num_computed, request.token_ids, request.drafts
            if n == 1:
                token_ids.append(known[first] if first < len(known) else -1)
            else:
                token_ids += known[first : first + n]
                token_ids += drafts
            end += n
            seats.append(request.seat)
            firsts.append(first)
            adapters.append(request.adapter_slot if first + n > request.adapter_start else -1)
            adapter_starts.append(request.adapter_start)
            is_complete = first + n == len(known) + request.num_pending + len(drafts)
            if request.params.prompt_logprobs is not None and request.wants_prompt_logprobs:
                prompt_rows.append(PromptRows(request, first, n, len(rows)))
                rows += range(end - n, end)
            elif is_complete:
                rows += range(end - 1 - len(drafts), end)
            if is_complete:
                sampled.append(request)
                sampled_rows.append(len(rows) - 1 - len(drafts))
        counts = np.fromiter(plan.values(), np.int64, len(plan))
        starts = np.zeros(len(plan) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        return Layout(
            token_ids=np.array(token_ids, np.int64),
            query_start=starts,
            logits_rows=np.array(rows, np.int64),
            seats=np.array(seats, np.int64),
            firsts=np.array(firsts, np.int64),
            counts=counts,
            adapters=np.array(adapters, np.int64),
            adapter_starts=np.array(adapter_starts, np.int64),
            tables=self._tables,
            num_blocks=num_blocks,
            new_blocks=self._take_new(),
            sampled=sampled,
            sampled_rows=sampled_rows,
            prompt_rows=prompt_rows,
            # The outputs of streams contain no receipt, and these may have changed.
            streams=None if plan.streams is None or plan.streams.was_moved_on else plan.streams,
        )

    def _update_seats(self, plan: Iterable[Request]) -> int:
        """Write the requests' new blocks to their tables, and record their receipts. Return the most blocks of one.

        It runs for every stream in every step, so it calls only what it must.
        """
        num_blocks, held, written = 1, self._held, self._written
        receipts = self._receipts = dict[int, str]()
        for request in plan:
            blocks, slot = request.blocks, request.adapter_slot
            if held[request.seat] is not blocks or written[request.seat] < len(blocks):
                self._write(request.seat, blocks)
            if len(blocks) > num_blocks:
                num_blocks = len(blocks)
            if slot not in receipts:
                receipts[slot] = self._served(slot)
            if request.served_digest != receipts[slot]:
                request.record_served(receipts[slot])
        return num_blocks

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
            self._new += [(seat, index, blocks[index]) for index in range(written, len(blocks))]
            self._written[seat] = len(blocks)


def make_batch(layout: Layout, block_size: int, last_tokens: Tensor, lora: LoraTables) -> Batch:
    """Return the layout as tensors on the device of `last_tokens`, the newest token of each seat, which replaces ids of
    -1.
    """
    positions = layout.positions()
    blocks = layout.tables[layout.by_token(layout.seats), positions // block_size].astype(np.int64)
    adapters = layout.token_adapters(positions)
    embedding_rows = rows_by_slot(adapters, lora.embeddings)
    head_rows = rows_by_slot(adapters[layout.logits_rows], lora.heads)
    unknown = np.flatnonzero(layout.token_ids < 0)
    owners = np.searchsorted(layout.query_start, unknown, side="right") - 1
    arrays = (
        layout.token_ids,
        positions,
        blocks * block_size + positions % block_size,
        layout.query_start,
        (layout.firsts + layout.counts).astype(np.int32),
        np.take(layout.tables[:, : layout.num_blocks], layout.seats, axis=0),
        adapters.astype(np.int32),
        layout.logits_rows,
        unknown,
        layout.seats[owners],
        *embedding_rows.values(),
        *head_rows.values(),
    )
    tensors = iter(upload(last_tokens.device, arrays))
    batch = Batch(
        token_ids=next(tensors),
        positions=next(tensors),
        slot_mapping=next(tensors),
        query_start=next(tensors),
        context_lens=next(tensors),
        block_tables=next(tensors),
        adapter_index=next(tensors),
        logits_rows=next(tensors),
        max_query_len=int(layout.counts.max()),
        adapter_slots=layout.adapter_slots,
        has_base_rows=bool((adapters < 0).any()),
    )
    rows, seats = next(tensors), next(tensors)
    if len(unknown):
        batch.token_ids.index_copy_(0, rows, last_tokens[seats])
    if not embedding_rows and not head_rows:
        return batch
    return replace(
        batch,
        embedding_rows={slot: next(tensors) for slot in embedding_rows},
        head_rows={slot: next(tensors) for slot in head_rows},
    )
