"""Implementation of `kernels.ops.Ops` on a GPU: matrix products by cuBLAS, other ops by our Triton kernels."""

import torch
from torch import Tensor

from kernels import reference
from kernels.batch import Batch
from kernels.gpu import fused, logit_edits, quantised, scaled, schemes
from kernels.gpu.attention_work import WorkList, list_work
from kernels.gpu.paged_attention import paged_attention
from kernels.gpu.sampling import sample
from kernels.gpu.segmented_lora import expand, segmented_lora, shrink
from kernels.gpu.segments import DECODE, PREFILL, Segments, build_segments
from kernels.ops import DecoderWeights, KvCache, LoraTables, routing_of
from kernels.reference import HeadNorms, LoraGroup, LoraRouting
from kernels.weights import DENSE, LinearWeights, Scheme

# Tokens from which a step with prompts uses LoRA's large tiles, because most of its tokens are a prompt's.
MANY_ROWS = 256


class TritonStepTables:
    """A step's work lists, each built when the first layer needs it and shared by all layers."""

    def __init__(self, batch: Batch, routing: LoraRouting | None) -> None:
        self.batch = batch
        self.routing = routing
        self._segments: dict[int, Segments] = {}
        self._attention: dict[tuple[int, int, int], list[WorkList]] = {}

    def segments(self, routing: LoraRouting, page_rank: int) -> Segments:
        if page_rank not in self._segments:
            # Tables depend only on shapes: a graph replays with any mix of adapters, and a step without a graph uses
            # the kernels that the graphs have compiled.
            is_small = self.batch.max_query_len == 1 or self.batch.num_tokens < MANY_ROWS
            self._segments[page_rank] = build_segments(routing, page_rank, tile_sizes=DECODE if is_small else PREFILL)
        return self._segments[page_rank]

    def attention(self, num_heads: int, num_kv_heads: int, sliding_window: int) -> list[WorkList]:
        key = num_heads, num_kv_heads, sliding_window
        if key not in self._attention:
            self._attention[key] = list_work(
                self.batch.query_start,
                self.batch.context_lens,
                num_heads,
                num_kv_heads,
                num_tokens=self.batch.num_tokens,
                max_query_len=self.batch.max_query_len,
                sliding_window=sliding_window,
            )
        return self._attention[key]


class TritonOps:
    """Triton ops; none of them waits for the device.

    shrink_beside: in a CUDA graph, run LoRA's shrink on a branch parallel to the base projection, which does not need
    it, so that only expand adds its latency to a step. Outside of graphs, the events between streams would cost the
    host more.
    fp8_products: multiply FP8 inputs by FP8 weights, which the device's tensor cores can (`kernels.gpu.scaled`).
    """

    sample = staticmethod(sample)
    penalise = staticmethod(logit_edits.penalise)
    forbid = staticmethod(logit_edits.forbid)

    def __init__(self, shrink_beside: bool = True, fp8_products: bool = False) -> None:
        self._shrink_beside, self._fp8_products = shrink_beside, fp8_products
        self._side: torch.cuda.Stream | None = None

    def serves(self, scheme: Scheme) -> bool:
        return schemes.serves(scheme)

    def pack(self, weights: LinearWeights) -> LinearWeights:
        return weights

    def fuse(self, weights: DecoderWeights, kv: list[KvCache], lora: LoraTables) -> None:
        return None

    def step_tables(self, batch: Batch, lora: LoraTables | None) -> TritonStepTables:
        return TritonStepTables(batch, routing_of(batch, lora))

    def embed(self, weights: LinearWeights, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
        return reference.embed(weights, token_ids, dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return fused.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return fused.add_rms_norm(x, residual, weight, eps)

    def linear(self, x: Tensor, weights: LinearWeights, group: LoraGroup | None, step: TritonStepTables) -> Tensor:
        if group is None or step.routing is None:
            return self._product(x, weights)
        segments = step.segments(step.routing, group.a_pages.shape[2])
        if self._side is None and x.is_cuda:
            self._side = torch.cuda.Stream(x.device)  # created in the warm-up run: a capture cannot create streams
        if self._side is None or not (self._shrink_beside and torch.cuda.is_current_stream_capturing()):
            y = self._product(x, weights)
            segmented_lora(y, x, group, segments)
            return y
        # The side stream's memory is reused only behind a fork, which comes after the expand that read it.
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            planes = shrink(x, group, segments)
        y = self._product(x, weights)
        torch.cuda.current_stream().wait_stream(self._side)
        expand(y, planes, group, segments)
        return y

    def _product(self, x: Tensor, weights: LinearWeights) -> Tensor:
        """Return the base model's part of `linear`."""
        if weights.scheme == DENSE:
            return reference.linear(x, weights)
        if scaled.can_multiply(x, weights, self._fp8_products):
            return scaled.linear(x, weights)
        return quantised.linear(x, weights)

    def rope_and_write_kv(
        self, qkv: Tensor, cos_sin: Tensor, kv: KvCache, step: TritonStepTables, norms: HeadNorms | None = None
    ) -> Tensor:
        b = step.batch
        return fused.rope_and_write_kv(
            qkv, b.positions, cos_sin, kv.k, kv.v, b.slot_mapping, kv.k_scales, kv.v_scales, norms
        )

    def paged_attention(
        self, q: Tensor, kv: KvCache, step: TritonStepTables, scale: float, sliding_window: int, softcap: float = 0.0
    ) -> Tensor:
        b = step.batch
        return paged_attention(
            q,
            kv.k,
            kv.v,
            b.block_tables,
            b.query_start,
            b.context_lens,
            scale,
            sliding_window,
            step.attention(q.shape[1], kv.k.shape[1], sliding_window),
            kv.k_scales,
            kv.v_scales,
            softcap,
        )

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return fused.silu_and_mul(gate_up)

    def gelu_and_mul(self, gate_up: Tensor) -> Tensor:
        return fused.gelu_and_mul(gate_up)
