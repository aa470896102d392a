"""Ops in plain torch for any CPU: the fallback if `kernels.cpu.native` cannot be compiled, and its slow twin."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernels import reference
from kernels.batch import Batch
from kernels.cpu.sampling import sample
from kernels.ops import DecoderWeights, KvCache, LoraTables, routing_of
from kernels.reference import HeadNorms, LoraGroup, LoraRouting
from kernels.weights import LinearWeights, Scheme


@dataclass(frozen=True, slots=True)
class TorchStepTables:
    batch: Batch
    routing: LoraRouting | None
    query_bounds: list[int]
    context_lens: list[int]


class TorchOps:
    """Plain torch ops, stateless. Decodes share one padded gather and one SDPA; each prefill chunk has its own SDPA."""

    sample = staticmethod(sample)
    penalise = staticmethod(reference.penalise)
    forbid = staticmethod(reference.forbid)

    def serves(self, scheme: Scheme) -> bool:
        # Products would dequantise FP8 weights again in each step, so they are dequantised once, when they are read.
        return scheme.kind != "fp8"

    def pack(self, weights: LinearWeights) -> LinearWeights:
        return weights

    def fuse(self, weights: DecoderWeights, kv: list[KvCache], lora: LoraTables) -> None:
        return None

    def step_tables(self, batch: Batch, lora: LoraTables | None) -> TorchStepTables:
        return TorchStepTables(batch, routing_of(batch, lora), batch.query_start.tolist(), batch.context_lens.tolist())

    def embed(self, weights: LinearWeights, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
        return reference.embed(weights, token_ids, dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return reference.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return reference.add_rms_norm(x, residual, weight, eps)

    def linear(self, x: Tensor, weights: LinearWeights, group: LoraGroup | None, step: TorchStepTables) -> Tensor:
        y = reference.linear(x, weights)
        if group is not None and step.routing is not None:
            reference.segmented_lora(y, x, group, step.routing)
        return y

    def rope_and_write_kv(
        self, qkv: Tensor, cos_sin: Tensor, kv: KvCache, step: TorchStepTables, norms: HeadNorms | None = None
    ) -> Tensor:
        b = step.batch
        return reference.rope_and_write_kv(
            qkv, b.positions, cos_sin, kv.k, kv.v, b.slot_mapping, kv.k_scales, kv.v_scales, norms
        )

    def paged_attention(
        self, q: Tensor, kv: KvCache, step: TorchStepTables, scale: float, sliding_window: int, softcap: float = 0.0
    ) -> Tensor:
        out = torch.empty_like(q)
        bounds, lengths = step.query_bounds, step.context_lens
        decodes = [i for i in range(len(lengths)) if bounds[i + 1] - bounds[i] == 1]
        if decodes:
            rows = torch.tensor([bounds[i] for i in decodes])
            ends = torch.tensor([lengths[i] for i in decodes])[:, None]
            key_at = torch.arange(int(ends.max()))[None]
            seen = key_at < ends
            if sliding_window:
                seen &= key_at >= ends - sliding_window
            tables = step.batch.block_tables[decodes]
            out[rows] = self._attend(q[rows][:, None], kv, tables, seen[:, None], scale, softcap)[:, 0]
        for i in range(len(lengths)):
            start, end = bounds[i], bounds[i + 1]
            if end - start < 2:
                continue
            query_at = torch.arange(lengths[i] - (end - start), lengths[i])[:, None]
            key_at = torch.arange(lengths[i])[None]
            seen = key_at <= query_at
            if sliding_window:
                seen &= key_at > query_at - sliding_window
            tables = step.batch.block_tables[i : i + 1]
            out[start:end] = self._attend(q[start:end][None], kv, tables, seen[None], scale, softcap)[0]
        return out

    def _attend(self, q: Tensor, kv: KvCache, tables: Tensor, seen: Tensor, scale: float, softcap: float) -> Tensor:
        """Compute attention.

        q `[n, queries, heads, D]`, seen `[n, queries, keys]`; heads of a group are folded into the queries. Keys and
        values that no query of a request sees are replaced by zeros: they may belong to another request, and a NaN
        there passes through a weight of 0 and through an additive mask.
        """
        n, queries, heads, dim = q.shape
        kv_heads, block_size, keys = kv.k.shape[1], kv.k.shape[2], seen.shape[-1]
        tables = tables[:, : -(-keys // block_size)].long()
        unseen = ~seen.any(1)
        foreign = unseen[:, :, None, None] if bool(unseen.any()) else None
        k = _gather(kv.k, kv.k_scales, tables, q.dtype, foreign, keys)
        v = _gather(kv.v, kv.v_scales, tables, q.dtype, foreign, keys)
        group = heads // kv_heads
        folded = q.view(n, queries, kv_heads, group, dim).permute(0, 2, 3, 1, 4).reshape(n, kv_heads, -1, dim)
        mask = seen[:, None, None].expand(n, 1, group, queries, keys).reshape(n, 1, -1, keys)
        if softcap:  # which SDPA does not have
            scores = softcap * (folded.float() @ k.float().transpose(2, 3) * (scale / softcap)).tanh()
            out = (scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v.float()).to(q.dtype)
        else:
            out = scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=scale)
        return out.view(n, kv_heads, group, queries, dim).permute(0, 3, 1, 2, 4).reshape(n, queries, heads, dim)

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return reference.silu_and_mul(gate_up)

    def gelu_and_mul(self, gate_up: Tensor) -> Tensor:
        return reference.gelu_and_mul(gate_up)


def _gather(
    cache: Tensor, scales: Tensor | None, tables: Tensor, dtype: torch.dtype, foreign: Tensor | None, keys: int
) -> Tensor:
    """Return the tables' first `keys` rows `[n, heads, keys, D]` in `dtype`, zeros where foreign `[n, keys, 1, 1]`."""
    if scales is None:
        found = cache[tables]
    else:
        # Indexed as bytes, because torch cannot index fp8.
        values = cache.view(torch.uint8)[tables].view(cache.dtype)
        found = (values.float() * scales[tables].unsqueeze(-1)).to(dtype)
    rows = found.transpose(2, 3).flatten(1, 2)[:, :keys]
    return (rows if foreign is None else rows.masked_fill(foreign, 0)).transpose(1, 2)
