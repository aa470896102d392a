"""Reference implementation of every op: plain torch, for any device, not optimised.

Every fast path (CPU twins in `kernels.cpu.plain`, Triton kernels in their own files) is tested against this file.

Shapes used throughout (T = tokens of all requests concatenated, B = requests in the batch):

* `k_cache`, `v_cache`: `[num_blocks, num_kv_heads, block_size, head_dim]`, one pair per layer.
* `block_tables`: `[B, max_blocks]` int32; logical block j of request i is physical block `block_tables[i, j]`.
* `query_start`: `[B + 1]` int32; request i owns tokens `query_start[i]:query_start[i + 1]`.
* `context_lens`: `[B]` int32; tokens of request i in the cache *including* this step's, so its last query is
  at position `context_lens[i] - 1`.
* `slot_mapping`: `[T]` int64; token t's key and value go to block `slot // block_size`, row `slot % block_size`.
* `k_scales`, `v_scales`: `[num_blocks, num_kv_heads, block_size]` fp32 for caches of 8 bits, see `quantize_rows`.
* LoRA pages: see `segmented_lora`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.weights import FP8, GROUP, MIDDLE, LinearWeights, is_int8_by_output, take, unpack_halves


@dataclass(frozen=True, slots=True)
class LoraGroup:
    """Rank pages of one group of projections that read the same input (qkv; o; gate and up; down) in one layer.

    Strides from page to page and from slot to slot are arbitrary, so that all groups can share their memory.

    a_pages: `[num_pages, num_slices, page_rank, in_features]`, slice s is one projection's A.
    b_pages: `[num_pages, page_rank, out_features]`, B transposed; slice s owns columns `offsets[s]:offsets[s + 1]`.
    scales: `[num_slots, num_slices]` fp32, `alpha / r` (or `alpha / sqrt(r)`) of each adapter's projection,
        0 where the adapter does not target it.
    offsets: `num_slices + 1` column bounds in the group's fused output.
    row_scales: `[num_pages, num_slices, page_rank]` fp32 for pages of 8 bits (`quantize_rows`), else None. A row of A
        and the corresponding row of B share one scale, the product of both.
    """

    a_pages: Tensor
    b_pages: Tensor
    scales: Tensor
    offsets: tuple[int, ...]
    row_scales: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LoraRouting:
    """The adapter of each token, the same for every layer of a step.

    adapter_index: `[T]` int32, the adapter's slot, -1 for the base model.
    page_table: `[num_slots, max_pages]` int32, physical page of an adapter's logical page; -1 beyond its rank.
    ranks: `[num_slots]` int32, the adapter's largest rank; rank rows beyond a slice's own rank are zero.
    """

    adapter_index: Tensor
    page_table: Tensor
    ranks: Tensor


def dequantize(weights: LinearWeights) -> Tensor:
    """Return the weights of an unpacked layer, `[out, in]`; fp32 unless dense. See `kernels.weights.Scheme`."""
    scheme, tensors = weights.scheme, weights.tensors
    if scheme.kind == "dense":
        return tensors["weight"]
    values = tensors["values"]
    if scheme.kind == "int4":
        values = unpack_halves(values).char()
        if not scheme.offsets:
            values = values - MIDDLE

    def by_input(name: str) -> Tensor:
        return tensors[name].float().repeat_interleave(scheme.group or weights.in_features, 1)[:, : weights.in_features]

    found = values.float() * by_input("scales")
    if scheme.offsets:
        found += by_input("mins") if scheme.offsets == "mins" else -by_input("scales") * by_input("zeros")
    return found


def linear(x: Tensor, weights: LinearWeights, *, rounds_inputs: bool = False) -> Tensor:
    """Return `x W^T + bias`, `[T, out]` in x's dtype, for an unpacked layer; quantised weights are computed in fp32.

    rounds_inputs: with quantised weights, round x to 8 bits too (`quantize_rows`), as backends do in bfloat16: beside
    FP8 weights, and int8 weights with a scale for each output, to their dtype with a scale for each row (GPU); beside
    others to int8 with a scale for each GROUP inputs (CPU, native op).
    """
    weight, bias = dequantize(weights), weights.bias
    if weights.scheme.kind == "dense":
        return torch.nn.functional.linear(x, weight, bias)
    if not rounds_inputs:
        x_rounded = x.float()
    elif weights.scheme.kind == "fp8" or is_int8_by_output(weights.scheme):
        values, scales = quantize_rows(x, weights.tensors["values"].dtype)
        x_rounded = values.float() * scales[:, None]
    else:
        groups = torch.nn.functional.pad(x, (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
        values, scales = quantize_rows(groups, torch.int8)
        x_rounded = (values.float() * scales[..., None]).flatten(1)[:, : x.shape[1]]
    return torch.nn.functional.linear(x_rounded, weight, None if bias is None else bias.float()).to(x.dtype)


def embed(weights: LinearWeights, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the embeddings of tokens, `[T, hidden]`, from an unpacked embedding."""
    if weights.scheme.kind == "dense":
        return weights.tensors["weight"][token_ids]
    return dequantize(weights.rows(token_ids)).to(dtype)


def segmented_lora(y: Tensor, x: Tensor, group: LoraGroup, routing: LoraRouting) -> None:
    """Add `y[t, slice s] += scales[a, s] * (x[t] @ A[a, s].T) @ B[a, s].T` with `a = adapter_index[t]`, in place.

    y `[T, offsets[-1]]`, x `[T, in_features]`, any float dtype; sums are in fp32. Rows with adapter_index -1 stay
    bitwise unchanged, and slices of scale 0 are not read: their pages may hold a former adapter's weights, whose
    product may be infinite, and 0 times infinity is NaN.
    """
    page_rank = group.a_pages.shape[2]
    for slot in sorted(set(routing.adapter_index.tolist()) - {-1}):
        rows = (routing.adapter_index == slot).nonzero().flatten()
        pages = routing.page_table[slot, : -(-int(routing.ranks[slot]) // page_rank)].long()
        out = y[rows].float()
        for s in range(len(group.offsets) - 1):
            if not group.scales[slot, s]:
                continue
            columns = slice(group.offsets[s], group.offsets[s + 1])
            a = take(group.a_pages, pages)[:, s].flatten(0, 1).float()
            b = take(group.b_pages, pages).flatten(0, 1)[:, columns].float()
            h = x[rows].float() @ a.T
            if group.row_scales is not None:
                h *= group.row_scales[pages, s].flatten()
            out[:, columns] += group.scales[slot, s] * (h @ b)
        y[rows] = out.to(y.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `x / sqrt(mean(x^2) + eps) * weight` over the last dimension.

    Computed in fp32. A weight in x's dtype multiplies the rounded quotient, as in Llama; an fp32 weight beside a
    narrower x multiplies it before rounding, as in Gemma. The result has x's dtype.
    """
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * h).to(x.dtype) if weight.dtype != x.dtype else weight * h.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `residual += x` in place, then return `rms_norm(residual)`."""
    residual += x
    return rms_norm(residual, weight, eps)


def apply_rope(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate x `[T, heads, D]` in half-split form (GPT-NeoX); cos_sin `[max_positions, D]` (cos | sin)."""
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, -1)
    x1, x2 = x.float().chunk(2, -1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).to(x.dtype)


# The largest value of each 8-bit dtype. A row of zeros has the smallest scale, so nothing divides by zero.
LARGEST = {FP8: 448.0, torch.int8: 127.0}
SMALLEST_AMAX = 1e-20


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantise x `[..., D]` to 8 bits with one scale per row: `x ~ values * scales`, scales `[...]` fp32.

    The scale maps the row's largest magnitude to the dtype's largest; int8 rounds half to even. Raises ValueError for a
    dtype other than float8_e4m3fn and int8.
    """
    if dtype not in LARGEST:
        raise ValueError(f"dtype: expected float8_e4m3fn or int8, got {dtype}")
    amax = x.float().abs().amax(-1).clamp_min(SMALLEST_AMAX)
    values = x.float() * (LARGEST[dtype] / amax).unsqueeze(-1)
    return (values.round() if dtype == torch.int8 else values).to(dtype), amax * (1.0 / LARGEST[dtype])


def write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """Store k, v `[T, num_kv_heads, D]` at their slots, quantised if scales are given.

    Tokens with a negative slot (padding) store nothing.
    """
    stored = slot_mapping >= 0
    slots, block_size = slot_mapping[stored], k_cache.shape[2]
    block, row = slots // block_size, slots % block_size
    for x, cache, scales in ((k, k_cache, k_scales), (v, v_cache, v_scales)):
        if scales is None:
            cache[block, :, row] = x[stored]
        else:
            values, row_scales = quantize_rows(x[stored], cache.dtype)
            # Written as bytes, because torch cannot scatter fp8.
            cache.view(torch.uint8)[block, :, row] = values.view(torch.uint8)
            scales[block, :, row] = row_scales


class HeadNorms(NamedTuple):
    """Norms of the heads of q and k, `[head_dim]` each, before the rotation (Qwen3, Gemma 3)."""

    q: Tensor
    k: Tensor
    eps: float


def rope_and_write_kv(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Split qkv `[T, (num_heads + 2 * num_kv_heads) * D]`, normalise q and k if there are norms, rotate them, store k
    and v; return q `[T, Hq, D]`.
    """
    num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    heads = qkv.view(len(qkv), -1, head_dim)
    q, k, v = heads.split((heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), 1)
    if norms is not None:
        q, k = rms_norm(q, norms.q, norms.eps), rms_norm(k, norms.k, norms.eps)
    write_kv(apply_rope(k, positions, cos_sin), v, k_cache, v_cache, slot_mapping, k_scales, v_scales)
    return apply_rope(q, positions, cos_sin)


def read_kv(cache: Tensor, scales: Tensor | None, blocks: Tensor, num_tokens: int) -> Tensor:
    """Return the first tokens of a request's keys or values, `[num_tokens, num_kv_heads, D]` fp32."""
    values = take(cache, blocks).transpose(1, 2).flatten(0, 1)[:num_tokens].float()
    return values if scales is None else values * scales[blocks].transpose(1, 2).flatten(0, 1)[:num_tokens, :, None]


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    scale: float,
    sliding_window: int = 0,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Compute causal attention of concatenated queries over a paged cache, for prefill, decode and mixed batches.

    q `[T, num_heads, D]`; returns the same shape and dtype. Query j of a request is at position
    `context_len - num_queries + j` and attends to positions up to its own, only the last `sliding_window` of them if
    not 0. GQA: query head h reads key-value head `h // (num_heads / num_kv_heads)`. softcap: if not 0, scaled scores s
    become `softcap * tanh(s / softcap)` before the softmax (Gemma 2).
    """
    out = torch.empty_like(q)
    block_size = k_cache.shape[2]
    group = q.shape[1] // k_cache.shape[1]
    for i in range(len(context_lens)):
        start, end, length = int(query_start[i]), int(query_start[i + 1]), int(context_lens[i])
        if start == end:
            continue
        blocks = block_tables[i, : -(-length // block_size)].long()
        k = read_kv(k_cache, k_scales, blocks, length).repeat_interleave(group, 1)
        v = read_kv(v_cache, v_scales, blocks, length).repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q[start:end].float(), k) * scale
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        query_at = torch.arange(length - (end - start), length, device=q.device)[:, None]
        key_at = torch.arange(length, device=q.device)[None]
        hidden = key_at > query_at
        if sliding_window:
            hidden |= key_at <= query_at - sliding_window
        scores.masked_fill_(hidden, float("-inf"))
        out[start:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(q.dtype)
    return out


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return `silu(gate) * up`, `[T, intermediate]`, of gate_up `[T, 2 * intermediate]`."""
    gate, up = gate_up.chunk(2, -1)
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate_up.dtype)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """Return `gelu(gate) * up`, `[T, intermediate]`, of gate_up `[T, 2 * intermediate]`; gelu in its tanh form."""
    gate, up = gate_up.chunk(2, -1)
    return (torch.nn.functional.gelu(gate.float(), approximate="tanh") * up.float()).to(gate_up.dtype)


# Added to a token's count in `penalise` if the prompt contains the token; above any number of output tokens.
IN_PROMPT = 1 << 24


def penalise(logits: Tensor, rows: Tensor, seats: Tensor, counts: Tensor, penalties: Tensor) -> None:
    """Lower the logits of tokens that a text contains, in the given rows of logits `[B, vocab]` fp32, in place.

    rows, seats: `[n]` int64. counts: `[num_seats, vocab]` int32, each token's number in the output, plus `IN_PROMPT` if
    the prompt contains it. penalties: `[3, n]` fp32. repetition divides positive logits and multiplies others, of all
    tokens of the text; presence, and frequency times the number, are then subtracted from those of the output.
    """
    found = counts[seats]
    repetition, presence, frequency = penalties[:, :, None]
    x = logits[rows]
    scaled = torch.where(x > 0, x / repetition, x * repetition)
    used = (found % IN_PROMPT).float()
    lowered = torch.where(used > 0, scaled - (presence + frequency * used), scaled)
    logits[rows] = torch.where(found > 0, lowered, x)


def forbid(logits: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Set the logits of tokens whose bit is 0 to -inf, in the given rows of logits `[B, vocab]` fp32, in place.

    rows `[n]` int64; bits `[n, ceil(vocab / 32)]` int32, bit i % 32 of word i // 32 is token i's.
    """
    token = torch.arange(logits.shape[1], device=logits.device)
    allowed = (bits[:, token // 32] >> (token % 32)) & 1
    logits[rows] = logits[rows].masked_fill(allowed == 0, float("-inf"))


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """Sample a token for each row of logits `[B, vocab]` fp32; return `[B]` int64. Parameters `[B]`.

    temperature fp32: 0 selects the most likely token, the first on a tie. Otherwise tokens are removed, in this order:
    top_k int32 (0: off) removes tokens smaller than the k-th largest; top_p fp32 removes tokens whose strictly more
    likely tokens among the rest already reach top_p; min_p fp32 removes tokens less likely than min_p times the most
    likely. The result is the first remaining token, in vocabulary order, whose cumulative probability exceeds
    `uniforms(seeds, positions)`.
    """
    tokens = logits.argmax(-1)
    drawn = uniforms(seeds, positions)
    for i in (temperature > 0).nonzero().flatten().tolist():
        x = logits[i].double() / temperature[i].double()
        weight = (x - x.max()).exp()
        if 0 < top_k[i] < len(x):
            weight[x < x.topk(int(top_k[i])).values[-1]] = 0
        if top_p[i] < 1:
            values, which = x.unique(return_inverse=True)
            mass = torch.zeros_like(values).index_add_(0, which, weight)
            likelier = mass.flip(0).cumsum(0).flip(0) - mass
            weight[likelier[which] >= top_p[i].double() * mass.sum()] = 0
        weight[weight < min_p[i]] = 0
        reached = weight.cumsum(0) > drawn[i] * weight.sum()
        tokens[i] = (reached & (weight > 0)).int().argmax()
    return tokens


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return a number in [0, 1) for each (seed, position), `[B]` int64 each; fp64.

    splitmix64 (Steele et al., "Fast splittable pseudorandom number generators", OOPSLA 2014), twice. It has no state,
    so a draw depends neither on earlier draws nor on the batch.
    """
    z = _mix(seeds) + positions * -0x61C8864680B583EB
    return _unsigned_shift(_mix(z), 11).double() * 2.0**-53


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _unsigned_shift(z, 30)) * -0x40A7B892E31B1A47
    z = (z ^ _unsigned_shift(z, 27)) * -0x6B2FB644ECCEEE15
    return z ^ _unsigned_shift(z, 31)


def _unsigned_shift(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)
