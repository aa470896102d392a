"""Sampling in three launches: no sort, no wait for the host, any mix of rows in one CUDA graph.

No program reads two rows, so a row's token never depends on the other rows. Semantics: `kernels.reference.sample`.
Top-k and top-p keep the tokens whose value is at least t: the largest t at which k tokens remain, or tokens with top_p
of the weight. A search over integers, to which floats map in the same order, finds t: each round narrows the interval
of t to a quarter. The draw is an inverse CDF over the remaining tokens, in vocabulary order, summed in fp64.

Rows with cuts are divided among several programs: each keeps the `CANDIDATES` likeliest tokens of its part of the
vocabulary, and one program then cuts and draws among these. Its answer is exact if the candidates contain every token
that the cuts keep, which the program checks. All other rows take the last launch, where one program reads the whole
row: one pass if greedy, three for a plain draw, sixteen more for each kind of cut that the candidates could not answer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Tokens that a program reads, and that it keeps.
PART, CANDIDATES = 8192, 128


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
    part: int = PART,
) -> Tensor:
    """Sample like `kernels.reference.sample`: logits `[B, vocab]` fp32, one parameter per row; returns `[B]` int64.

    part: tokens that a program reads. Parameters are read on the device, so a graph replays with any values. Rows of
    only -inf give token 0, rows with +inf the first token that has it. Raises ValueError for unsuitable shapes or
    dtypes.
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
    num_rows, vocab = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if not num_rows:
        return tokens
    block, part = (min(size, triton.next_power_of_2(vocab)) for size in (4096, part))
    parts = triton.cdiv(vocab, part)

    def scratch(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty((num_rows, *shape), dtype=dtype, device=logits.device)

    found, ids = scratch(torch.float32, parts, CANDIDATES), scratch(torch.int32, parts, CANDIDATES)
    counts, bounds = scratch(torch.int32, parts), scratch(torch.int32, parts)
    largest, mass = scratch(torch.float32, parts), scratch(torch.float64, parts)
    is_done = scratch(torch.int32)
    kept = (found, ids, counts, bounds, largest, mass)
    sizes = {"VOCAB": vocab, "PARTS": parts, "KEPT": CANDIDATES}
    _keep[(num_rows, parts)](logits, *parameters[:4], *kept, logits.stride(0), **sizes, PART=part, num_warps=16)
    _choose[(num_rows,)](
        *parameters, *kept, tokens, is_done, **sizes, PARTS_PADDED=triton.next_power_of_2(parts), num_warps=8
    )
    _sample[(num_rows,)](logits, *parameters, tokens, is_done, logits.stride(0), VOCAB=vocab, BLOCK=block, num_warps=8)
    return tokens


# Row strides and the vocabulary size are constant for a process. Parameters can be anywhere in a step's buffer.
_PARAMETERS = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")


@triton.jit
def _has_few(temperature, top_k, top_p, min_p, row, VOCAB: tl.constexpr, KEPT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return whether the row has a cut after which the likeliest tokens of each part may be all that remains."""
    k = tl.load(top_k + row)
    is_cut = ((k > 0) & (k < VOCAB)) | (tl.load(top_p + row) < 1.0) | (tl.load(min_p + row) > 0.0)
    return (tl.load(temperature + row) > 0.0) & is_cut & ((k <= KEPT) | (k >= VOCAB))


@triton.jit(do_not_specialize_on_alignment=_PARAMETERS[:4])
def _keep(  # type: ignore[no-untyped-def]
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    found,
    ids,
    counts,
    bounds,
    largest,
    mass,
    stride,
    VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    KEPT: tl.constexpr,
    PART: tl.constexpr,
):
    """Keep the likeliest tokens of a part, in vocabulary order: those `>= bound`. Sum the weights of all of them."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if _has_few(temperature, top_k, top_p, min_p, row, VOCAB, KEPT):
        token = part * PART + tl.arange(0, PART)
        x = tl.load(logits + row * stride + token, mask=token < VOCAB, other=float("-inf"))
        is_possible = x > float("-inf")
        key = _ordered(x)
        k = tl.load(top_k + row)
        wanted = tl.where((k > 0) & (k < VOCAB), k, KEPT).to(tl.float32)
        bound = _cut_among(key, is_possible.to(tl.float32), wanted)
        kept = is_possible & (key >= bound)
        place = tl.cumsum(kept.to(tl.int32), 0) - 1
        at = (row * PARTS + part) * KEPT + place
        tl.store(found + at, x, mask=kept & (place < KEPT))
        tl.store(ids + at, token, mask=kept & (place < KEPT))
        top = tl.max(x, 0)
        weight = tl.exp((x - tl.where(top > float("-inf"), top, 0.0)) / tl.load(temperature + row))
        tl.store(counts + row * PARTS + part, tl.sum(kept.to(tl.int32), 0))
        tl.store(bounds + row * PARTS + part, bound)
        tl.store(largest + row * PARTS + part, top)
        tl.store(mass + row * PARTS + part, tl.sum(tl.where(is_possible, weight, 0.0).to(tl.float64), 0))


@triton.jit(do_not_specialize_on_alignment=_PARAMETERS)
def _choose(  # type: ignore[no-untyped-def]
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    positions,
    found,
    ids,
    counts,
    bounds,
    largest,
    mass,
    tokens,
    is_done,
    VOCAB: tl.constexpr,
    PARTS: tl.constexpr,
    KEPT: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
):
    """Cut and draw among the kept tokens of a row, if all that remain are kept."""
    row = tl.program_id(0).to(tl.int64)
    answered = 0
    if _has_few(temperature, top_k, top_p, min_p, row, VOCAB, KEPT):
        p = tl.arange(0, PARTS_PADDED)
        in_use = p < PARTS
        fits = tl.max(tl.load(counts + row * PARTS + p, mask=in_use, other=0), 0) <= KEPT
        tops = tl.load(largest + row * PARTS + p, mask=in_use, other=float("-inf"))
        top = tl.max(tops, 0)
        if fits & (top > float("-inf")) & (top < float("inf")):
            inverse = 1.0 / tl.load(temperature + row)
            # No token below the largest bound can be told from one that was not kept.
            bound = tl.max(tl.load(bounds + row * PARTS + p, mask=in_use, other=-2147483648), 0)
            c = tl.arange(0, PARTS_PADDED * KEPT)
            is_kept = c % KEPT < tl.load(counts + row * PARTS + c // KEPT, mask=c < PARTS * KEPT, other=0)
            x = tl.load(found + row * (PARTS * KEPT) + c, mask=is_kept, other=float("-inf"))
            token_at = tl.load(ids + row * (PARTS * KEPT) + c, mask=is_kept, other=0)
            key = _ordered(x)
            masses = tl.load(mass + row * PARTS + p, mask=in_use, other=0.0)
            total = tl.sum(masses * tl.exp((tops - top) * inverse).to(tl.float64), 0)
            k = tl.load(top_k + row)
            is_exact = (k > 0) & (k < VOCAB)  # the k likeliest are kept
            if is_exact:
                is_kept = is_kept & (key >= _cut_among(key, is_kept.to(tl.float32), k.to(tl.float32)))
            weight = tl.where(is_kept, tl.exp((x - top) * inverse), 0.0)
            if is_exact:
                total = tl.sum(weight.to(tl.float64), 0)
            share = tl.load(top_p + row)
            if share < 1.0:
                cut = _cut_among(key, weight, (total * share).to(tl.float32))
                weight = tl.where(key >= cut, weight, 0.0)
                is_exact = is_exact | (cut >= bound)
            least = tl.load(min_p + row)
            weight = tl.where(weight >= least, weight, 0.0)
            lowest = (bound ^ ((bound >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
            is_exact = is_exact | (bound == -2147483648) | (tl.exp((lowest - top) * inverse) < least)
            before = tl.cumsum(weight.to(tl.float64), 0)
            target = tl.sum(weight.to(tl.float64), 0) * _uniform(tl.load(seeds + row), tl.load(positions + row))
            drawn = tl.min(tl.where((before > target) & (weight > 0.0), token_at, VOCAB), 0)
            # Sums that round differently can end just below the total and miss the target.
            last = tl.max(tl.where(weight > 0.0, token_at, 0), 0)
            if is_exact:
                tl.store(tokens + row, tl.minimum(drawn, last).to(tl.int64))
                answered = 1
    tl.store(is_done + row, answered)


@triton.jit
def _cut_among(key, weight, wanted):  # type: ignore[no-untyped-def]
    """Return the largest t such that the entries with `key >= t` weigh at least `wanted`."""
    low = tl.full((), -2147483648, dtype=tl.int32)
    quarter = tl.full((), 1073741824, dtype=tl.int32)
    for _ in range(16):
        steps = (tl.sum(tl.where(key >= low + quarter, weight, 0.0), 0) >= wanted).to(tl.int32)
        steps += (tl.sum(tl.where(key >= low + quarter + quarter, weight, 0.0), 0) >= wanted).to(tl.int32)
        steps += (tl.sum(tl.where(key >= low + quarter + quarter + quarter, weight, 0.0), 0) >= wanted).to(tl.int32)
        low += steps * quarter
        quarter = quarter // 4
    return low


@triton.jit(do_not_specialize_on_alignment=_PARAMETERS)
def _sample(  # type: ignore[no-untyped-def]
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    positions,
    tokens,
    is_done,
    stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(is_done + row) == 0:
        _sample_row(
            logits + row * stride, temperature, top_k, top_p, min_p, seeds, positions, tokens, row, VOCAB, BLOCK
        )


@triton.jit
def _sample_row(  # type: ignore[no-untyped-def]
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    positions,
    tokens,
    row,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
    # Beside +inf no weight is a number.
    if (heat > 0.0) & (largest > float("-inf")) & (largest < float("inf")):
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
