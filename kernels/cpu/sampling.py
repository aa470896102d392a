"""Sampling on the CPU: `kernels.reference.sample` row by row in numpy, sorting as little as possible.

numpy, not torch: a pass over a row of 49k logits takes about 20 us, less than waking torch's threads.
"""

import numpy as np
import torch
from torch import Tensor

from kernels.reference import uniforms

# First candidates of a top-p draw: tokens at least this likely relative to the most likely one.
_FIRST_CUT = 1e-2
_RUN = 256  # tokens whose weights are summed before the sums are searched


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """Sample like `kernels.reference.sample`: logits `[B, vocab]` fp32, one parameter per row; returns `[B]` int64.

    A row with NaN or infinity, which an adapter's weights may cause, gives some valid token.
    """
    rows = logits.numpy()
    parameters = zip(
        temperature.tolist(), top_k.tolist(), top_p.tolist(), min_p.tolist(), uniforms(seeds, positions).tolist(),
        strict=True,
    )  # fmt: skip
    return torch.tensor([_choose(row, *own) for row, own in zip(rows, parameters, strict=True)])


def _choose(row: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float) -> int:
    likeliest = int(row.argmax())
    if temperature == 0 or not np.isfinite(row[likeliest]):
        return likeliest
    ids = None  # all of the vocabulary
    if 0 < top_k < len(row):
        ids = np.flatnonzero(row >= np.partition(row, len(row) - top_k)[len(row) - top_k])
    # The division comes last: quotients of finite logits may be infinite with an adapter, and their difference NaN.
    with np.errstate(over="ignore"):
        weights = np.exp(((row if ids is None else row[ids]) - row[likeliest]) / np.float32(temperature))
    least = np.float32(min_p)
    if top_p < 1:
        least = max(least, _least_of_top_p(weights, top_p))
    if least > 0:
        kept = np.flatnonzero(weights >= least)
        weights, ids = weights[kept], kept if ids is None else ids[kept]
    at = _first_beyond(weights, uniform)
    return at if ids is None else int(ids[at])


def _least_of_top_p(weights: np.ndarray, top_p: float) -> np.float32:
    """Return the smallest weight that is kept: the larger weights sum up to less than top_p of the total."""
    wanted = top_p * weights.sum(dtype=np.float64)
    near = weights[weights >= _FIRST_CUT]
    above = 0.0
    if near.sum(dtype=np.float64) < wanted:
        # The distribution is flat: narrow down the weights to sort by their upper 16 bits, which order like the floats.
        halves = weights.view(np.uint32) >> 16
        sums = np.bincount(halves, weights)[::-1].cumsum()
        at = min(int(np.searchsorted(sums, wanted)), len(sums) - 1)
        above = float(sums[at - 1]) if at else 0.0
        near = weights[halves == len(sums) - 1 - at]
    ordered = np.sort(near)[::-1]
    last = int(np.searchsorted(above + ordered.cumsum(dtype=np.float64), wanted))
    return ordered[min(last, len(ordered) - 1)] if len(ordered) else np.float32(0)


def _first_beyond(weights: np.ndarray, uniform: float) -> int:
    """Return the first index at which the cumulative weight exceeds `uniform` times the total. Sums are fp64."""
    whole = len(weights) // _RUN * _RUN
    runs = weights[:whole].reshape(-1, _RUN).sum(1, dtype=np.float64)
    ends = np.append(runs, weights[whole:].sum(dtype=np.float64)).cumsum()
    target = uniform * ends[-1]
    run = min(int(np.searchsorted(ends, target, side="right")), len(ends) - 1)
    before = ends[run - 1] if run else 0.0
    part = weights[run * _RUN : (run + 1) * _RUN]
    found = int(np.searchsorted(before + part.cumsum(dtype=np.float64), target, side="right"))
    # Rounding may place the target at the end of the run; then take the run's last token with a weight.
    return run * _RUN + (found if found < len(part) else int(np.flatnonzero(part)[-1]))
