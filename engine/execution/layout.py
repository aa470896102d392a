"""Layout of a step: its plan as flat arrays on the host, and these as the tensors of `kernels.batch.Batch`."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress, islice
from typing import NamedTuple

import numpy as np
from torch import Tensor

from engine.execution.transfer import upload
from engine.scheduling.plan import Plan
from engine.scheduling.request import BASE_SERVED, MIXED_SERVED, Request, Status
from engine.scheduling.streams import StreamRows
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
    """Places of the text whose tokens are sampled together.

    requests: each place's request. rows, seats: each place's row of the logits, and its seat. lengths: number of the
    request's tokens before each place, drafts included. All are int64 `[n]`.
    """

    requests: list[Request]
    rows: np.ndarray
    seats: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, requests: list[Request], rows: np.ndarray, ahead: np.ndarray | int = 0) -> "Places":
        """Read the seats and lengths from the requests. ahead: number of drafts before each place that are not among
        its request's tokens.
        """
        seats = np.array([request.seat for request in requests], np.int64)
        return cls(requests, rows, seats, np.array([request.num_tokens for request in requests], np.int64) + ahead)


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
    sampled_rows: np.ndarray
    has_drafts: bool
    prompt_rows: list[PromptRows]

    @property
    def num_tokens(self) -> int:
        return int(self.query_start[-1])

    @property
    def context(self) -> int:
        """Return the number of tokens of all requests, those of this step included."""
        return int(np.add.reduce(self.firsts)) + self.num_tokens

    @property
    def adapter_slots(self) -> tuple[int, ...]:
        return tuple(sorted(set(self.adapters.tolist()) - {-1}))

    def next_places(self) -> Places:
        """Return the place of each sampled request's next token, followed by those after its drafts if it is plain: the
        draws of a plain request do not depend on the tokens before them. Requests that have ended or been preempted
        since are skipped.
        """
        requests, rows = self.sampled, self.sampled_rows
        running = Status.RUNNING  # a member of an enumeration is slow to look up
        is_running = [request.status is running for request in requests]
        if not all(is_running):
            requests, rows = list(compress(requests, is_running)), rows[is_running]
        if not self.has_drafts:
            is_whole = len(requests) == len(self.seats)
            if is_whole:
                return Places(requests, rows, self.seats, self.firsts + self.counts)
            return Places.of(requests, rows)
        counts = [1 + len(request.drafts) if request.is_plain else 1 for request in requests]
        ahead = np.concatenate([np.arange(count) for count in counts])
        owners = [request for request, count in zip(requests, counts, strict=True) for _ in range(count)]
        return Places.of(owners, np.repeat(rows, counts) + ahead, ahead)

    def places_after(self, requests: Sequence[Request], number: int) -> Places:
        """Return the place after the first `number` drafts of each of these requests, which have them as tokens."""
        first = dict(zip(self.sampled, self.sampled_rows.tolist(), strict=True))
        return Places.of(list(requests), np.array([first[request] + number for request in requests], np.int64))

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


class _Part(NamedTuple):
    """Arrays of a `Layout` for some of its requests."""

    token_ids: np.ndarray
    seats: np.ndarray
    counts: np.ndarray
    firsts: np.ndarray
    adapters: np.ndarray
    adapter_starts: np.ndarray
    logits_rows: np.ndarray
    sampled_rows: np.ndarray


class _Kept(NamedTuple):
    """Arrays of the last streams. slots: each request's adapter slot. receipts: the receipt of each slot."""

    requests: list[Request]
    slots: list[int]
    receipts: dict[int, str]
    part: _Part


class LayoutBuilder:
    """Builder of layouts. Each seat's block table is kept between steps, so that only new blocks are written. The other
    arrays are kept for the next step of the same streams.

    slot_digests: the digest of the adapter in each slot of the device pool, "" for an empty slot.
    """

    def __init__(self, max_num_seqs: int, max_blocks: int, slot_digests: Sequence[str] = ()) -> None:
        self._slot_digests = slot_digests
        self._tables = np.zeros((max_num_seqs, max_blocks), np.int32)
        self._held: list[list[int]] = [[] for _ in range(max_num_seqs)]
        self._written = np.zeros(max_num_seqs, np.int64)
        self._adapter_starts = np.zeros(max_num_seqs, np.int64)
        self._new: list[tuple[int, int, int]] = []
        self._kept: _Kept | None = None
        self._number = 0  # of the last streams

    def lay_out(self, plan: Plan) -> Layout:
        """Lay out the plan's requests in its order. The rows of logits are every position of a prompt with
        prompt_logprobs, and otherwise the last token of each request whose tokens this step completes, and its drafts.
        """
        streams = plan.streams
        if streams is None:
            part, sampled, prompt_rows = self._others_part(plan, 0)
            has_drafts = any(request.drafts for request in plan)
        else:
            part, sampled, prompt_rows, has_drafts = self._streams_part(streams), streams.requests, [], False
            if len(plan) > len(sampled):
                others = dict(islice(plan.items(), len(sampled), None))
                found, sampled_others, prompt_rows = self._others_part(others, len(sampled))
                part = _Part(*map(np.concatenate, zip(part, found, strict=True)))
                sampled = sampled + sampled_others
        starts = np.zeros(len(plan) + 1, np.int32)
        part.counts.cumsum(out=starts[1:])
        return Layout(
            query_start=starts,
            tables=self._tables,
            num_blocks=max(1, int(self._written[part.seats].max(initial=0))),
            new_blocks=self._take_new(),
            sampled=sampled,
            has_drafts=has_drafts,
            prompt_rows=prompt_rows,
            **part._asdict(),
        )

    def _streams_part(self, streams: StreamRows) -> _Part:
        """Return the arrays of the next token of each stream, and write its new blocks."""
        requests, kept = streams.requests, self._kept
        for request in streams.changed if streams.number == self._number + 1 else requests:
            self._write(request)
        self._number = streams.number
        slots = [request.adapter_slot for request in requests]
        receipts = self._receipts(slots)
        # A slot or its adapter never changes during a request; a defect would show in the receipts.
        is_same = kept is not None and kept.requests is requests and (kept.slots, kept.receipts) == (slots, receipts)
        if kept is None or not is_same:
            _record_served(requests, slots, receipts)
            rows, ones, adapters = np.arange(len(slots)), np.ones(len(slots), np.int64), np.array(slots, np.int64)
            starts = self._adapter_starts[streams.seats]
            part = _Part(rows, streams.seats, ones, rows, adapters, starts, rows, rows)
            kept = self._kept = _Kept(requests, slots, receipts, part)
        # The step before sampled all of the same streams, so either all their newest tokens are in flight, or none.
        if all(request.num_pending for request in (requests[:1] if is_same else requests)):
            token_ids = np.full(len(requests), -1)
        else:
            token_ids = np.array([-1 if r.num_pending else r.token_ids[-1] for r in requests], np.int64)
        part = kept.part
        return part._replace(
            token_ids=token_ids,
            firsts=streams.ends - 1,
            adapters=np.where(streams.ends > part.adapter_starts, part.adapters, -1),
        )

    def _others_part(self, plan: Mapping[Request, int], num_rows: int) -> tuple[_Part, list[Request], list[PromptRows]]:
        """Return the arrays of the requests that follow `num_rows` streams, the requests that receive a token, and the
        rows of log-probabilities of prompts. Write new blocks and record receipts.
        """
        slots = [request.adapter_slot for request in plan]
        _record_served(plan, slots, self._receipts(slots))
        token_ids: list[int] = []
        firsts: list[int] = []
        adapters: list[int] = []
        adapter_starts: list[int] = []
        rows: list[int] = []
        sampled_rows: list[int] = []
        sampled: list[Request] = []
        prompt_rows: list[PromptRows] = []
        end = num_rows
        for request, n in plan.items():
            self._write(request)
            first, known, drafts = request.num_computed, request.token_ids, request.drafts
            if n == 1:
                token_ids.append(known[first] if first < len(known) else -1)
            else:
                token_ids += known[first : first + n]
                token_ids += drafts
            end += n
            firsts.append(first)
            adapters.append(request.adapter_slot if first + n > request.adapter_start else -1)
            adapter_starts.append(request.adapter_start)
            is_complete = first + n == len(known) + request.num_pending + len(drafts)
            if request.params.prompt_logprobs is not None and request.wants_prompt_logprobs:
                prompt_rows.append(PromptRows(request, first, n, num_rows + len(rows)))
                rows += range(end - n, end)
            elif is_complete:
                rows += range(end - 1 - len(drafts), end)
            if is_complete:
                sampled.append(request)
                sampled_rows.append(num_rows + len(rows) - 1 - len(drafts))
        seats, counts = [request.seat for request in plan], plan.values()
        columns = (token_ids, seats, [*counts], firsts, adapters, adapter_starts, rows, sampled_rows)
        return _Part(*(np.array(column, np.int64) for column in columns)), sampled, prompt_rows

    def _take_new(self) -> np.ndarray:
        """Write the new blocks to the tables, and return them."""
        new, self._new = np.array(self._new, np.int64).reshape(-1, 3).T, []
        seats, index, blocks = new
        self._tables[seats, index] = blocks
        return new

    def _receipts(self, slots: Iterable[int]) -> dict[int, str]:
        return {slot: self._served(slot) for slot in set(slots)}

    def _served(self, slot: int) -> str:
        """Return the receipt of a slot. Pages of an unknown adapter count as mixed, because no request named them."""
        if slot < 0:
            return BASE_SERVED
        digest = self._slot_digests[slot]
        return digest_name(digest) if digest else MIXED_SERVED

    def _write(self, request: Request) -> None:
        """Note a request's new blocks."""
        seat, blocks = request.seat, request.blocks
        if self._held[seat] is not blocks:  # blocks of another request, or of the same one after a preemption
            self._held[seat] = blocks
            self._written[seat] = 0
            self._adapter_starts[seat] = request.adapter_start
        written = int(self._written[seat])
        if written < len(blocks):
            self._new += [(seat, index, blocks[index]) for index in range(written, len(blocks))]
            self._written[seat] = len(blocks)


def _record_served(requests: Iterable[Request], slots: Iterable[int], receipts: Mapping[int, str]) -> None:
    """Record the receipt of each request's slot."""
    for request, slot in zip(requests, slots, strict=True):
        if request.served_digest != receipts[slot]:
            request.record_served(receipts[slot])


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
