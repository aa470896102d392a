"""Workload of a benchmark: prompts, popularity of models and arrivals, all from one seed. Knows nothing about HTTP."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from wire.options import option

_TEXT = (
    "market harbour engine letter winter garden signal copper answer village paper silver question mountain evening "
    "record bridge kitchen station science painter island teacher window theory ladder journey"
)
WORDS = _TEXT.split()


@dataclass(frozen=True, slots=True)
class Target:
    """A model and the tenant that requests it."""

    tenant: str
    api_key: str | None
    model: str


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload of `n` measured requests after `warmup` others.

    Closed loop: `concurrency` requests at any time. Open loop, if `rate` (requests per second) is given: Poisson
    arrivals, independent of the number of requests in flight. Target i is chosen with probability proportional to
    `1 / (i + 1)**zipf`.
    """

    targets: tuple[Target, ...]
    n: int = option(64, least=1, help="Number of measured requests.")
    concurrency: int = option(16, flag="--c", least=1, help="Concurrent requests (closed loop).")
    rate: float | None = option(None, above=0, help="Poisson arrivals per second, instead of --c.")
    zipf: float = option(0.0, least=0, help="Skew of the models; 0 is even.")
    input_words: int = option(64, least=1, help="Words per prompt.")
    output_tokens: int = option(64, least=1, help="Tokens per answer.")
    warmup: int = option(4, least=0, help="Warm-up requests.")
    seed: int = option(0, help="Seed of prompts, models and arrivals.")

    def requests(self) -> Iterator[tuple[Target, str]]:
        """Yield `warmup + n` pairs of target and prompt; the prompts share no prefix."""
        source = random.Random(self.seed)
        weights = [1 / (i + 1) ** self.zipf for i in range(len(self.targets))]
        for target in source.choices(self.targets, weights, k=self.warmup + self.n):
            yield target, " ".join(source.choices(WORDS, k=self.input_words))

    def gaps(self) -> Iterator[float]:
        """Yield the seconds between arrivals of an open loop: exponential with mean `1 / rate`."""
        if self.rate is None:
            raise ValueError("a closed loop has no arrival times")
        source = random.Random(self.seed + 1)
        while True:
            yield source.expovariate(self.rate)
