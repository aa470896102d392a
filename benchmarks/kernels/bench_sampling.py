"""The sampler at Llama-3.1-8B's vocabulary, by kind of row; its floor is one pass over the logits."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.measure import Work, copies_past_l2
from kernels import reference
from kernels.gpu.sampling import sample

TITLE = "Sampling"
VOCAB = 128256
# temperature, top_k, top_p, min_p
KINDS = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (1.0, 0, 1.0, 0.0),
    "min-p": (1.0, 0, 1.0, 0.05),
    "top-k 50": (1.0, 50, 1.0, 0.0),
    "top-p 0.9": (1.0, 0, 0.9, 0.0),
    "top-k 50 and top-p 0.9": (1.0, 50, 0.9, 0.0),
}


def parameters(kinds: Sequence[str], device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the sampler's parameters of rows of these kinds."""
    temperature, top_k, top_p, min_p = zip(*(KINDS[kind] for kind in kinds), strict=True)
    row = torch.arange(len(kinds), device=device)
    return (
        torch.tensor(temperature, dtype=torch.float32, device=device),
        torch.tensor(top_k, dtype=torch.int32, device=device),
        torch.tensor(top_p, dtype=torch.float32, device=device),
        torch.tensor(min_p, dtype=torch.float32, device=device),
        row,
        row + 7,
    )


def works(quick: bool) -> Iterator[Work]:
    device = torch.device("cuda")
    for num_rows in [64] if quick else [1, 64]:
        num_bytes = 4 * num_rows * VOCAB
        inputs = [torch.randn(num_rows, VOCAB, device=device) * 3 for _ in range(copies_past_l2(num_bytes))]
        for kind in KINDS:
            columns = parameters([kind] * num_rows, device)
            yield Work(f"{num_rows} rows, {kind}", [partial(sample, x, *columns) for x in inputs], num_bytes)


def dry_run(device: torch.device, dtype: torch.dtype) -> None:
    """Check one small case of each kind against the reference, on any device. Raises AssertionError if they differ."""
    x = torch.randn(len(KINDS), 300, generator=torch.Generator().manual_seed(0)) * 3
    got = sample(x.to(device), *parameters(list(KINDS), device))
    assert got.tolist() == reference.sample(x, *parameters(list(KINDS), x.device)).tolist()
