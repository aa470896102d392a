"""Next tokens from logits, vectorised over the batch. Rows are independent: a request's draw depends on its own seed
and position only, never on what else is in the batch."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.scheduling.request import Request, TokenLogprobs
from engine.structured.masks import constrain


def sample(logits: Tensor, requests: Sequence[Request]) -> list[int]:
    """logits `[n, vocab]` fp32, edited in place; row i chooses `requests[i]`'s next token."""
    constrain(logits, [request.matcher for request in requests])
    for row, request in enumerate(requests):
        if request.params.edits_logits:
            edit_logits(logits[row], request)
    tokens = logits.argmax(-1)
    # A row is drawn in the order of its own parameters, sorted or not, whatever the rows beside it ask for.
    for limited in (False, True):
        drawn = [i for i, r in enumerate(requests) if r.params.temperature > 0 and _is_limited(r) == limited]
        if drawn:
            rows = logits if len(drawn) == len(logits) else logits[drawn]
            tokens[drawn] = _draw(rows, [requests[i] for i in drawn], limited)
    return tokens.tolist()


def edit_logits(row: Tensor, request: Request) -> None:
    """Penalties, bias and the ban on stopping early, in place on one row `[vocab]`."""
    p = request.params
    if p.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(request.token_ids)), device=row.device)
        values = row[seen]
        row[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    if (p.presence_penalty or p.frequency_penalty) and request.num_output_tokens:
        output = torch.tensor(request.token_ids[request.num_prompt_tokens :], device=row.device)
        ids, counts = output.unique(return_counts=True)
        row[ids] -= p.presence_penalty + p.frequency_penalty * counts
    if p.logit_bias:
        ids = torch.tensor(list(p.logit_bias), device=row.device)
        row[ids] += torch.tensor(list(p.logit_bias.values()), dtype=row.dtype, device=row.device)
    if request.num_output_tokens < p.min_tokens and request.stop_ids:
        stops = torch.tensor(sorted(request.stop_ids), device=row.device)
        banned = row.index_fill(0, stops, -torch.inf)
        # A grammar may leave nothing but its end; then the text ends short of its minimum.
        if request.matcher is None or bool(banned.amax() > -torch.inf):
            row.copy_(banned)


def _is_limited(request: Request) -> bool:
    return bool(request.params.top_k or request.params.top_p < 1)


def _draw(logits: Tensor, requests: list[Request], limited: bool) -> Tensor:
    """Inverse-CDF sampling with one uniform number a row, over the tokens that top-k, top-p and min-p leave."""
    device = logits.device
    column = [r.params for r in requests]
    logits = logits / torch.tensor([p.temperature for p in column], device=device)[:, None]
    order = None
    if limited:
        # Top-k alone needs no full sort: the k largest, in order, are all that can be drawn.
        vocab = logits.shape[1]
        logits, order = logits.topk(max(min(p.top_k or vocab, vocab) for p in column))
    probs = logits.softmax(-1)
    if limited:
        k = torch.tensor([p.top_k or logits.shape[1] for p in column], device=device)[:, None]
        probs = probs.masked_fill(torch.arange(probs.shape[1], device=device)[None] >= k, 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
        before = probs.cumsum(-1) - probs
        top_p = torch.tensor([p.top_p for p in column], device=device)[:, None]
        probs = probs.masked_fill((before >= top_p) & (top_p < 1), 0.0)
    if any(p.min_p for p in column):
        least = torch.tensor([p.min_p for p in column], device=device)[:, None] * probs.amax(-1, keepdim=True)
        probs = probs.masked_fill(probs < least, 0.0)
    cdf = probs.double().cumsum(-1)
    target = torch.from_numpy(uniforms(requests)).to(device)[:, None] * cdf[:, -1:]
    chosen = torch.searchsorted(cdf, target, right=True).clamp_(max=cdf.shape[1] - 1)
    return (order.gather(1, chosen) if order is not None else chosen)[:, 0]


def uniforms(requests: Sequence[Request]) -> np.ndarray:
    """One number in [0, 1) a row from (seed, position): splitmix64 (Steele et al., OOPSLA 2014), as float64."""
    with np.errstate(over="ignore"):
        state = np.array([r.seed & 0xFFFFFFFFFFFFFFFF for r in requests], np.uint64)
        at = np.array([r.num_output_tokens + 1 for r in requests], np.uint64)
        z = _mix(state) + at * np.uint64(0x9E3779B97F4A7C15)
        return (_mix(z) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def token_logprobs(logits: Tensor, token_ids: Sequence[int], top: Sequence[int]) -> list[TokenLogprobs]:
    """Log-probabilities of each row's token and its `top[i]` likeliest. logits `[n, vocab]` fp32."""
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    ranks = (logprobs > chosen).sum(-1) + 1
    values, ids = logprobs.topk(max(1, *top))
    rows = zip(token_ids, chosen[:, 0].tolist(), ranks.tolist(), ids.tolist(), values.tolist(), top, strict=True)
    return [TokenLogprobs(t, lp, rank, i[:n], v[:n]) for t, lp, rank, i, v, n in rows]
