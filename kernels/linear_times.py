"""Measured time of a model's matrix products by the number of rows, with the ops that an engine uses.

A product of few rows is bound by the read of the weights, one of many by arithmetic, and those between by both. So a
roofline is wrong by up to half there (docs/perf/2026-11-21-cpu-sweep.md), while a measured curve is not.
"""

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from kernels.memory import HugePages
from kernels.ops import Ops
from kernels.roofline import MAX_READ_BYTES
from kernels.weights import LinearWeights

ROWS = (1, 4, 8, 16, 32, 64, 256)
# Above so many rows a product is bound by arithmetic, and a fraction of the weights is enough.
MANY_ROWS, FRACTION = 32, 4
# Measurements of each number of rows, and the time after which no further one begins.
RUNS, MAX_S = 3, 0.2


class LinearTimes(NamedTuple):
    """Seconds per element of the weights, at each number of rows of `rows`."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def of(self, elements: float, rows: float) -> float:
        """Return the seconds of products with matrices of so many elements; linear between and beyond the measured."""
        if rows <= self.rows[0]:
            return elements * self.seconds[0]
        points = list(zip(self.rows, self.seconds, strict=True))
        (low, before), (high, after) = next(
            (pair for pair in pairwise(points) if rows <= pair[1][0]), (points[-2], points[-1])
        )
        return elements * (before + (after - before) * (rows - low) / (high - low))


@torch.inference_mode()
def measure_linear(ops: Ops, matrices: Sequence[LinearWeights], dtype: torch.dtype) -> LinearTimes:
    """Measure products on the CPU, in a second or two. Other work at that time makes them look slower.

    matrices: packed, may be without memory. At most MAX_READ_BYTES of them are made, so that they do not fit into a
    cache unless the whole model does.
    """
    made: list[LinearWeights] = []
    memory = HugePages()  # as an engine's weights have; a small matrix has none of its own
    for matrix in matrices:
        if made and sum(each.num_bytes for each in made) + matrix.num_bytes > MAX_READ_BYTES:
            break
        # Zeros would share one page.
        tensors = {
            name: memory.empty(tensor.numel(), tensor.dtype).view(tensor.shape).fill_(1)
            for name, tensor in matrix.tensors.items()
        }
        made.append(LinearWeights(matrix.scheme, tensors, matrix.in_features, matrix.out_features))
    seconds = []
    for rows in ROWS:
        part = made if rows <= MANY_ROWS else made[: max(1, len(made) // FRACTION)]
        elements = sum(matrix.in_features * matrix.out_features for matrix in part)
        seconds.append(_least_time(ops, part, rows, dtype) / elements)
    return LinearTimes(ROWS, tuple(seconds))


def _least_time(ops: Ops, matrices: Sequence[LinearWeights], rows: int, dtype: torch.dtype) -> float:
    inputs = {size: torch.ones(rows, size, dtype=dtype) for size in {matrix.in_features for matrix in matrices}}
    times: list[float] = []
    while len(times) < RUNS and sum(times) < MAX_S:
        began = time.perf_counter()
        for matrix in matrices:
            ops.linear(inputs[matrix.in_features], matrix, None, None)
        times.append(time.perf_counter() - began)
    return min(times)
