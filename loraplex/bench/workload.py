"""What is asked, of whom and when: prompts, popularity and arrivals, all from one seed. Knows nothing of HTTP."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

_TEXT = (
    "market harbour engine letter winter garden signal copper answer village paper silver question mountain evening "
    "record bridge kitchen station science painter island teacher window theory ladder journey"
)
WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class Target:
    """One model as one tenant asks for it."""

    tenant: str
    api_key: str | None
    model: str


@dataclass(frozen=True, slots=True)
class Workload:
    """`n` measured requests after `warmup` others.

    Closed loop: `concurrency` requests at any time. Open loop, if `rate` (requests a second) is given: Poisson
    arrivals, however many are then under way. Target i is asked with probability proportional to `1 / (i + 1)**zipf`.
    """

    targets: tuple[Target, ...]
    n: int
    concurrency: int
    rate: float | None
    zipf: float
    input_words: int
    output_tokens: int
    warmup: int
    seed: int

    def requests(self) -> Iterator[tuple[Target, str]]:
        """`warmup + n` pairs of target and prompt; the prompts share no prefix."""
        source = random.Random(self.seed)
        weights = [1 / (i + 1) ** self.zipf for i in range(len(self.targets))]
        for target in source.choices(self.targets, weights, k=self.warmup + self.n):
            yield target, " ".join(source.choices(WORDS, k=self.input_words))

    def gaps(self) -> Iterator[float]:
        """Seconds between arrivals of an open loop: exponential with mean `1 / rate`."""
        if self.rate is None:
            raise ValueError("a closed loop has no arrival times")
        source = random.Random(self.seed + 1)
        while True:
            yield source.expovariate(self.rate)
