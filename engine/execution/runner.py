"""Execution of plans: batch, forward pass, next tokens. Owns the KV cache's tensors; knows no queues.

`forward` and `sample` launch work and do not wait, so that on a GPU the host can plan and publish while the device
computes. Each seat's newest token stays in a table on the device, from which the next forward pass reads it.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from engine.execution.graphs import GraphSizes, StepGraphs
from engine.execution.layout import Layout, LayoutBuilder, Places, PromptRows, make_batch
from engine.execution.sampler import RowLogprobs, SamplingTables, mark_not_finite, sample, token_logprobs
from engine.execution.sampling_tables import AllowedTable, DrawTable, Row, TokenTable
from engine.execution.transfer import Download, upload
from engine.model.decoder import Decoder
from engine.scheduling.plan import Plan
from engine.scheduling.request import Request
from kernels.ops import KvCache, LoraTables
from kernels.platform import DeviceEvent, platform_of
from kernels.reference import LARGEST


@dataclass(frozen=True, slots=True)
class Launched:
    """A forward pass in flight. logits: `[L, vocab]` fp32, a row for each of the layout's `logits_rows`."""

    layout: Layout
    logits: Tensor


@dataclass(frozen=True, slots=True)
class Sampling:
    """Tokens of a step, in transfer to the host. requests: the request of each token. done: marks the end of a step
    that samples no token.
    """

    requests: list[Request]
    tokens: Download | None
    logprobs: list[tuple[list[Request | PromptRows], list[int], Download]]
    logits: tuple[list[Request], Download] | None = None
    done: DeviceEvent | None = None

    @property
    def is_ready(self) -> bool:
        return (self.tokens is None or self.tokens.is_ready) and (self.done is None or self.done.query())

    def wait(self) -> list[int]:
        """Return the tokens of `requests`, and append log-probabilities to the requests.

        The token is `NOT_FINITE` where a request's logits are NaN or infinite.
        """
        for owners, top, download in self.logprobs:
            for owner, entry in zip(owners, RowLogprobs(*download.wait()).entries(top), strict=True):
                if isinstance(owner, Request):
                    owner.logprobs.append(entry)
                else:
                    owner.request.prompt_logprobs.append(entry)
        if self.logits is not None:
            for request, row in zip(self.logits[0], self.logits[1].wait()[0], strict=True):
                request.logits = row
        if self.done is not None:
            # The step has no tokens to wait for. Without a wait the host would launch all chunks of a long prompt at
            # once, and a new request could not join the batch between them.
            self.done.synchronize()
        return [] if self.tokens is None else list(self.tokens.wait()[0].tolist())


class StepTokens(Protocol):
    """Tokens of a step while the device may still compute them. requests: the request of each token."""

    @property
    def requests(self) -> Sequence[Request]: ...

    @property
    def is_ready(self) -> bool:
        """Return whether the device has computed the step, so that `wait` returns at once."""
        ...

    def wait(self) -> list[int]:
        """Wait for the step's end. Return each request's token, `NOT_FINITE` where no score is finite."""
        ...


def tokens_by_request(tokens: StepTokens) -> dict[Request, list[int]]:
    """Wait for a step's end, and return each request's tokens."""
    found: dict[Request, list[int]] = {}
    for request, token in zip(tokens.requests, tokens.wait(), strict=True):
        found.setdefault(request, []).append(token)
    return found


class StepRunner(Protocol):
    """Executor of plans on a device. Only `StepTokens.wait` waits until the device has done their work."""

    def forward(self, plan: Plan) -> Any:
        """Launch the computation of the plan's tokens. Return the argument of `sample`."""
        ...

    def sample(self, launched: Any) -> StepTokens:
        """Launch the sampling of each request's next token and, if it is plain, of the token after each of its drafts.
        Every earlier token of the requests must be known.
        """
        ...

    def sample_after_drafts(self, launched: Any, requests: Sequence[Request], number: int) -> StepTokens:
        """Launch the sampling of the tokens after the first `number` drafts of each of these requests, which are not
        plain. The drafts must be appended to them.
        """
        ...

    @property
    def seat_bytes(self) -> int:
        """Return the bytes of the device's memory that the seats' tables keep, whatever the steps."""
        ...

    def close(self) -> None:
        """Free the KV cache and the graphs."""
        ...


class AdapterTables(LoraTables, Protocol):
    """Tables of a runner's adapters: the device pool, or none. slot_digests: see `LayoutBuilder`."""

    @property
    def slot_digests(self) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """Sizes of a runner.

    num_blocks: number of KV blocks in each layer. block_size: tokens per block. max_num_seqs: maximum number of running
    requests. max_model_len: maximum tokens of a request. graph_sizes, graph_tokens: `decodes` and `tokens` of
    `engine.execution.graphs.GraphSizes`; both empty: no graphs.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_model_len: int
    kv_dtype: torch.dtype
    graph_sizes: tuple[int, ...] = ()
    graph_tokens: tuple[int, ...] = ()


class Runner:
    """Executor of plans, with a KV cache in every layer, on the decoder's device."""

    def __init__(
        self,
        decoder: Decoder,
        adapters: AdapterTables,
        limits: RunnerLimits,
        device: torch.device,
        progress: Callable[[int, int], None] = lambda *_: None,
    ) -> None:
        """progress: called with the number of captured graphs and the number of all graphs."""
        c = decoder.config
        self.decoder, self.device = decoder, device
        max_num_seqs, block_size = limits.max_num_seqs, limits.block_size
        shape = (limits.num_blocks, c.num_kv_heads, block_size, c.head_dim)
        kv = [make_kv_cache(shape, limits.kv_dtype, device) for _ in range(c.num_layers)]
        decoder.attach(kv, adapters)
        max_blocks = -(-limits.max_model_len // block_size)
        self._adapters, self._block_size = adapters, block_size
        self._layout_builder = LayoutBuilder(max_num_seqs, max_blocks, adapters.slot_digests)
        self._last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        is_host = platform_of(device).is_host
        self._sampling = SamplingTables(
            DrawTable(max_num_seqs),
            None if is_host else TokenTable(max_num_seqs, c.vocab_size, device),
            None if is_host else AllowedTable(max_num_seqs, c.vocab_size, device),
        )
        self.graphs: StepGraphs | None = None
        if limits.graph_sizes or limits.graph_tokens:
            sizes = GraphSizes(limits.graph_sizes, limits.graph_tokens, max_num_seqs, max_blocks, block_size)
            with torch.inference_mode():
                self.graphs = StepGraphs(decoder, adapters, self._last_tokens, sizes, progress)

    @property
    def seat_bytes(self) -> int:
        return sum(table.num_bytes for table in (self._sampling.tokens, self._sampling.allowed) if table is not None)

    def close(self) -> None:
        """Free the KV cache and the graphs. The decoder can be attached again."""
        self.decoder.detach()
        self.graphs = None

    @torch.inference_mode()
    def forward(self, plan: Plan) -> Launched:
        """Launch the computation of the plan's tokens."""
        layout = self._layout_builder.lay_out(plan)
        logits = self.graphs.run(layout) if self.graphs is not None else None
        if logits is None:
            logits = self.decoder.forward(make_batch(layout, self._block_size, self._last_tokens, self._adapters))
        return Launched(layout, logits)

    @torch.inference_mode()
    def sample(self, launched: Launched) -> Sampling:
        """Launch the sampling of the tokens of `Layout.next_places`. Every earlier token of the requests must be
        known.
        """
        layout, logits = launched.layout, launched.logits
        logprobs = [self._prompt_logprobs(rows, logits) for rows in layout.prompt_rows]
        places = layout.next_places()
        if not places.requests:
            done = platform_of(self.device).record_event()
            return Sampling([], None, [entry for entry in logprobs if entry is not None], done=done)
        return self._sample(logits, places, [entry for entry in logprobs if entry is not None])

    @torch.inference_mode()
    def sample_after_drafts(self, launched: Launched, requests: Sequence[Request], number: int) -> Sampling:
        """Launch the sampling of the tokens after the first `number` drafts of each of these requests."""
        return self._sample(launched.logits, launched.layout.places_after(requests, number), [])

    def _sample(
        self,
        logits: Tensor,
        places: Places,
        logprobs: list[tuple[list[Request | PromptRows], list[int], Download]],
    ) -> Sampling:
        """Sample a token for each place from its row of logits, which are overwritten if no other row is left."""
        requests, rows, seats, lengths = places
        if len(rows) != len(logits):
            [index] = upload(self.device, [rows])
            logits = logits[index]
        special, _ = self._sampling.kinds.of(requests)
        kept = self._kept_logits(special, logits)
        wanted = [(row, request) for row, request in special if request.params.logprobs is not None]
        if wanted:
            [index] = upload(self.device, [np.array([row for row, _ in wanted])])
            raw = logits[index]  # the model's logits, before penalties
        tokens = sample(logits, requests, self.decoder.ops, self._sampling, index=seats, lengths=lengths)
        if wanted:
            top = [request.params.logprobs or 0 for _, request in wanted]
            found = token_logprobs(raw, tokens[index], max(top))
            logprobs.append(([request for _, request in wanted], top, Download(found.tensors)))
        # A step with drafts has several tokens of a seat. The next step knows its tokens, so any of them may stay.
        [index] = upload(self.device, [seats])
        self._last_tokens.index_copy_(0, index, tokens)
        chosen = mark_not_finite(tokens, logits)
        return Sampling(requests, Download([chosen]), logprobs, kept)

    def _kept_logits(self, rows: Sequence[Row], logits: Tensor) -> tuple[list[Request], Download] | None:
        """Copy the model's logits, before penalties, of those rows whose requests keep them."""
        keeping = [(row, request) for row, request in rows if request.params.keep_logits]
        if not keeping:
            return None
        [index] = upload(self.device, [np.array([row for row, _ in keeping])])
        return [request for _, request in keeping], Download([logits[index]])

    def _prompt_logprobs(
        self, rows: PromptRows, logits: Tensor
    ) -> tuple[list[Request | PromptRows], list[int], Download] | None:
        request, first = rows.request, rows.first
        if first == 0:
            request.prompt_logprobs = [None]  # nothing predicts the first token
        following = request.token_ids[first + 1 : min(first + rows.num_tokens + 1, request.num_prompt_tokens)]
        if not following:
            return None
        [token_ids] = upload(self.device, [np.array(following)])
        top = request.params.prompt_logprobs or 0
        found = token_logprobs(logits[rows.row : rows.row + len(following)], token_ids, top)
        return [rows] * len(following), [top] * len(following), Download(found.tensors)


def make_kv_cache(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> KvCache:
    """Return one layer's cache `[num_blocks, num_kv_heads, block_size, head_dim]`, with scales if it has 8 bits."""
    zeros = functools.partial(platform_of(device).zeros, huge_pages=True)
    if dtype not in LARGEST:
        return KvCache(zeros(shape, dtype), zeros(shape, dtype))
    return KvCache(
        zeros(shape, torch.uint8).view(dtype),
        zeros(shape, torch.uint8).view(dtype),
        zeros(shape[:3], torch.float32),
        zeros(shape[:3], torch.float32),
    )
