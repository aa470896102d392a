"""Sampling without an engine."""

from collections.abc import Sequence

from torch import Tensor

from engine.execution.sampler import SamplingTables, sample
from engine.execution.sampling_tables import DrawTable
from engine.scheduling.request import Request
from kernels.cpu.plain import TorchOps


def sample_rows(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Return the next token of each request, which gets the seat of its row. logits: `[n, vocab]`, edited in place."""
    for seat, request in enumerate(requests):
        request.seat = seat
    return sample(logits, requests, TorchOps(), SamplingTables(DrawTable(len(requests)), None))
