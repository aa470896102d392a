"""The sampler at Llama-3.1-8B's vocabulary, by kind of row; its floor is one pass over the logits."""

from collections.abc import Iterator

import torch

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


def parameters(kind: str, num_rows: int, device: torch.device) -> list[torch.Tensor]:
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32)
    columns = [
        torch.full((num_rows,), value, dtype=dtype, device=device)
        for value, dtype in zip(KINDS[kind], dtypes, strict=True)
    ]
    row = torch.arange(num_rows, device=device)
    return [*columns, row, row + 7]


def works(quick: bool) -> Iterator[Work]:
    device = torch.device("cuda")
    for num_rows in [64] if quick else [1, 64]:
        num_bytes = 4 * num_rows * VOCAB
        inputs = [torch.randn(num_rows, VOCAB, device=device) * 3 for _ in range(copies_past_l2(num_bytes))]
        for kind in KINDS:
            columns = parameters(kind, num_rows, device)
            yield Work(f"{num_rows} rows, {kind}", [lambda x=x, c=columns: sample(x, *c) for x in inputs], num_bytes)


def dry_run(device: torch.device, dtype: torch.dtype) -> None:
    """Check one small case of each kind against the reference, on any device. Raises AssertionError if they differ."""
    x = torch.randn(len(KINDS), 300, generator=torch.Generator().manual_seed(0)) * 3
    columns = [torch.cat(rows) for rows in zip(*(parameters(kind, 1, x.device) for kind in KINDS), strict=True)]
    got = sample(x.to(device), *(column.to(device) for column in columns))
    assert got.tolist() == reference.sample(x, *columns).tolist()
