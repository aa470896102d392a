"""Sampling in one launch: no sort, no wait for the host, any mix of rows in one CUDA graph.

A program processes one row, so a row's token never depends on the other rows. Semantics: `kernels.reference.sample`.
Top-k and top-p are cuts by value: the largest t such that the tokens `>= t` count k or weigh top_p. Floats map to
integers in the same order, and each pass over the row (which the L2 holds) narrows the interval of t to a quarter.
The draw is an inverse CDF over the remaining tokens, in vocabulary order, summed in fp64.
A greedy row costs one pass, a plain draw three, each kind of cut sixteen more.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


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

    Parameters are read on the device, so a graph replays with any values. Rows of only -inf give token 0. Raises
    ValueError for unsuitable shapes or dtypes.
    """
    if logits.dim() != 2 or logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(f"logits: expected float32 [B, vocab] with contiguous rows, got {logits.dtype} {logits.shape}")
    wanted = {"temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32}
    wanted |= {"seeds": torch.int64, "positions": torch.int64}
    parameters = (temperature, top_k, top_p, min_p, seeds, positions)
    for (name, dtype), parameter in zip(wanted.items(), parameters, strict=True):
        if parameter.shape != logits.shape[:1] or parameter.dtype != dtype or not parameter.is_contiguous():
            raise ValueError(
                f"{name}: expected contiguous {dtype} [{len(logits)}], got {parameter.dtype} {tuple(parameter.shape)}"
            )
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(logits):
        vocab = logits.shape[1]
        block = min(4096, triton.next_power_of_2(vocab))
        _sample[(len(logits),)](logits, *parameters, tokens, logits.stride(0), VOCAB=vocab, BLOCK=block, num_warps=8)
    return tokens


# Row strides and the vocabulary size are constant for a process. Parameters can be anywhere in a step's buffer.
@triton.jit(do_not_specialize_on_alignment=("temperature", "top_k", "top_p", "min_p", "seeds", "positions"))
def _sample(  # type: ignore[no-untyped-def]
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    positions,
    tokens,
    stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    lane = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    best_at = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in tl.range(0, VOCAB, BLOCK, num_stages=4):
        x = tl.load(logits + first + lane, mask=first + lane < VOCAB, other=float("-inf"))
        best_at = tl.where(x > best, first + lane, best_at)
        best = tl.maximum(best, x)
    largest = tl.max(best, 0)
    # The first on a tie.
    token = tl.min(tl.where(best == largest, best_at, VOCAB), 0)
    heat = tl.load(temperature + row)
    if (heat > 0.0) & (largest > float("-inf")):
        inverse = 1.0 / heat
        cut = tl.full((), -2147483648, dtype=tl.int32)
        k = tl.load(top_k + row)
        if (k > 0) & (k < VOCAB):
            cut = _cut(logits, largest, inverse, cut, k.to(tl.float32), VOCAB, BLOCK, False)
        share = tl.load(top_p + row)
        if share < 1.0:
            mass = _mass(logits, largest, inverse, cut, 0.0, VOCAB, BLOCK)
            cut = _cut(logits, largest, inverse, cut, (mass * share).to(tl.float32), VOCAB, BLOCK, True)
        least = tl.load(min_p + row)
        mass = _mass(logits, largest, inverse, cut, least, VOCAB, BLOCK)
        target = mass * _uniform(tl.load(seeds + row), tl.load(positions + row))
        before = tl.zeros((), dtype=tl.float64)
        drawn = tl.full((), VOCAB, dtype=tl.int32)
        last = tl.zeros((), dtype=tl.int32)
        for first in tl.range(0, VOCAB, BLOCK, num_stages=4):
            weight = _weights(logits, first, largest, inverse, cut, least, VOCAB, BLOCK).to(tl.float64)
            reached = before + tl.cumsum(weight, 0) > target
            drawn = tl.minimum(drawn, tl.min(tl.where(reached & (weight > 0.0), first + lane, VOCAB), 0))
            last = tl.maximum(last, tl.max(tl.where(weight > 0.0, first + lane, 0), 0))
            before += tl.sum(weight, 0)
        # Sums that round differently can end just below the total and miss the target.
        token = tl.minimum(drawn, last)
    tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def _weights(  # type: ignore[no-untyped-def]
    logits, first, largest, inverse, cut, least, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the weights of a tile's tokens: exp((x - largest) / temperature), or 0 for cut tokens."""
    lane = first + tl.arange(0, BLOCK)
    x = tl.load(logits + lane, mask=lane < VOCAB, other=float("-inf"))
    weight = tl.exp((x - largest) * inverse)
    return tl.where((_ordered(x) >= cut) & (weight >= least), weight, 0.0)


@triton.jit
def _mass(  # type: ignore[no-untyped-def]
    logits, largest, inverse, cut, least, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    mass = tl.zeros((), dtype=tl.float64)
    for first in tl.range(0, VOCAB, BLOCK, num_stages=4):
        mass += tl.sum(_weights(logits, first, largest, inverse, cut, least, VOCAB, BLOCK).to(tl.float64), 0)
    return mass


@triton.jit
def _cut(  # type: ignore[no-untyped-def]
    logits, largest, inverse, kept, wanted, VOCAB: tl.constexpr, BLOCK: tl.constexpr, WEIGHED: tl.constexpr
):
    """Return the largest t such that the tokens `>= t` among those kept so far weigh (or count) at least `wanted`."""
    low = tl.full((), -2147483648, dtype=tl.int32)
    quarter = tl.full((), 1073741824, dtype=tl.int32)
    for _ in range(16):
        sum_1 = tl.zeros((BLOCK,), dtype=tl.float32)
        sum_2 = tl.zeros((BLOCK,), dtype=tl.float32)
        sum_3 = tl.zeros((BLOCK,), dtype=tl.float32)
        for first in tl.range(0, VOCAB, BLOCK, num_stages=4):
            lane = first + tl.arange(0, BLOCK)
            live = lane < VOCAB
            x = tl.load(logits + lane, mask=live, other=float("-inf"))
            key = _ordered(x)
            weight = (live & (key >= kept)).to(tl.float32)
            if WEIGHED:
                weight *= tl.exp((x - largest) * inverse)
            sum_1 += tl.where(key >= low + quarter, weight, 0.0)
            sum_2 += tl.where(key >= low + quarter + quarter, weight, 0.0)
            sum_3 += tl.where(key >= low + quarter + quarter + quarter, weight, 0.0)
        steps = (tl.sum(sum_1, 0) >= wanted).to(tl.int32)
        steps += (tl.sum(sum_2, 0) >= wanted).to(tl.int32)
        steps += (tl.sum(sum_3, 0) >= wanted).to(tl.int32)
        low += steps * quarter
        quarter = quarter // 4
    return tl.maximum(low, kept)


@triton.jit
def _ordered(x):  # type: ignore[no-untyped-def]
    """Return integers in the order of the floats; adding 0 makes both zeros equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _uniform(seed, position):  # type: ignore[no-untyped-def]
    """Compute `kernels.reference.uniforms`."""
    z = _mix(seed.to(tl.uint64)) + position.to(tl.uint64) * 0x9E3779B97F4A7C15
    return (_mix(z) >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _mix(z):  # type: ignore[no-untyped-def]
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)
