"""Whole steps as CUDA graphs: decode steps by number of requests, steps with prompts by number of tokens.

A graph contains everything from token ids to the last layer's output: positions, cache slots, block tables and work
lists are built on the device from a few numbers of each request, so one upload and one launch replace all others. It
replays with any requests, lengths, contexts and mix of adapters. A step is padded to its graph's sizes: padding tokens
store no key and use no adapter, padding requests have no query. The head runs outside of the graph for the step's own
rows, so no graph keeps logits in memory. Without a GPU, a replay calls the step again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.execution.layout import Layout, rows_by_slot
from engine.execution.transfer import upload
from engine.model.decoder import Decoder
from kernels.batch import ANY_ADAPTERS, Batch
from kernels.ops import LoraTables
from kernels.platform import platform_of

Replay = Callable[[], Tensor]


class Shape(NamedTuple):
    """Sizes of a graph. max_query_len: 1 in decode steps, which have no list of prompts' tiles."""

    num_tokens: int
    num_requests: int
    max_query_len: int


# Rows of a graph's input: per token, then per request.
_TOKEN_IDS, _IS_GIVEN = range(2)
_QUERY_START, _SEATS, _FIRSTS, _ADAPTERS, _ADAPTER_STARTS, _LOGITS_ROWS = range(6)


def default_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Return the numbers of decoding requests to capture: 1, 2, 4, then every 8 up to 64, every 16 beyond, so that few
    rows are padding.
    """
    sizes = {1, 2, 4, *range(8, 64, 8), *range(64, max_num_seqs, 16), max_num_seqs}
    return tuple(sorted(size for size in sizes if size <= max_num_seqs))


def default_token_sizes(max_num_batched_tokens: int) -> tuple[int, ...]:
    """Return the numbers of tokens of steps with prompts to capture: powers of two from 64 and their halves between, so
    that less than a third is padding.
    """
    powers = [2**i for i in range(6, max_num_batched_tokens.bit_length())]
    sizes = {size for power in powers for size in (power, power * 3 // 2) if size < max_num_batched_tokens}
    return (*sorted(sizes), max_num_batched_tokens)


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """Sizes to capture. decodes: numbers of requests in steps of one token each. tokens: numbers of tokens in other
    steps. max_num_seqs: requests in any step. max_blocks, block_size: sizes of a request's block table.
    """

    decodes: tuple[int, ...]
    tokens: tuple[int, ...]
    max_num_seqs: int
    max_blocks: int
    block_size: int


class StepGraphs:
    """CUDA graphs of steps, captured on construction.

    The largest is captured first, into one memory pool that all share.

    last_tokens: the newest token of each seat. progress: called with the number of captured graphs, and of all graphs.
    """

    def __init__(
        self,
        decoder: Decoder,
        lora: LoraTables,
        last_tokens: Tensor,
        sizes: GraphSizes,
        progress: Callable[[int, int], None],
    ) -> None:
        self._decoder, self._lora, self._last_tokens = decoder, lora, last_tokens
        self._sizes = sizes
        self._device = last_tokens.device
        self._pool: Any = None  # torch names no type for it
        # A step uses the first that holds it.
        self._decodes = [Shape(size, size, 1) for size in sorted(sizes.decodes)]
        self._mixed = [Shape(size, sizes.max_num_seqs, size) for size in sorted(sizes.tokens)]
        shapes = self._decodes + self._mixed
        width, dtype = decoder.config.hidden_size, decoder.weights.dtype
        self._tables = torch.zeros(sizes.max_num_seqs, sizes.max_blocks, dtype=torch.int32, device=self._device)
        self._inputs = torch.zeros(max(shape.num_tokens for shape in shapes), width, dtype=dtype, device=self._device)
        self._hidden = torch.zeros(sizes.max_num_seqs, width, dtype=dtype, device=self._device)
        self._fields = {shape: self._upload(_empty_fields(shape)) for shape in shapes}
        self._replays: dict[tuple[Shape, bool], Replay] = {}
        kinds = (True, False) if lora.page_rank else (False,)
        for shape in sorted(shapes, reverse=True):
            for with_lora in kinds:
                self._replays[shape, with_lora] = self._capture(shape, with_lora)
                progress(len(self._replays), len(kinds) * len(shapes))

    def run(self, layout: Layout) -> Tensor | None:
        """Return the logits of the layout's `logits_rows`. Return None for a step without a graph: one that is larger
        than all of them, or has more rows of logits than requests.

        Call it for every step, because it also keeps the block tables on the device.
        """
        if layout.new_blocks.size:
            [[seats, index, blocks]] = upload(self._device, [layout.new_blocks])
            self._tables[seats, index] = blocks.to(torch.int32)
        num_tokens, num_requests = len(layout.token_ids), len(layout.seats)
        fitting = [*self._decodes, *self._mixed] if num_tokens == num_requests else self._mixed
        shape = next((shape for shape in fitting if shape.num_tokens >= num_tokens), None)
        if shape is None or len(layout.logits_rows) > shape.num_requests:
            return None
        fields = pack_fields(layout, shape)
        head_rows: dict[int, Tensor] = {}
        if self._lora.embeddings or self._lora.heads:
            adapters = layout.token_adapters(layout.positions())
            self._give_inputs(layout, rows_by_slot(adapters, self._lora.embeddings), _views(fields, shape)[0])
            head_rows = self._upload_each(rows_by_slot(adapters[layout.logits_rows], self._lora.heads))
        self._fields[shape].copy_(self._upload(fields))
        self._replays[shape, bool(layout.adapter_slots)]()
        return self._decoder.logits(self._hidden[: len(layout.logits_rows)], head_rows)

    def _give_inputs(self, layout: Layout, rows: dict[int, np.ndarray], tokens: np.ndarray) -> None:
        """Compute the embeddings of the tokens whose adapters have LoRA there, and mark these tokens."""
        if not rows:
            return
        given = np.concatenate(list(rows.values()))
        tokens[_IS_GIVEN, given] = 1
        arrays = (given, layout.token_ids[given], layout.by_token(layout.seats)[given])
        index, token_ids, seats = upload(self._device, arrays)
        token_ids = torch.where(token_ids < 0, self._last_tokens[seats], token_ids)
        ends = np.cumsum([len(found) for found in rows.values()])
        places = {slot: np.arange(end - len(rows[slot]), end) for slot, end in zip(rows, ends, strict=True)}
        self._inputs.index_copy_(0, index, self._decoder.embed(token_ids, self._upload_each(places)))

    def _upload(self, array: np.ndarray) -> Tensor:
        [tensor] = upload(self._device, [array])
        return tensor

    def _upload_each(self, arrays: dict[int, np.ndarray]) -> dict[int, Tensor]:
        return dict(zip(arrays, upload(self._device, list(arrays.values())), strict=True)) if arrays else {}

    def _capture(self, shape: Shape, with_lora: bool) -> Replay:
        def step() -> Tensor:
            inputs, batch = self._batch(shape, with_lora)
            return self._hidden[: shape.num_requests].copy_(self._decoder.hidden(inputs, batch))

        replay, self._pool = platform_of(self._device).capture(step, self._pool)
        return replay

    def _batch(self, shape: Shape, with_lora: bool) -> tuple[Tensor, Batch]:
        """Return the first layer's input and the batch, made of the static fields by device work."""
        tokens, requests = _views(self._fields[shape], shape)
        starts, seats, firsts = requests[_QUERY_START], requests[_SEATS, :-1], requests[_FIRSTS, :-1]
        row = torch.arange(shape.num_tokens, device=self._device)
        owner = (torch.searchsorted(starts, row, right=True) - 1).clamp_(max=shape.num_requests - 1)
        is_live = row < starts[-1]
        position = torch.where(is_live, firsts[owner] + row - starts[owner], 0)
        seat, size = seats[owner], self._sizes.block_size
        slot = self._tables[seat, position // size].long() * size + position % size
        applies = is_live & (position >= requests[_ADAPTER_STARTS][owner])
        ids = tokens[_TOKEN_IDS]
        ids = torch.where(ids < 0, self._last_tokens[seat], ids)
        inputs = self._decoder.embed(ids, {})
        inputs = torch.where(tokens[_IS_GIVEN, :, None] > 0, self._inputs[: shape.num_tokens], inputs)
        return inputs, Batch(
            token_ids=ids,
            positions=position,
            slot_mapping=torch.where(is_live, slot, -1),
            query_start=starts.to(torch.int32),
            context_lens=(firsts + starts[1:] - starts[:-1]).to(torch.int32),
            block_tables=self._tables[seats],
            adapter_index=torch.where(applies, requests[_ADAPTERS][owner], -1).to(torch.int32),
            logits_rows=requests[_LOGITS_ROWS, :-1],
            max_query_len=shape.max_query_len,
            adapter_slots=ANY_ADAPTERS if with_lora else (),
        )


def pack_fields(layout: Layout, shape: Shape) -> np.ndarray:
    """Return all that a graph reads of a step, flat int64. The layout must fit into the shape."""
    fields = _empty_fields(shape)
    tokens, requests = _views(fields, shape)
    tokens[_TOKEN_IDS, : len(layout.token_ids)] = layout.token_ids
    requests[_QUERY_START] = len(layout.token_ids)
    requests[_QUERY_START, : len(layout.query_start)] = layout.query_start
    for row, values in (
        (_SEATS, layout.seats),
        (_FIRSTS, layout.firsts),
        (_ADAPTERS, layout.adapters),
        (_ADAPTER_STARTS, layout.adapter_starts),
        (_LOGITS_ROWS, layout.logits_rows),
    ):
        requests[row, : len(values)] = values
    return fields


def _empty_fields(shape: Shape) -> np.ndarray:
    """Return the fields of a step without requests."""
    return np.zeros(2 * shape.num_tokens + 6 * (shape.num_requests + 1), np.int64)


def _views(fields: Any, shape: Shape) -> tuple[Any, Any]:
    """Return the rows per token `[2, T]` and per request `[6, B + 1]` of flat fields, an array or a tensor."""
    split = 2 * shape.num_tokens
    return fields[:split].reshape(2, shape.num_tokens), fields[split:].reshape(6, shape.num_requests + 1)
