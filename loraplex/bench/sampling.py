"""Distributions of lengths and of adapters' popularity. The `kind` of a scenario's table selects the class."""

import itertools
import math
from random import Random
from typing import Annotated

from msgspec import Meta, Struct

# More tokens than any model's context.
Tokens = Annotated[int, Meta(ge=1, le=10_000_000)]


class _Shape(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """Base of the distributions."""


class Fixed(_Shape, frozen=True, tag="fixed"):
    """Always `tokens`."""

    tokens: Tokens

    def draw(self, random: Random) -> int:
        return self.tokens


class UniformLength(_Shape, frozen=True, tag="uniform"):
    """Every number from `min` to `max` equally often."""

    min: Tokens
    max: Tokens

    def draw(self, random: Random) -> int:
        return random.randint(self.min, self.max)


class LogNormal(_Shape, frozen=True, tag="lognormal"):
    """Log-normal with the given `median`; `sigma` is the deviation of the logarithm. Clipped to `min` and `max`."""

    median: Annotated[float, Meta(ge=1, le=10_000_000)]
    sigma: Annotated[float, Meta(ge=0, le=5)]
    min: Tokens = 1
    max: Tokens = 10_000_000

    def draw(self, random: Random) -> int:
        return max(self.min, min(self.max, round(random.lognormvariate(math.log(self.median), self.sigma))))


Length = Fixed | UniformLength | LogNormal


class Even(_Shape, frozen=True, tag="uniform"):
    """Every adapter equally often."""

    def weights(self, count: int) -> list[float]:
        return [1.0] * count


class Zipf(_Shape, frozen=True, tag="zipf"):
    """Adapter number i (from 1) with probability proportional to `1 / i**s`."""

    s: Annotated[float, Meta(ge=0, le=10)]

    def weights(self, count: int) -> list[float]:
        return [1 / (i + 1) ** self.s for i in range(count)]


class PowerLaw(_Shape, frozen=True, tag="power"):
    """Share `(k / n)**alpha` of the requests for the first k of n adapters (S-LoRA's synthetic traces).

    alpha 1 is uniform; smaller values prefer the first adapters.
    """

    alpha: Annotated[float, Meta(gt=0, le=10)]

    def weights(self, count: int) -> list[float]:
        shares = [(k / count) ** self.alpha for k in range(count + 1)]
        return [high - low for low, high in itertools.pairwise(shares)]


Popularity = Even | Zipf | PowerLaw
