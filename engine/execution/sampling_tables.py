"""Tables of the sampler by seat, kept between steps, so that a step does no work for unchanged parameters."""

from collections.abc import Sequence
from itertools import compress
from operator import is_not
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.execution.transfer import upload
from engine.scheduling.request import Request
from engine.scheduling.token_rules import AllowedTokens
from kernels.ops import Ops
from kernels.reference import IN_PROMPT

_LARGEST_U64 = 2**64 - 1


class DrawColumns(NamedTuple):
    """Parameters of each row's draw, each `[n]`: fp32, int32, fp32, fp32, int64, int64."""

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray
    seeds: np.ndarray
    positions: np.ndarray


def seat_bytes(max_num_seqs: int, vocab_size: int) -> int:
    """Return the bytes on the device of a TokenTable and an AllowedTable."""
    return max_num_seqs * (vocab_size + _num_words(vocab_size)) * torch.int32.itemsize


def _num_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


# The number of a row of the logits, and its request.
Row = tuple[int, Request]


class Kinds(NamedTuple):
    """Kinds of a batch's rows. special: those whose requests are not plain. is_greedy: whether all take their likeliest
    token.
    """

    special: list[Row]
    is_greedy: bool


class KindTable:
    """The kinds of the last batch's rows, so that the next step of the same streams reads no plain request."""

    def __init__(self) -> None:
        self._requests: Sequence[Request] | None = None
        self._kinds = Kinds([], True)

    def of(self, requests: Sequence[Request]) -> Kinds:
        """Return the kinds of the requests' rows. They are kept for the next call with the same list."""
        if self._requests is not requests:
            special = [(row, request) for row, request in enumerate(requests) if not request.is_plain]
            self._kinds = Kinds(special, all(request.params.temperature == 0 for request in requests))
            self._requests = requests
        return self._kinds


class DrawTable:
    """Parameters of draws by seat, on the host. A row is written when a request first draws in its seat."""

    def __init__(self, max_num_seqs: int) -> None:
        self._owners: list[Request | None] = [None] * max_num_seqs
        self._floats = np.zeros((3, max_num_seqs), np.float32)
        self._top_k = np.zeros(max_num_seqs, np.int32)
        self._seeds = np.zeros(max_num_seqs, np.uint64)
        self._num_prompt_tokens = np.zeros(max_num_seqs, np.int64)
        # The last requests, their seats, the lengths of their prompts, and their columns.
        self._kept: tuple[Sequence[Request], np.ndarray, np.ndarray, DrawColumns] | None = None
        self._uploaded: tuple[np.ndarray, list[Tensor]] | None = None

    def columns(
        self, requests: Sequence[Request], seats: np.ndarray | None = None, lengths: np.ndarray | None = None
    ) -> DrawColumns:
        """Return the parameters of the requests' draws, in the order of a backend's `sample`. The position of a draw is
        that of its token in the output, from 1.

        seats, lengths: each request's seat, and its number of tokens before the draw; None: read from the requests. The
        arrays are kept for the next call with the same list and the same array of seats.
        """
        if seats is None:
            seats = np.array([request.seat for request in requests], np.int64)
        if lengths is None:
            lengths = np.array([request.num_tokens for request in requests], np.int64)
        if self._kept is None or self._kept[0] is not requests or self._kept[1] is not seats:
            self._kept = requests, seats, *self._columns(requests, seats)
        _, _, prompts, columns = self._kept
        return columns._replace(positions=lengths - prompts + 1)

    def upload(self, device: torch.device, columns: DrawColumns) -> list[Tensor]:
        """Return the columns on the device. Those that are the last call's arrays are not copied again."""
        if self._uploaded is None or self._uploaded[0] is not columns.seeds:
            *tensors, last = upload(device, columns)
            self._uploaded = columns.seeds, tensors
        else:
            [last] = upload(device, [columns.positions])
        return [*self._uploaded[1], last]

    def _columns(self, requests: Sequence[Request], seats: np.ndarray) -> tuple[np.ndarray, DrawColumns]:
        """Return the lengths of the prompts, and the columns without positions."""
        owners = [self._owners[seat] for seat in seats.tolist()]
        for request in compress(requests, map(is_not, requests, owners)):
            self._write(request.seat, request)
        temperature, top_p, min_p = (column[seats] for column in self._floats)  # each contiguous
        seeds, prompts = self._seeds[seats].view(np.int64), self._num_prompt_tokens[seats]
        return prompts, DrawColumns(temperature, self._top_k[seats], top_p, min_p, seeds, prompts)

    def _write(self, seat: int, request: Request) -> None:
        p = request.params
        self._owners[seat] = request
        self._floats[:, seat] = p.temperature, p.top_p, p.min_p
        self._top_k[seat] = p.top_k
        self._seeds[seat] = request.seed & _LARGEST_U64
        self._num_prompt_tokens[seat] = request.num_prompt_tokens


class TokenTable:
    """Token counts by seat on the device, for penalties: `[max_num_seqs, vocab]`, see `kernels.reference.penalise`.

    A request's text is counted once, when it takes a seat or has been computed again. Each sampled token is then added
    on the device.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._counts = torch.zeros(max_num_seqs, vocab_size, dtype=torch.int32, device=device)
        self._owners: list[Request | None] = [None] * max_num_seqs
        self._num_counted = [0] * max_num_seqs

    @property
    def num_bytes(self) -> int:
        return self._counts.nbytes

    def penalise(self, logits: Tensor, rows: Sequence[Row], ops: Ops) -> None:
        """Apply the penalties of these rows in place. logits: `[n, vocab]` fp32. Every token of their requests must be
        known.
        """
        penalised = [(row, request) for row, request in rows if request.params.penalises]
        if not penalised:
            return
        places, found = zip(*penalised, strict=True)
        for request in found:
            is_current = self._owners[request.seat] is request
            if not is_current or self._num_counted[request.seat] != len(request.token_ids):
                self._count(request)
        params = [request.params for request in found]
        penalties = [
            [p.repetition_penalty for p in params],
            [p.presence_penalty for p in params],
            [p.frequency_penalty for p in params],
        ]
        arrays = (np.array(places), np.array([request.seat for request in found]), np.array(penalties, np.float32))
        index, seats, values = upload(self._device, arrays)
        ops.penalise(logits, index, seats, self._counts, values)

    def add(self, rows: Sequence[Row], tokens: Tensor) -> None:
        """Count the tokens that these rows' requests have just got. tokens: `[n]`, of all rows. Does not wait for the
        device.
        """
        found = [(row, request.seat) for row, request in rows if request.params.penalises]
        if not found:
            return
        for _, seat in found:
            self._num_counted[seat] += 1
        index, seats = upload(self._device, [np.array(column) for column in zip(*found, strict=True)])
        chosen = tokens[index]
        self._counts[seats, chosen] += 1

    def _count(self, request: Request) -> None:
        """Count a request's whole text."""
        text, start = np.array(request.token_ids, np.int64), request.num_prompt_tokens
        ids, counts = np.unique(text[start:], return_counts=True)
        prompt, used, numbers = upload(self._device, (np.unique(text[:start]), ids, counts.astype(np.int32)))
        row = self._counts[request.seat]
        row.zero_()
        row[used] = numbers
        row[prompt] += IN_PROMPT
        self._owners[request.seat], self._num_counted[request.seat] = request, len(text)


class AllowedTable:
    """Bits of `allowed_token_ids` by seat on the device, int32 `[max_num_seqs, ceil(vocab / 32)]`. A seat's row is
    uploaded when a request with another set first draws in it.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._bits = torch.zeros(max_num_seqs, _num_words(vocab_size), dtype=torch.int32, device=device)
        self._sets: list[AllowedTokens | None] = [None] * max_num_seqs

    @property
    def num_bytes(self) -> int:
        return self._bits.nbytes

    def forbid(self, logits: Tensor, rows: Sequence[Row], ops: Ops) -> None:
        """Set the logits of tokens outside of these rows' sets to -inf in place. logits: `[n, vocab]` fp32. A row
        without a set is not changed.
        """
        limited, seats, new = [], [], []
        for row, request in rows:
            if isinstance(request.mask, AllowedTokens):
                limited.append(row)
                seats.append(request.seat)
                if self._sets[request.seat] is not request.mask:
                    self._sets[request.seat] = request.mask
                    new.append(request)
        if new:
            self._write(new)
        if limited:
            index, places = upload(self._device, (np.array(limited), np.array(seats)))
            ops.forbid(logits, index, self._bits[places])

    def _write(self, requests: Sequence[Request]) -> None:
        bits = np.zeros((len(requests), self._bits.shape[1]), np.uint32)
        for row, request in zip(bits, requests, strict=True):
            assert isinstance(request.mask, AllowedTokens)
            request.mask.fill(row)
        seats, words = upload(self._device, (np.array([r.seat for r in requests]), bits.view(np.int32)))
        self._bits[seats] = words
