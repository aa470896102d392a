"""Next tokens from logits, vectorised over the batch, without waiting for the device. Rows are independent: a request's
draw depends on its own seed and position only, never on what else is in the batch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.model.transfer import upload
from engine.scheduling.request import Request, TokenLogprobs
from engine.structured.masks import constrain


def sample(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """logits `[n, vocab]` fp32, edited in place; row i chooses `requests[i]`'s next token. Returns `[n]` int64."""
    constrain(logits, [request.matcher for request in requests])
    if any(request.params.edits_logits for request in requests):
        edit_logits(logits, requests)
    tokens = logits.argmax(-1)
    # A row is drawn in the order of its own parameters, sorted or not, whatever the rows beside it ask for.
    for limited in (False, True):
        drawn = [i for i, r in enumerate(requests) if r.params.temperature > 0 and _is_limited(r) == limited]
        if drawn:
            [rows] = upload(logits.device, [np.array(drawn)])
            own = logits if len(drawn) == len(logits) else logits[rows]
            tokens.index_copy_(0, rows, _draw(own, [requests[i] for i in drawn], limited))
    return tokens


def edit_logits(logits: Tensor, requests: Sequence[Request]) -> None:
    """Penalties, bias and the ban on stopping early, in place: one gather and scatter for all rows of each kind."""
    scaled, lowered, banned = _Edits(), _Edits(), _Edits()
    banned_by_grammar: list[tuple[int, list[int]]] = []
    for row, request in enumerate(requests):
        p = request.params
        if p.repetition_penalty != 1.0:
            scaled.add(row, np.unique(request.token_ids), p.repetition_penalty)
        if (p.presence_penalty or p.frequency_penalty) and request.num_output_tokens:
            used, counts = np.unique(request.token_ids[request.num_prompt_tokens :], return_counts=True)
            lowered.add(row, used, p.presence_penalty + p.frequency_penalty * counts)
        if request.num_output_tokens < p.min_tokens and request.stop_ids:
            if request.matcher is None:
                banned.add(row, sorted(request.stop_ids), 0.0)
            else:
                banned_by_grammar.append((row, sorted(request.stop_ids)))
    biased = _Edits()
    for row, request in enumerate(requests):
        if request.params.logit_bias:
            biased.add(row, list(request.params.logit_bias), list(request.params.logit_bias.values()))
    device = logits.device
    if scaled:
        rows, ids, penalty = scaled.upload(device)
        values = logits[rows, ids]
        logits[rows, ids] = torch.where(values > 0, values / penalty, values * penalty)
    if lowered:
        rows, ids, penalty = lowered.upload(device)
        logits[rows, ids] = logits[rows, ids] - penalty
    if biased:
        rows, ids, bias = biased.upload(device)
        logits[rows, ids] = logits[rows, ids] + bias
    if banned:
        rows, ids, _ = banned.upload(device)
        logits.index_put_((rows, ids), logits.new_full((), -torch.inf))
    for row, stop_ids in banned_by_grammar:
        # A grammar may leave nothing but its end; then the text ends short of its minimum.
        [ids] = upload(device, [np.array(stop_ids)])
        rest = logits[row].index_fill(0, ids, -torch.inf)
        logits[row] = torch.where(rest.amax() > -torch.inf, rest, logits[row])


class _Edits:
    """(row, token, value) triples of many rows. No (row, token) comes twice."""

    def __init__(self) -> None:
        self._rows: list[np.ndarray] = []
        self._ids: list[np.ndarray] = []
        self._values: list[np.ndarray] = []

    def __bool__(self) -> bool:
        return bool(self._rows)

    def add(self, row: int, ids: np.ndarray | list[int], values: np.ndarray | list[float] | float) -> None:
        self._ids.append(np.asarray(ids, np.int64))
        self._rows.append(np.full(len(ids), row))
        self._values.append(np.broadcast_to(np.asarray(values, np.float32), len(ids)))

    def upload(self, device: torch.device) -> list[Tensor]:
        return upload(device, [np.concatenate(part) for part in (self._rows, self._ids, self._values)])


def _is_limited(request: Request) -> bool:
    return bool(request.params.top_k or request.params.top_p < 1)


def _draw(logits: Tensor, requests: list[Request], limited: bool) -> Tensor:
    """Inverse-CDF sampling with one uniform number a row, over the tokens that top-k, top-p and min-p leave. `[n]`."""
    params, vocab = [r.params for r in requests], logits.shape[1]
    column = [
        np.array(values, np.float32)
        for values in zip(*((p.temperature, p.top_p, p.min_p) for p in params), strict=True)
    ]
    top_k = np.array([min(p.top_k or vocab, vocab) for p in params])
    uniform = uniforms([r.seed for r in requests], [r.num_output_tokens + 1 for r in requests])
    temperature, top_p, min_p, k, target = (t[:, None] for t in upload(logits.device, [*column, top_k, uniform]))
    logits = logits / temperature
    order = None
    if limited:
        # Top-k alone needs no full sort: the k largest, in order, are all that can be drawn.
        logits, order = logits.topk(int(top_k.max()))
    probs = logits.softmax(-1)
    if limited:
        probs = probs.masked_fill(torch.arange(probs.shape[1], device=probs.device)[None] >= k, 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
        before = probs.cumsum(-1) - probs
        probs = probs.masked_fill((before >= top_p) & (top_p < 1), 0.0)
    if any(p.min_p for p in params):
        probs = probs.masked_fill(probs < min_p * probs.amax(-1, keepdim=True), 0.0)
    cdf = probs.double().cumsum(-1)
    chosen = torch.searchsorted(cdf, target * cdf[:, -1:], right=True).clamp_(max=cdf.shape[1] - 1)
    return (order.gather(1, chosen) if order is not None else chosen)[:, 0]


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """One number in [0, 1) for each (seed, position): splitmix64 (Steele et al., OOPSLA 2014), as float64."""
    with np.errstate(over="ignore"):
        state = np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], np.uint64)
        z = _mix(state) + np.array(positions, np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return (_mix(z) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """`[n]` of each row's own token, and the likeliest `[n, most]`; on the device, then on the host."""

    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.token_ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs

    def entries(self, top: Sequence[int]) -> list[TokenLogprobs]:
        """Row i with its `top[i]` likeliest. Reads the tensors' values."""
        rows = zip(*(t.tolist() for t in self.tensors), top, strict=True)
        return [TokenLogprobs(t, lp, rank, ids[:n], values[:n]) for t, lp, rank, ids, values, n in rows]


def token_logprobs(logits: Tensor, token_ids: Tensor, most: int) -> RowLogprobs:
    """Log-probabilities of each row's token and its `most` likeliest. logits `[n, vocab]` fp32, token_ids `[n]`."""
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, token_ids[:, None])
    values, ids = logprobs.topk(max(1, most))
    return RowLogprobs(token_ids, chosen[:, 0], (logprobs > chosen).sum(-1) + 1, ids, values)
