"""Next tokens from logits, vectorised over the batch, without waiting for the device.

Rows are independent: a request's draw depends on its own seed and position only, never on the rest of the batch.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from engine.execution.edit_uploads import BAN, Edits, KeptEdits
from engine.execution.masks import constrain
from engine.execution.sampling_tables import AllowedTable, DrawTable, KindTable, Row, TokenTable
from engine.execution.transfer import upload
from engine.scheduling.logit_edits import LogitEdits
from engine.scheduling.request import NOT_FINITE, Request, TokenLogprobs
from engine.scheduling.token_rules import AllowedTokens
from kernels.ops import Ops
from kernels.platform import platform_of

log = logging.getLogger(__name__)

# Number of logits rows whose log-probabilities are computed together.
LOGPROB_ROWS = 64


@dataclass(frozen=True, slots=True)
class SamplingTables:
    """State of the sampler by seat, kept between steps. tokens, allowed: None on the CPU, where each request has counts
    and masks of its own, which cost less there.
    """

    draws: DrawTable
    tokens: TokenTable | None
    allowed: AllowedTable | None = None
    edits: KeptEdits = field(default_factory=KeptEdits)
    kinds: KindTable = field(default_factory=KindTable)


def sample(
    logits: Tensor,
    requests: Sequence[Request],
    ops: Ops,
    tables: SamplingTables,
    *,
    index: np.ndarray | None = None,
    lengths: np.ndarray | None = None,
) -> Tensor:
    """Return `[n]` int64, the token of each row. logits: `[n, vocab]` fp32, edited in place; row i is `requests[i]`'s.
    Plain requests may have several rows, each after tokens that the request lacks.

    index, lengths: each row's seat, and the number of tokens before it; see `DrawTable.columns`.
    """
    special, is_greedy = tables.kinds.of(requests)
    if special:
        _change(logits, special, ops, tables)
    if is_greedy:
        tokens = likeliest(logits)
    else:
        tokens = ops.sample(logits, *tables.draws.upload(logits.device, tables.draws.columns(requests, index, lengths)))
    if tables.tokens is not None:
        tables.tokens.add(special, tokens)
    return tokens


def _change(logits: Tensor, rows: Sequence[Row], ops: Ops, tables: SamplingTables) -> None:
    """Apply the masks, penalties, bias and bans of these rows in place."""
    masks = [(row, request.mask) for row, request in rows if request.mask is not None]
    if tables.allowed is not None:
        tables.allowed.forbid(logits, rows, ops)
        masks = [(row, mask) for row, mask in masks if not isinstance(mask, AllowedTokens)]
    constrain(logits, masks, ops)
    if tables.tokens is not None:
        tables.tokens.penalise(logits, rows, ops)
    if any(r.edits_logits or (tables.tokens is None and r.params.penalises) for _, r in rows):
        edit_logits(logits, rows, tables.edits, has_penalties=tables.tokens is None)


def likeliest(logits: Tensor) -> Tensor:
    """Return the index of each row's largest logit, the first among equals, `[n]` int64."""
    if not platform_of(logits.device).is_host:
        return logits.argmax(-1)
    # Torch takes 0.4 ms for 16 rows of 49k, or more if its threads sleep; numpy takes 0.1 ms (docs/lab-notes.md).
    return torch.tensor([int(row.argmax()) for row in logits.numpy()])


def mark_not_finite(tokens: Tensor, logits: Tensor) -> Tensor:
    """Return tokens `[n]` with `NOT_FINITE` where the chosen logit is NaN or infinite.

    Products with an adapter's finite weights can overflow. A finite choice is kept, whatever else its row contains.
    """
    chosen = logits.gather(1, tokens[:, None])[:, 0]
    return torch.where(chosen < torch.inf, tokens, NOT_FINITE)


def edit_logits(logits: Tensor, rows: Sequence[Row], kept: KeptEdits, *, has_penalties: bool) -> None:
    """Apply penalties, if `has_penalties`, bias and bans in place: one gather and scatter of each kind for these rows.
    kept: bias and bans of the step before.

    A request whose edits fail ends by itself; no other row depends on it.
    """
    scaled, lowered, biased, banned = Edits(), Edits(), Edits(), Edits()
    banned_where_masked: list[tuple[int, np.ndarray]] = []
    for row, request in rows:
        try:
            if has_penalties:
                _add_penalties(row, request, scaled, lowered)
            p = request.params
            if p.logit_bias:
                biased.add(row, _edits(request).bias_ids, _edits(request).bias)
            for found in bans(request):
                if request.mask is None:
                    banned.add(row, found, BAN)
                else:
                    banned_where_masked.append((row, found))
        except Exception:
            log.exception("a request's sampling parameters could not be applied")
            request.error = "its sampling parameters could not be applied"
    device = logits.device
    if scaled:
        index, ids, penalty = scaled.upload(device)
        values = logits[index, ids]
        logits[index, ids] = torch.where(values > 0, values / penalty, values * penalty)
    if lowered:
        index, ids, penalty = lowered.upload(device)
        logits[index, ids] = logits[index, ids] - penalty
    if biased:
        kept.biased = biased.upload_unless(kept.biased, device)
        index, ids, bias = kept.biased.tensors
        logits[index, ids] = logits[index, ids] + bias
    if banned:
        kept.banned = banned.upload_unless(kept.banned, device)
        index, ids, _ = kept.banned.tensors
        logits.index_put_((index, ids), logits.new_full((), -torch.inf))
    for row, found in banned_where_masked:
        # A ban is skipped if it would leave no token: a mask may allow only the end, or only a banned word.
        [ids] = upload(device, [found])
        rest = logits[row].index_fill(0, ids, -torch.inf)
        logits[row] = torch.where(rest.amax() > -torch.inf, rest, logits[row])


def _add_penalties(row: int, request: Request, scaled: Edits, lowered: Edits) -> None:
    p = request.params
    if p.repetition_penalty != 1.0:
        seen, _ = _edits(request).all.update(request.token_ids)
        scaled.add(row, seen, p.repetition_penalty)
    if (p.presence_penalty or p.frequency_penalty) and request.num_output_tokens:
        used, counts = _edits(request).output.update(request.token_ids)
        lowered.add(row, used, p.presence_penalty + p.frequency_penalty * counts)


def bans(request: Request) -> Iterator[np.ndarray]:
    """Yield non-empty sets of tokens that may not come next: first the banned words', then end tokens before
    `min_tokens`.
    """
    p = request.params
    if p.bad_words is not None:
        ids = p.bad_words.after(request.token_ids, request.num_output_tokens)
        if len(ids):
            yield ids
    if request.num_output_tokens < p.min_tokens and request.stop_ids:
        yield _edits(request).ends


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Log-probabilities of each row's own token, `[n]`, and of the likeliest, `[n, most]`; on the device, then on the
    host.
    """

    token_ids: Tensor
    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.token_ids, self.logprobs, self.ranks, self.top_ids, self.top_logprobs

    def entries(self, top: Sequence[int]) -> list[TokenLogprobs]:
        """Return row i with its `top[i]` likeliest tokens. Reads the tensors' values."""
        rows = zip(*(t.tolist() for t in self.tensors), top, strict=True)
        return [TokenLogprobs(t, lp, rank, ids[:n], values[:n]) for t, lp, rank, ids, values, n in rows]


def token_logprobs(logits: Tensor, token_ids: Tensor, most: int) -> RowLogprobs:
    """Return log-probabilities of each row's token and its `most` likeliest. logits: `[n, vocab]` fp32; token_ids:
    `[n]`.

    Works on a few rows at a time; all rows of a long prompt would take twice the memory of its logits.
    """
    blocks = [
        _token_logprobs(logits[at : at + LOGPROB_ROWS], token_ids[at : at + LOGPROB_ROWS], most)
        for at in range(0, len(logits), LOGPROB_ROWS)
    ]
    if len(blocks) == 1:
        return blocks[0]
    return RowLogprobs(*(torch.cat(parts) for parts in zip(*(block.tensors for block in blocks), strict=True)))


def _token_logprobs(logits: Tensor, token_ids: Tensor, most: int) -> RowLogprobs:
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, token_ids[:, None])
    values, ids = logprobs.topk(max(1, most))
    return RowLogprobs(token_ids, chosen[:, 0], (logprobs > chosen).sum(-1) + 1, ids, values)


def _edits(request: Request) -> LogitEdits:
    """Return the request's edits, created at its first step."""
    if request.edits is None:
        request.edits = LogitEdits(request.params.logit_bias, request.stop_ids, request.num_prompt_tokens)
    return request.edits
