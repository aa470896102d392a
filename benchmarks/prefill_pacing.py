"""First token of a long prompt beside other tenants' streams, by the fixed cost of a step with prompts, simulated.

    python -m benchmarks.prefill_pacing

The real pacer plans the chunks; a machine of given times runs them, with the prompt alone on it besides 8 streams. A
prompt of 4,000 tokens is the first one after the engine's start. `before`: a pacer without trials of double chunks and
without a GPU's least chunk. Takes a second.
"""

import random
from dataclasses import dataclass, field

import torch

from engine.scheduling.pacing import Pacer
from kernels.platform import platform_of

STRETCH, STREAMS, STEP_TOKENS, PROMPT = 1.8, 8, 632, 4000
FIXED_MS = (0, 2, 3, 4, 6, 8, 10, 15)
# Seconds of a step of decodes only and of a prompt token: estimates for an H200, from the review of the engine.
MODELS = {"8B, 4.5 ms and 20 us a token": (0.0045, 20e-6), "1B, 1.2 ms and 3 us a token": (0.0012, 3e-6)}


@dataclass
class Machine:
    """A machine with a decode time, `fixed` seconds for any prompt and `each` seconds per prompt token.

    noise: the relative variation of steps; one step of 20 loses its core and takes three times as long.
    """

    decode: float
    fixed: float
    each: float
    noise: float = 0.0
    seed: int = 0
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def seconds(self, tokens: int) -> float:
        exact = self.decode + (self.fixed + self.each * tokens if tokens else 0.0)
        if not self.noise:
            return exact
        return exact * (3.0 if self._random.random() < 0.05 else self._random.gauss(1.0, self.noise))


class WithoutTrials(Pacer):
    """The pacer before it tried chunks of double size."""

    _is_trial_due = False


def serve(
    pacer: Pacer, machine: Machine, prompt: int, streams: int = STREAMS, most: int = STEP_TOKENS
) -> tuple[float, list[int]]:
    """Return the seconds to compute a prompt beside other tenants' streams, and its chunks."""
    seconds, chunks = 0.0, list[int]()
    while sum(chunks) < prompt:
        chunk = min(pacer.paced_tokens(streams, most, 1 / streams), prompt - sum(chunks))
        took = machine.seconds(chunk)
        pacer.observe(took, streams, chunk)
        seconds += took
        chunks.append(chunk)
    return seconds, chunks


def first_token(pacer: Pacer, decode: float, fixed: float, each: float) -> float:
    """Return the seconds to the first token of the first prompt after 20 steps of decodes."""
    machine = Machine(decode, fixed, each)
    for _ in range(20):
        pacer.observe(machine.seconds(0), STREAMS, 0)
    return serve(pacer, machine, PROMPT)[0]


def main() -> None:
    least = platform_of(torch.device("cuda")).min_prompt_tokens
    print(f"| fixed cost, ms | {' | '.join(map(str, FIXED_MS))} |\n{'|---' * (len(FIXED_MS) + 1)}|")
    for name, (decode, each) in MODELS.items():
        for when, kind, floor in (("before", WithoutTrials, None), ("now", Pacer, least)):
            times = [
                first_token(kind(STRETCH) if floor is None else kind(STRETCH, floor), decode, fixed / 1000, each)
                for fixed in FIXED_MS
            ]
            print(f"| {name}, {when} | {' | '.join(f'{seconds:.2f} s' for seconds in times)} |")


if __name__ == "__main__":
    main()
