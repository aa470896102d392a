"""Executor of plans on a simulated device: each step takes a given time, and its tokens are hashes.

The host does the work that it does for a GPU: layout, staging buffers, parameters of the draws. The device's work is a
wait without CPU. A token is a hash of the served adapter's digest, the request's seed, the position and the token
before it, so answers do not depend on batches, chunks or preemption. Grammars, `allowed_token_ids`, `bad_words` and
`min_tokens` are obeyed. There are no scores: penalties, biases and the shape of the distribution change nothing, and
log-probabilities are made up.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from adapters.tiers.device_pool import AdapterPool
from engine.config import StepTime
from engine.execution.graphs import Shape, pack_fields
from engine.execution.layout import Layout, LayoutBuilder, Places
from engine.execution.runner import RunnerLimits
from engine.execution.sampler import bans
from engine.execution.sampling_tables import DrawTable
from engine.execution.transfer import upload
from engine.scheduling.plan import Plan
from engine.scheduling.request import Request, TokenLogprobs

DEVICE = torch.device("meta")
_FACTOR, _LAST = (np.uint64(n) for n in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
# Odd factors of a draw's seed, position and last token.
_FACTORS = np.array([0x1E3779B97F4A7C15, 0x2545F4914F6CDD1D, 0x5851F42D4C957F2D])


@dataclass(frozen=True, slots=True)
class Pass:
    """A launched step. ends: time.perf_counter() at which the device has computed it."""

    layout: Layout
    ends: float


@dataclass(frozen=True, slots=True)
class SimulatedTokens:
    """Tokens of a step, readable once the device has computed it. requests: the request of each token."""

    requests: list[Request]
    tokens: list[int]
    ends: float

    @property
    def is_ready(self) -> bool:
        return time.perf_counter() >= self.ends

    def wait(self) -> list[int]:
        if (left := self.ends - time.perf_counter()) > 0:
            time.sleep(left)
        return self.tokens


class SimulatedRunner:
    """Executor of plans. Steps run one after the other, each for `step_time`, however early they are launched."""

    def __init__(self, vocab_size: int, adapters: AdapterPool, limits: RunnerLimits, step_time: StepTime) -> None:
        self._vocab_size, self._step_time = vocab_size, step_time
        self._slot_digests = adapters.slot_digests
        num_blocks = -(-limits.max_model_len // limits.block_size)
        self._layout_builder = LayoutBuilder(limits.max_num_seqs, num_blocks, adapters.slot_digests)
        self._max_num_seqs = limits.max_num_seqs
        self._draw_table = DrawTable(limits.max_num_seqs)
        self._last_tokens = np.zeros(limits.max_num_seqs, np.int64)
        self._slots = np.zeros(limits.max_num_seqs, np.int64)  # of the adapters, by seat
        self._adapter_numbers = np.zeros(len(adapters.slot_digests) + 1, np.uint64)  # by slot
        self._busy_until = 0.0

    def forward(self, plan: Plan) -> Pass:
        """Launch a step."""
        layout = self._layout_builder.lay_out(plan)
        num_tokens, step_time = len(layout.token_ids), self._step_time
        if layout.new_blocks.size:
            upload(DEVICE, [layout.new_blocks])
        rows = max(self._max_num_seqs, len(layout.logits_rows))
        upload(DEVICE, [pack_fields(layout, Shape(num_tokens, rows, num_tokens))])
        seconds = step_time.fixed + step_time.per_token * num_tokens
        if num_tokens > len(layout.counts):
            seconds += step_time.prompt
        self._busy_until = max(self._busy_until, time.perf_counter()) + seconds
        return Pass(layout, self._busy_until)

    def sample(self, launched: Pass) -> SimulatedTokens:
        """Choose the tokens of `Layout.next_places`."""
        layout = launched.layout
        for rows in layout.prompt_rows:
            self._add_prompt_logprobs(rows.request, rows.first, rows.num_tokens)
        return self._sample(launched, layout.next_places())

    def sample_after_drafts(self, launched: Pass, requests: Sequence[Request], number: int) -> SimulatedTokens:
        """Choose the tokens after the first `number` drafts of each of these requests."""
        return self._sample(launched, launched.layout.places_after(requests, number))

    def _sample(self, launched: Pass, places: Places) -> SimulatedTokens:
        requests = places.requests
        if not requests:
            return SimulatedTokens([], [], launched.ends)
        draws = self._draws(launched.layout, places)
        tokens = (draws % np.uint64(self._vocab_size)).view(np.int64)
        for i, request in enumerate(requests):
            if not request.is_plain:
                tokens[i] = self._finish_token(request, int(draws[i]), int(tokens[i]))
        self._last_tokens[places.seats] = tokens
        return SimulatedTokens(requests, tokens.tolist(), launched.ends)

    @property
    def seat_bytes(self) -> int:
        return 0

    def close(self) -> None:
        pass

    def _draws(self, layout: Layout, places: Places) -> np.ndarray:
        """Return each place's hash, uint64 `[n]`."""
        columns = self._draw_table.columns(places.requests, places.seats, places.lengths)
        self._draw_table.upload(DEVICE, columns)
        rows = layout.logits_rows[places.rows]
        token_ids = layout.token_ids[rows]
        before = np.where(token_ids < 0, self._last_tokens[places.seats], token_ids)
        # The adapter of a request's last token in the step is that of all its places.
        self._slots[layout.seats] = layout.adapters
        slots = self._slots[places.seats]
        for slot in set(slots.tolist()):
            if slot >= 0:  # the number of the base model, -1, stays 0
                self._adapter_numbers[slot] = _as_number(self._slot_digests[slot])
        # A greedy answer does not depend on the seed.
        seeds = np.where(columns.temperature == 0, 0, columns.seeds)
        numbers = seeds * _FACTORS[0] + columns.positions * _FACTORS[1] + before * _FACTORS[2]
        return _mix(self._adapter_numbers[slots] + numbers.view(np.uint64))

    def _finish_token(self, request: Request, draw: int, token: int) -> int:
        """Return the token, or another one if the request's rules forbid it.

        Append the log-probabilities that the request asks for, and keep its logits if it asks for them.
        """
        params = request.params
        if request.mask is not None or request.edits_logits:
            token = self._allowed_token(request, draw)
        if params.logprobs is not None:
            request.logprobs.append(self._logprobs(token, params.logprobs))
        if params.keep_logits:
            request.logits = torch.randn(self._vocab_size, generator=torch.Generator().manual_seed(draw >> 1))
        return token

    def _allowed_token(self, request: Request, draw: int) -> int:
        """Return the token that a draw selects among those that the request's rules allow."""
        allowed = np.ones(self._vocab_size, np.bool_)
        if request.mask is not None:
            bits = np.zeros((self._vocab_size + 31) // 32, np.uint32)
            request.mask.fill(bits)
            allowed = np.unpackbits(bits.view(np.uint8), count=self._vocab_size, bitorder="little").view(np.bool_)
        for banned in bans(request):
            rest = allowed.copy()
            rest[banned] = False
            if rest.any():  # a ban is skipped if it would leave no token
                allowed = rest
        ids = np.flatnonzero(allowed)
        return int(ids[draw % len(ids)])

    def _logprobs(self, token: int, most: int) -> TokenLogprobs:
        """Return log-probabilities in which each token is half as likely as the one before it."""
        ids = [(token + i) % self._vocab_size for i in range(most)]
        return TokenLogprobs(token, -math.log(2), 1, ids, [-math.log(2) * (i + 1) for i in range(most)])

    def _add_prompt_logprobs(self, request: Request, first: int, num_tokens: int) -> None:
        if first == 0:
            request.prompt_logprobs = [None]  # nothing predicts the first token
        following = request.token_ids[first + 1 : min(first + num_tokens + 1, request.num_prompt_tokens)]
        most = request.params.prompt_logprobs or 0
        request.prompt_logprobs += [self._logprobs(token, most) for token in following]


@lru_cache(maxsize=4096)
def _as_number(digest: str) -> int:
    return int(digest[:16] or "0", 16)


def _mix(x: np.ndarray) -> np.ndarray:
    """Return splitmix64's finaliser of each uint64."""
    x = (x ^ (x >> np.uint64(30))) * _FACTOR
    x = (x ^ (x >> np.uint64(27))) * _LAST
    return x ^ (x >> np.uint64(31))
