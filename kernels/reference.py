"""The truth of every op: plain torch, any device, no thought for speed.

Every fast path (CPU twins in `kernels.cpu.plain`, Triton kernels in their own files) is tested against this file.

Shapes used throughout (T = tokens of all requests laid flat, B = requests in the batch):

* `k_cache`, `v_cache`: `[num_blocks, num_kv_heads, block_size, head_dim]`, one pair per layer.
* `block_tables`: `[B, max_blocks]` int32; logical block j of request i lies in physical block `block_tables[i, j]`.
* `query_start`: `[B + 1]` int32; request i owns tokens `query_start[i]:query_start[i + 1]`.
* `context_lens`: `[B]` int32; tokens of request i in the cache *including* this step's, so its last query sits
  at position `context_lens[i] - 1`.
* `slot_mapping`: `[T]` int64; token t's key and value go to block `slot // block_size`, row `slot % block_size`.
* `k_scales`, `v_scales`: `[num_blocks, num_kv_heads, block_size]` fp32 beside caches of 8 bits, see `quantize_rows`.
* LoRA pages: see `segmented_lora`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LoraGroup:
    """Rank pages of one group of projections that read the same input (qkv; o; gate and up; down) in one layer.

    a_pages: `[num_pages, num_slices, page_rank, in_features]`, slice s is one projection's A.
    b_pages: `[num_pages, page_rank, out_features]`, B transposed; slice s owns columns `offsets[s]:offsets[s + 1]`.
    scales: `[num_slots, num_slices]` fp32, `alpha / r` (or `alpha / sqrt(r)`) of each adapter's projection,
        0 where the adapter does not target it.
    offsets: `num_slices + 1` column bounds in the group's fused output.
    row_scales: `[num_pages, num_slices, page_rank]` fp32 beside pages of 8 bits (`quantize_rows`), else None. A row
        of A and the row of B that it meets in the sum share one: the product of theirs.
    """

    a_pages: Tensor
    b_pages: Tensor
    scales: Tensor
    offsets: tuple[int, ...]
    row_scales: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LoraRouting:
    """Which adapter each token uses, the same for every layer of a step.

    adapter_index: `[T]` int32, the adapter's slot, -1 for the base model.
    page_table: `[num_slots, max_pages]` int32, physical page of an adapter's logical page; -1 beyond its rank.
    ranks: `[num_slots]` int32, the adapter's largest rank; rank rows beyond a slice's own rank are zero.
    """

    adapter_index: Tensor
    page_table: Tensor
    ranks: Tensor


def segmented_lora(y: Tensor, x: Tensor, group: LoraGroup, routing: LoraRouting) -> None:
    """`y[t, slice s] += scales[a, s] * (x[t] @ A[a, s].T) @ B[a, s].T` with `a = adapter_index[t]`, in place.

    y `[T, offsets[-1]]`, x `[T, in_features]`, any float dtype; sums are made in fp32.
    Rows with adapter_index -1 are not touched, bit for bit, and slices of scale 0 are not read: their pages may hold a
    former adapter's weights, whose product may be infinite, and 0 times infinity is NaN.
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


def take(table: Tensor, rows: Tensor) -> Tensor:
    """`table[rows]`, of any dtype: torch cannot index fp8 but as bytes."""
    return table.view(torch.uint8)[rows].view(table.dtype) if table.dtype in LARGEST else table[rows]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, in fp32, cast before the weight as Llama does."""
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return weight * h.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`residual += x` in place, then `rms_norm(residual)`."""
    residual += x
    return rms_norm(residual, weight, eps)


def apply_rope(x: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotary embedding, half-split form (GPT-NeoX): x `[T, heads, D]`, cos_sin `[max_positions, D]` (cos | sin)."""
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, -1)
    x1, x2 = x.float().chunk(2, -1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).to(x.dtype)


# The largest value of each dtype of 8 bits. A row of zeros has the smallest scale, so nothing divides by zero.
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
SMALLEST_AMAX = 1e-20


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x `[..., D]` in 8 bits, one scale for each row: `x ~ values * scales`, scales `[...]` fp32.

    The scale maps the row's largest magnitude onto the dtype's largest; int8 rounds half to even. Raises ValueError for
    a dtype that is neither float8_e4m3fn nor int8.
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
    """Stores k, v `[T, num_kv_heads, D]` at their slots, quantised where the caches come with scales.

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
            # As bytes: torch cannot scatter fp8.
            cache.view(torch.uint8)[block, :, row] = values.view(torch.uint8)
            scales[block, :, row] = row_scales


def rope_and_write_kv(
    qkv: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Tensor:
    """Splits qkv `[T, (num_heads + 2 * num_kv_heads) * D]`, rotates q and k, stores k and v; returns q `[T, Hq, D]`."""
    num_kv_heads, head_dim = k_cache.shape[1], k_cache.shape[3]
    heads = qkv.view(len(qkv), -1, head_dim)
    q, k, v = heads.split((heads.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads), 1)
    write_kv(apply_rope(k, positions, cos_sin), v, k_cache, v_cache, slot_mapping, k_scales, v_scales)
    return apply_rope(q, positions, cos_sin)


def read_kv(cache: Tensor, scales: Tensor | None, blocks: Tensor, num_tokens: int) -> Tensor:
    """The first tokens of a request's keys or values, `[num_tokens, num_kv_heads, D]` fp32."""
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
) -> Tensor:
    """Causal attention of flat queries over a paged cache; prefill, decode and mixed batches alike.

    q `[T, num_heads, D]`; returns the same shape and dtype. Query j of a request sits at position
    `context_len - num_queries + j` and sees positions up to its own, the last `sliding_window` of them if not 0.
    GQA: query head h reads key-value head `h // (num_heads / num_kv_heads)`.
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
        query_at = torch.arange(length - (end - start), length, device=q.device)[:, None]
        key_at = torch.arange(length, device=q.device)[None]
        hidden = key_at > query_at
        if sliding_window:
            hidden |= key_at <= query_at - sliding_window
        scores.masked_fill_(hidden, float("-inf"))
        out[start:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(q.dtype)
    return out


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """gate_up `[T, 2 * intermediate]` -> `silu(gate) * up`, `[T, intermediate]`."""
    gate, up = gate_up.chunk(2, -1)
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate_up.dtype)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """One token a row of logits `[B, vocab]` fp32; returns `[B]` int64. Parameters `[B]`.

    temperature fp32: 0 takes the likeliest, the first of equals. Otherwise tokens are left out, in this order: top_k
    int32 (0: off), those smaller than the k-th largest; top_p fp32, those whose strictly likelier ones among the rest
    make up top_p already; min_p fp32, those less likely than min_p times the likeliest. Of what is left, in the order
    of the vocabulary, the first is taken whose cumulated probability exceeds `uniforms(seeds, positions)`.
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
    """A number in [0, 1) from each (seed, position), `[B]` int64 each; returns fp64.

    splitmix64 (Steele et al., "Fast splittable pseudorandom number generators", OOPSLA 2014), twice. Needs no state, so
    a draw depends neither on what was drawn before nor on the batch.
    """
    z = _mix(seeds) + positions * -0x61C8864680B583EB
    return _unsigned_shift(_mix(z), 11).double() * 2.0**-53


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _unsigned_shift(z, 30)) * -0x40A7B892E31B1A47
    z = (z ^ _unsigned_shift(z, 27)) * -0x6B2FB644ECCEEE15
    return z ^ _unsigned_shift(z, 31)


def _unsigned_shift(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)
