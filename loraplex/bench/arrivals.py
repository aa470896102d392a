"""Arrival processes of a tenant's requests: times in seconds from the tenant's start, from one random source.

Independent of HTTP. The `kind` of a scenario's `arrival` table selects the class.
"""

import math
from collections.abc import Iterator
from random import Random
from typing import Annotated, Literal, Self

from msgspec import Meta, Struct
from msgspec.structs import replace

# Seconds of the longest run: a week.
LONGEST = 604_800
# Requests per second. A generator in one process sends about a thousand (docs/design/bench.md). A source of less than
# the lowest rate has one request in the longest run.
LOWEST_RATE, HIGHEST_RATE = 1e-6, 10_000
Rate = Annotated[float, Meta(ge=LOWEST_RATE, le=HIGHEST_RATE)]
RateOrZero = Annotated[float, Meta(ge=0, le=HIGHEST_RATE)]
Seconds = Annotated[float, Meta(gt=0, le=LONGEST)]
# Shorter on phases have no meaning, and times divided by them leave the range of a float.
OnSeconds = Annotated[float, Meta(ge=0.001, le=LONGEST)]
# Fields of arrival processes to which their numbers of requests per second are proportional.
RATES = ("rate", "start_rate", "end_rate", "speed")


class _Arrival(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """Base of the arrival processes."""

    def scaled(self, factor: float) -> Self:
        """Return the process with its rates multiplied. A closed loop has none. The bounds are not checked."""
        return replace(self, **{name: getattr(self, name) * factor for name in self.__struct_fields__ if name in RATES})


class Closed(_Arrival, frozen=True, tag="closed"):
    """A closed loop: `concurrency` requests in flight; the next one starts when one ends."""

    concurrency: Annotated[int, Meta(ge=1, le=10_000)]


class Even(_Arrival, frozen=True, tag="even"):
    """Arrivals at equal distances, `rate` per second (the VTC paper's synthetic clients)."""

    rate: Rate

    def times(self, random: Random) -> Iterator[float]:
        number = 0
        while True:
            yield number / self.rate
            number += 1


class Poisson(_Arrival, frozen=True, tag="poisson"):
    """Independent arrivals, `rate` per second on average."""

    rate: Rate

    def times(self, random: Random) -> Iterator[float]:
        now = 0.0
        while True:
            now += random.expovariate(self.rate)
            yield now


class Gamma(_Arrival, frozen=True, tag="gamma"):
    """Gaps from a Gamma distribution with mean `1 / rate` and coefficient of variation `cv`.

    cv above 1 gives bursts, 1 is Poisson (S-LoRA, section 7.1).
    """

    rate: Rate
    cv: Annotated[float, Meta(ge=0.01, le=20)]

    def times(self, random: Random) -> Iterator[float]:
        shape = 1 / self.cv**2
        now = 0.0
        while True:
            now += random.gammavariate(shape, 1 / (shape * self.rate))
            yield now


class OnOff(_Arrival, frozen=True, tag="onoff"):
    """Phases of `on` seconds with arrivals, then `off` seconds without; `first` names the first phase.

    The arrivals of the on phases are those of `Even` or `Poisson` with the phases without arrivals cut out.
    """

    rate: Rate
    on: OnSeconds
    off: Seconds
    first: Literal["on", "off"] = "on"
    within: Literal["even", "poisson"] = "even"

    def times(self, random: Random) -> Iterator[float]:
        source = Even(self.rate) if self.within == "even" else Poisson(self.rate)
        before = 0.0 if self.first == "on" else self.off
        for active in source.times(random):
            yield before + active + math.floor(active / self.on) * self.off


class Ramp(_Arrival, frozen=True, tag="ramp"):
    """Arrivals whose rate changes linearly between two rates over `over` seconds, and then stays.

    The arrivals are those of a unit-rate process, moved to where the integral of the rate reaches them.
    """

    start_rate: RateOrZero
    end_rate: RateOrZero
    over: Seconds
    within: Literal["even", "poisson"] = "even"

    def times(self, random: Random) -> Iterator[float]:
        unit = Even(1.0) if self.within == "even" else Poisson(1.0)
        for amount in unit.times(random):
            time = self._time_of(amount)
            if time is None:
                return
            yield time

    def _time_of(self, amount: float) -> float | None:
        """Return the time at which `amount` arrivals are due, None if they never are."""
        slope = (self.end_rate - self.start_rate) / self.over
        over_ramp = (self.start_rate + self.end_rate) / 2 * self.over
        if amount > over_ramp:
            return self.over + (amount - over_ramp) / self.end_rate if self.end_rate else None
        # The root of start_rate * t + slope * t**2 / 2 = amount, in a form without cancellation.
        root = math.sqrt(max(0.0, self.start_rate**2 + 2 * slope * amount))
        return 2 * amount / (self.start_rate + root) if amount else 0.0


Lasting = Even | Poisson | Gamma | OnOff | Ramp


class Phase(Struct, frozen=True, forbid_unknown_fields=True):
    """Part of `Phases`: arrivals of one process for `seconds`. The process starts with the phase."""

    seconds: Seconds
    arrival: Lasting


class Phases(_Arrival, frozen=True, tag="phases"):
    """Arrivals of one process after the other; none after the last phase (the VTC paper's distribution shift)."""

    phases: Annotated[list[Phase], Meta(min_length=1, max_length=1000)]

    def scaled(self, factor: float) -> Self:
        return replace(self, phases=[Phase(phase.seconds, phase.arrival.scaled(factor)) for phase in self.phases])

    def times(self, random: Random) -> Iterator[float]:
        before = 0.0
        for phase in self.phases:
            for time in phase.arrival.times(random):
                if time >= phase.seconds:
                    break
                yield before + time
            before += phase.seconds


class Trace(_Arrival, frozen=True, tag="trace"):
    """Arrivals, adapters and lengths from a CSV file (`loraplex.bench.trace`).

    file: its path, relative to the scenario's folder. rows: the value of its `tenant` column; default: the tenant's
    name. speed: 2 replays twice as fast.
    """

    file: Annotated[str, Meta(min_length=1)]
    rows: str | None = None
    speed: Annotated[float, Meta(gt=0, le=1000)] = 1.0


Arrival = Closed | Lasting | Phases | Trace
