"""The fused element-wise kernels at Llama-3.1-8B's widths, compared with the copy bandwidth."""

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.kernels.measure import Work, copies_past_l2
from kernels import reference
from kernels.gpu import fused

TITLE = "Fused element-wise"
HIDDEN, INTERMEDIATE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4096, 14336, 32, 8, 128, 16


def works(quick: bool) -> Iterator[Work]:
    device, dtype = torch.device("cuda"), torch.bfloat16

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    weight, cos_sin = randn(HIDDEN), torch.rand(8192, HEAD_DIM, device=device)
    for num_tokens in [64] if quick else [64, 4096]:
        row = num_tokens * HIDDEN * 2
        pairs = [(randn(num_tokens, HIDDEN), randn(num_tokens, HIDDEN)) for _ in range(copies_past_l2(4 * row))]
        calls = [partial(fused.add_rms_norm, x, r, weight, 1e-5) for x, r in pairs]
        yield Work(f"add_rms_norm, {num_tokens} tokens", calls, 4 * row)

        row = num_tokens * INTERMEDIATE * 2
        inputs = [randn(num_tokens, 2 * INTERMEDIATE) for _ in range(copies_past_l2(3 * row))]
        yield Work(f"silu_and_mul, {num_tokens} tokens", [partial(fused.silu_and_mul, x) for x in inputs], 3 * row)

        qkv_width = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
        row = num_tokens * qkv_width * 2
        inputs = [randn(num_tokens, qkv_width) for _ in range(copies_past_l2(2 * row))]
        cache = randn(2, -(-num_tokens // BLOCK_SIZE), NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        positions = torch.arange(num_tokens, device=device)
        others = positions, cos_sin, cache[0], cache[1], positions
        calls = [partial(fused.rope_and_write_kv, x, *others) for x in inputs]
        yield Work(f"rope_and_write_kv, {num_tokens} tokens", calls, 2 * row)


def dry_run(device: torch.device, dtype: torch.dtype) -> None:
    """Check one small case of each against the reference, on any device. Raises AssertionError if they differ."""
    x, weight = torch.randn(3, 64, dtype=dtype, device=device), torch.randn(64, dtype=dtype, device=device)
    residual, twin = x.clone(), x.clone()
    close = torch.testing.assert_close
    close(
        fused.add_rms_norm(x, residual, weight, 1e-5),
        reference.add_rms_norm(x, twin, weight, 1e-5),
        atol=2e-2,
        rtol=2e-2,
    )
    close(fused.silu_and_mul(x), reference.silu_and_mul(x), atol=2e-2, rtol=2e-2)
    caches = [torch.zeros(1, 1, 16, 16, dtype=dtype, device=device) for _ in range(4)]
    index = torch.arange(3, device=device)
    cos_sin = torch.rand(4, 16, device=device)
    got = fused.rope_and_write_kv(x, index, cos_sin, caches[0], caches[1], index)
    expected = reference.rope_and_write_kv(x, index, cos_sin, caches[2], caches[3], index)
    close((got, caches[0], caches[1]), (expected, caches[2], caches[3]), atol=2e-2, rtol=2e-2)
