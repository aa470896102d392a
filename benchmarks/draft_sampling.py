"""Time the sampling of steps with drafts: all places of plain requests at once, against one place after the other.

    python -m benchmarks.draft_sampling [--device cuda] [--streams 1 8 32] [--drafts 5] [--vocab 49152]

Each step has its own logits, so that no cache holds them. Place by place, a draft is accepted with the probability
`accepted`, and only the places after accepted drafts are sampled and waited for; at once, every place is sampled and
all are waited for together. Times are medians in microseconds. Run nothing else on the machine at the same time.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine.execution.sampler import SamplingTables, sample
from engine.execution.sampling_tables import DrawTable
from engine.execution.transfer import Download, upload
from engine.scheduling.request import NewRequest, Request, SamplingParams
from kernels.ops import Ops
from kernels.platform import pick_ops

KINDS = {
    "greedy": SamplingParams(temperature=0),
    "temperature 1": SamplingParams(temperature=1, seed=1),
    "top-p 0.9": SamplingParams(temperature=1, top_p=0.9, seed=1),
    "top-k 50": SamplingParams(temperature=1, top_k=50, seed=1),
}
ACCEPTED = (0.0, 0.5, 0.9)
# Standard deviations of the random logits: a flat distribution, and a sharp one.
SPREADS = {"flat": 1.0, "sharp": 6.0}


class Sampler:
    """The runner's sampling of places, on given logits."""

    def __init__(self, streams: int, params: SamplingParams, ops: Ops) -> None:
        self.requests = [Request(NewRequest(str(i), [1, 2, 3], params), seed=i) for i in range(streams)]
        for seat, request in enumerate(self.requests):
            request.seat = seat
        self._ops, self._sampling = ops, SamplingTables(DrawTable(streams), None)

    def at_once(self, logits: Tensor, drafts: int) -> None:
        """Sample all places. logits: `[streams * (1 + drafts), vocab]`."""
        owners = [request for request in self.requests for _ in range(1 + drafts)]
        ahead = np.tile(np.arange(1 + drafts), len(self.requests))
        lengths = np.array([request.num_tokens for request in owners]) + ahead
        self._read(sample(logits, owners, self._ops, self._sampling, lengths=lengths))

    def by_place(self, logits: Tensor, numbers: Sequence[int]) -> None:
        """Sample the first `numbers[i]` places of request i, those of one number together."""
        places = len(logits) // len(self.requests)
        for number in range(max(numbers)):
            left = [i for i, own in enumerate(numbers) if own > number]
            [index] = upload(logits.device, [np.array([i * places + number for i in left])])
            self._read(sample(logits[index], [self.requests[i] for i in left], self._ops, self._sampling))

    def _read(self, tokens: Tensor) -> None:
        Download([tokens]).wait()[0].tolist()


def draw_numbers(rng: random.Random, streams: int, drafts: int, accepted: float) -> list[int]:
    """Return the number of places that each request has with its accepted drafts."""
    numbers = []
    for _ in range(streams):
        number = 1
        while number <= drafts and rng.random() < accepted:
            number += 1
        numbers.append(number)
    return numbers


def median_us(step: Callable[[int], None], steps: int, device: torch.device) -> float:
    seconds = []
    for number in range(steps + 2):  # the first two touch memory and compile
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        step(number)
        seconds.append(time.perf_counter() - began)
    return 1e6 * statistics.median(seconds[2:])


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--drafts", type=int, default=5)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    device, rng = torch.device(args.device), random.Random(0)
    ops = pick_ops(device, torch.bfloat16, 64, 16)
    print("| streams | logits | kind | at once | " + " | ".join(f"by place, {p:.0%} accepted" for p in ACCEPTED) + " |")
    print("|---|---|---|" + "---|" * (1 + len(ACCEPTED)))
    for streams in args.streams:
        for shape, spread in SPREADS.items():
            rows = streams * (1 + args.drafts)
            logits = [torch.randn(rows, args.vocab, device=device) * spread for _ in range(4)]
            for kind, params in KINDS.items():
                sampler = Sampler(streams, params, ops)
                found = [median_us(lambda n: sampler.at_once(logits[n % 4], args.drafts), args.steps, device)]  # noqa: B023
                for accepted in ACCEPTED:
                    numbers = [draw_numbers(rng, streams, args.drafts, accepted) for _ in range(args.steps + 2)]
                    found.append(
                        median_us(lambda n: sampler.by_place(logits[n % 4], numbers[n]), args.steps, device)  # noqa: B023
                    )
                print(f"| {streams} | {shape} | {kind} | " + " | ".join(f"{us:.0f}" for us in found) + " |", flush=True)


if __name__ == "__main__":
    main()
