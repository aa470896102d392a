"""Compiler run of every launch for an H200 (sm_90) or another architecture, without a GPU; run by test_compiles.py.

Triton needs no device to compile, only a driver that names a target. So the real launch functions run here with tensors
in host memory, and every launch stops after compilation. Prints one JSON line per compiled variant: kernel, label, uses
of tensor-core instructions, bytes of stack (spilled registers), bytes of shared memory. With the argument `all`, pages
and KV caches are of every type; otherwise one type of 8 bits each.
"""

import json
import re
import subprocess
import sys
import tempfile
from itertools import accumulate
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from kernels.gpu import (
    attention_work,
    fused,
    logit_edits,
    paged_attention,
    quantised,
    sampling,
    scaled,
    segmented_lora,
    segments,
)
from kernels.reference import HeadNorms, LoraGroup, LoraRouting
from kernels.weights import LinearWeights, Scheme, fp8, int8_by_output

# Triton compiles separate variants for 1 and for multiples of 16. Other lengths: around powers of two, and any.
OTHER_LENGTHS = (1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 48, 50)

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


# The compute capability without its point.
ARCHITECTURE = int(sys.argv[1]) if sys.argv[1:] and sys.argv[1].isdigit() else 90
# Triton has no fp8_e4m3 before sm_89.
DTYPES = (torch.bfloat16, *((torch.float8_e4m3fn,) if ARCHITECTURE >= 89 else ()), torch.int8)
# Without `all`, pages are of fp8_e4m3 where there is one. KV caches are of int8, which needs the most registers.
PAGE_DTYPES, CACHE_DTYPES = (DTYPES, DTYPES) if "all" in sys.argv else (DTYPES[:2], (DTYPES[0], DTYPES[-1]))


class Driver:
    """The part of a Triton driver that compilation needs."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", ARCHITECTURE, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def stack_bytes(cubin: bytes) -> int:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return max(int(size) for size in re.findall(r"STACK:(\d+)", usage))


launch = JITFunction.run
seen: set[tuple[str, str]] = set()
step = {"label": ""}


def compile_only(self, *args, grid, warmup=False, **kwargs):
    kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
    if (self.__name__, kernel.hash) not in seen:
        seen.add((self.__name__, kernel.hash))
        ptx = kernel.asm["ptx"]
        found = {
            "kernel": self.__name__,
            **step,
            "wgmma": ptx.count("wgmma.mma_async"),
            "mma": ptx.count("mma.sync"),
            "stack": stack_bytes(kernel.asm["cubin"]),
            "shared": kernel.metadata.shared,
            "waits": ptx.count("griddepcontrol.wait"),
            "launches early": kernel.metadata.launch_pdl,
        }
        print(json.dumps(found), flush=True)
    return kernel


def anywhere(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor unaligned to 16 bytes, like a part of a packed buffer; in the first step, aligned."""
    odd = step["label"] != "first"
    return torch.cat((tensor.flatten()[:1], tensor.flatten()))[odd:][: tensor.numel()].view(tensor.shape)


def lora(num_tokens: int, offsets: tuple[int, ...], page_dtype: torch.dtype = torch.bfloat16, **options) -> None:
    in_features, slices = 4096, len(offsets) - 1
    group = LoraGroup(
        torch.zeros(4, slices, 8, in_features).to(page_dtype),
        torch.zeros(4, 8, offsets[-1]).to(page_dtype),
        torch.ones(3, slices),
        offsets,
        None if page_dtype == torch.bfloat16 else torch.ones(4, slices, 8),
    )
    index = anywhere(torch.zeros(num_tokens, dtype=torch.int32))
    routing = LoraRouting(index, torch.zeros(3, 8, dtype=torch.int32), torch.tensor([8, 16, 64], dtype=torch.int32))
    x = torch.empty(num_tokens, in_features, dtype=torch.bfloat16)
    y = torch.empty(num_tokens, offsets[-1], dtype=torch.bfloat16)
    segmented_lora.segmented_lora(y, x, group, segments.build_segments(routing, 8, **options))


def attend(query_lens: list[int], context_len: int, cache_dtype: torch.dtype = torch.bfloat16) -> None:
    """Launch attention with Llama-3.1-8B's heads."""
    q = torch.empty(sum(query_lens), 32, 128, dtype=torch.bfloat16)
    cache, scales = cache_of(cache_dtype)
    attend_over(q, cache, query_lens, context_len, k_scales=scales, v_scales=scales)


def attend_as_gemma(query_lens: list[int], context_len: int) -> None:
    """Launch the attention of a sliding-window layer with Gemma-2-2b's heads and soft cap."""
    q, cache = torch.empty(sum(query_lens), 8, 256, dtype=torch.bfloat16), torch.zeros(8, 4, 16, 256).bfloat16()
    attend_over(q, cache, query_lens, context_len, sliding_window=512, softcap=50.0)


def attend_over(q: torch.Tensor, cache: torch.Tensor, query_lens: list[int], context_len: int, **options) -> None:
    starts = anywhere(torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32))
    tables = anywhere(torch.zeros(len(query_lens), context_len // 16 + 1, dtype=torch.int32))
    contexts = anywhere(torch.full((len(query_lens),), context_len, dtype=torch.int32))
    paged_attention.paged_attention(q, cache, cache, tables, starts, contexts, 0.09, **options)


def cache_of(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    return torch.zeros(8, 8, 16, 128).to(dtype), None if dtype == torch.bfloat16 else torch.zeros(8, 8, 16)


def elementwise(num_tokens: int) -> None:
    x = torch.empty(num_tokens, 4096, dtype=torch.bfloat16)
    qkv = torch.empty(num_tokens, 6144, dtype=torch.bfloat16)
    index = anywhere(torch.zeros(num_tokens, dtype=torch.int64))
    fused.rms_norm(x, x[0], 1e-5)
    fused.rms_norm(qkv[:, :4096].view(num_tokens, 32, 128), x[0, :128], 1e-6)
    fused.add_rms_norm(x, x, x[0], 1e-5)
    fused.add_rms_norm(x, x, torch.empty(4096), 1e-5)
    for dtype in CACHE_DTYPES:
        cache, scales = cache_of(dtype)
        for norms in (None, HeadNorms(qkv[0, :128], qkv[0, :128], 1e-6)):
            fused.rope_and_write_kv(qkv, index, torch.zeros(9, 128), cache, cache, index, scales, scales, norms)
    for gate in (fused.silu_and_mul, fused.gelu_and_mul):
        gate(torch.empty(num_tokens, 2 * 14336, dtype=torch.bfloat16))


def multiply(num_tokens: int) -> None:
    """Launch products with quantised weights, for few rows and for `num_tokens`, and the rounding of their inputs."""
    scales = torch.zeros(6144, 128, dtype=torch.float16)
    four = {"values": torch.zeros(6144, 2048, dtype=torch.uint8), "scales": scales}
    eight = {"values": torch.zeros(6144, 4096, dtype=torch.int8), "scales": scales}
    zeros = torch.zeros(6144, 128, dtype=torch.uint8)
    layers = [
        LinearWeights(Scheme("int8", 32, torch.float16), eight, 4096, 6144),
        LinearWeights(Scheme("int4", 32, torch.float16), four, 4096, 6144),
        LinearWeights(Scheme("int4", 32, torch.float16, "zeros"), four | {"zeros": zeros}, 4096, 6144),
        fp8(torch.zeros(6144, 4096).to(torch.float8_e4m3fn), torch.zeros(6144, 1)),
        fp8(torch.zeros(6144, 4096).to(torch.float8_e4m3fn), torch.zeros(6144, 32), 128),
    ]
    by_output = int8_by_output(torch.zeros(6144, 4096, dtype=torch.int8), torch.zeros(6144, 1))
    for rows in (8, num_tokens + quantised.FEW_ROWS):
        x = anywhere(torch.empty(rows, 4096, dtype=torch.bfloat16))
        for weights in layers:
            quantised.linear(x, weights)
        has_fp8 = (ARCHITECTURE // 10, ARCHITECTURE % 10) >= scaled.CAPABILITY
        for width in (4096, 28672):
            for dtype in (torch.int8, torch.float8_e4m3fn) if has_fp8 else (torch.int8,):
                scaled.round_rows(anywhere(torch.empty(rows, width, dtype=torch.bfloat16)), dtype)
        scaled.linear(x, by_output)


def draw(num_rows: int) -> None:
    """Launch sampling with Llama-3.1-8B's vocabulary."""
    zeros, logits = anywhere(torch.zeros(num_rows)), torch.zeros(num_rows, 128256)
    index = anywhere(zeros.long())
    counts = torch.zeros(2, 128256, dtype=torch.int32)
    logit_edits.penalise(logits, index, index, counts, anywhere(torch.zeros(3, num_rows)))
    logit_edits.forbid(logits, index, anywhere(torch.zeros(num_rows, 4008, dtype=torch.int32)))
    sampling.sample(
        logits,
        zeros,
        anywhere(zeros.int()),
        zeros,
        zeros,
        anywhere(zeros.long()),
        anywhere(zeros.long()),
    )


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    JITFunction.run = compile_only
    torch.empty = torch.zeros  # no kernel writes the tables by which torch's ops gather
    segmented_lora._num_sms = attention_work._num_sms = lambda device: 132
    segmented_lora.can_launch_early = paged_attention.can_launch_early = lambda device: ARCHITECTURE >= 90
    step["label"] = "first"
    run(64, 512)
    step["label"] = "other lengths"
    for n in OTHER_LENGTHS:
        run(n, 480 + 37 * n)


def run(decodes: int, prompt: int) -> None:
    """Launch a step of decoding requests only, then a step with a prompt."""
    offsets = (0, 4096, 5120, 6144)
    for dtype in PAGE_DTYPES:
        lora(decodes, offsets, dtype, tile_sizes=segments.DECODE)
        lora(prompt, offsets, dtype, num_adapters=2)
    for dtype in CACHE_DTYPES:
        attend([1] * decodes, 700 + decodes, dtype)
        attend([prompt, 1, 5], 800 + prompt, dtype)
    lora(prompt, offsets, single_adapter=True)
    attend([1] * (1 + decodes // 50), 8192)
    attend_as_gemma([1] * decodes, 700 + decodes)
    attend_as_gemma([prompt, 1, 5], 800 + prompt)
    elementwise(decodes)
    multiply(decodes)
    draw(decodes)


if __name__ == "__main__":
    sys.exit(main())
