"""Fairness between tenants, from the service that each received over time. docs/design/bench.md gives the sources.

Service counts weighted tokens: a prompt's when its first token arrives, an answer's as they arrive. Times in seconds
from the run's start.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loraplex.bench.load import Load, is_endless
from loraplex.bench.sending import Sample

# A tenant is backlogged in a window if it has a waiting request for this share of it.
BACKLOGGED = 0.95
WINDOW_SECONDS = 60.0
# Windows start at every tenth of their length. Entitlements are computed for as many slices of the run.
STEPS = 10
SLICES = 60
MAX_WINDOWS = 2000


def jain(shares: Sequence[float]) -> float | None:
    """Return Jain's index of fairness (Jain, Chiu, Hawe 1984): 1 for equal shares, 1/n if one has all.

    None for no shares.
    """
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else None


def max_min(capacity: float, demands: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the weighted max-min fair shares: none above its demand, the rest divided by weight."""
    shares = [0.0] * len(demands)
    open_ = [i for i, demand in enumerate(demands) if demand > 0]
    while open_ and capacity > 0:
        unit = capacity / sum(weights[i] for i in open_)
        satisfied = [i for i in open_ if demands[i] <= unit * weights[i]]
        if not satisfied:
            for i in open_:
                shares[i] = unit * weights[i]
            break
        for i in satisfied:
            shares[i] = demands[i]
            capacity -= demands[i]
        open_ = [i for i in open_ if i not in satisfied]
    return shares


class Cumulative:
    """A quantity that grows in steps: built from (time, amount) in any order."""

    def __init__(self, amounts: Sequence[tuple[float, float]]) -> None:
        ordered = sorted(amounts)
        self._times = [at for at, _ in ordered]
        self._totals = [0.0, *itertools.accumulate(amount for _, amount in ordered)]

    def before(self, time: float) -> float:
        """Return the sum of the amounts before `time`."""
        return self._totals[bisect_left(self._times, time)]

    def between(self, start: float, end: float) -> float:
        return self.before(end) - self.before(start)


@dataclass(frozen=True, slots=True)
class Service:
    """A tenant's service over time.

    received: by the times of tokens. requested: by the requests' due times. withdrawn: requested service that ended
    without being received (refusals, failures, short answers), by the requests' ends. waiting: disjoint (start, end)
    during which a request that was due had no first token.
    """

    received: Cumulative
    requested: Cumulative
    withdrawn: Cumulative
    waiting: Sequence[tuple[float, float]]

    def is_backlogged(self, start: float, end: float) -> bool:
        covered = 0.0
        for begin, stop in self.waiting[max(0, bisect_left(self.waiting, (start, 0.0)) - 1) :]:
            if begin >= end:
                break
            covered += max(0.0, min(end, stop) - max(start, begin))
        return covered >= BACKLOGGED * (end - start)


def service_of(samples: Sequence[Sample], input_weight: float, output_weight: float) -> Service:
    """Return the service that one tenant's samples show."""
    received, requested, withdrawn = [], [], []
    waits = []
    for sample in samples:
        end = sample.first if sample.first is not None else sample.ended
        waits.append((sample.due, math.inf if end is None else end))
        asked = input_weight * sample.input_tokens + output_weight * sample.planned.output_tokens
        requested.append((sample.due, asked))
        if sample.first is not None:
            received.append((sample.first, input_weight * sample.input_tokens))
            # An event may carry several tokens: the answer's count is spread over its events.
            each = output_weight * sample.output_tokens / len(sample.times)
            received.extend((at, each) for at in sample.times)
            asked -= input_weight * sample.input_tokens + output_weight * sample.output_tokens
        if sample.ended is not None:
            withdrawn.append((sample.ended, asked))
    return Service(Cumulative(received), Cumulative(requested), Cumulative(withdrawn), _union(waits))


def _union(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest difference of weighted service between two tenants that were backlogged in the same window.

    of_mean: relative to the mean of the two.
    """

    tokens: float
    of_mean: float
    start: float
    tenants: tuple[str, str]


def largest_difference(
    services: Mapping[str, Service], weights: Mapping[str, float], window: float, end: float
) -> Difference | None:
    """Return the largest windowed difference until `end`; None if no two tenants were ever backlogged together."""
    found: Difference | None = None
    distance = max(window / STEPS, end / MAX_WINDOWS)
    for step in range(max(1, math.floor((end - window) / distance + 1e-9) + 1)):
        start = step * distance
        backlogged = [name for name, service in services.items() if service.is_backlogged(start, start + window)]
        received = {name: services[name].received.between(start, start + window) / weights[name] for name in backlogged}
        for one, other in itertools.combinations(backlogged, 2):
            tokens = abs(received[one] - received[other])
            if found is None or tokens > found.tokens:
                mean = (received[one] + received[other]) / 2
                found = Difference(tokens, tokens / mean if mean else 0.0, start, (one, other))
    return found


def entitled(
    services: Mapping[str, Service], weights: Mapping[str, float], endless: Sequence[str], end: float
) -> dict[str, float]:
    """Return the service that each tenant would have received until `end` under ideal sharing.

    The ideal server (generalised processor sharing, in slices) gives as much service in each slice of the run as the
    measured one gave to all tenants together, and divides it max-min fairly by weight among its own backlogs. A tenant
    in `endless`, the closed loops that send more as soon as they are served, has no bound on its demand while it is
    backlogged.
    """
    shares, backlog = dict.fromkeys(services, 0.0), dict.fromkeys(services, 0.0)
    for number in range(SLICES if end > 0 else 0):
        low, high = end * number / SLICES, end * (number + 1) / SLICES
        served = sum(service.received.between(low, high) for service in services.values())
        for name, service in services.items():
            backlog[name] += service.requested.between(low, high)
        demands = [
            math.inf if name in endless and service.is_backlogged(low, high) else backlog[name]
            for name, service in services.items()
        ]
        given = max_min(served, demands, [weights[name] for name in services])
        for (name, service), share in zip(services.items(), given, strict=True):
            shares[name] += share
            backlog[name] = max(0.0, backlog[name] - share - service.withdrawn.between(low, high))
    return shares


def fairness(load: Load, samples: Mapping[str, Sequence[Sample]], end: float) -> dict[str, Any]:
    """Return the report's fairness figures until `end`. samples: by tenant."""
    weights = {tenant.name: tenant.weight for tenant in load.tenants}
    services = {name: service_of(own, load.input_weight, load.output_weight) for name, own in samples.items()}
    window = load.window or max(min(WINDOW_SECONDS, end / 4), 1e-3)
    endless = [source.name for source in load.sources if is_endless(source)]
    shares = entitled(services, weights, endless, end)
    received = {name: service.received.before(end) for name, service in services.items()}
    ratios = {name: received[name] / share for name, share in shares.items() if share > 0}
    difference = largest_difference(services, weights, window, end)
    return {
        "until": end,
        "window": window,
        "tenants": {
            name: {
                "weight": weights[name],
                "service": received[name],
                "entitled": shares[name],
                "of_entitled": ratios.get(name),
            }
            for name in services
        },
        "jain_service": jain([received[name] / weights[name] for name in services]),
        "jain_entitled": jain(list(ratios.values())),
        "largest_difference": None
        if difference is None
        else {
            "tokens": difference.tokens,
            "of_mean": difference.of_mean,
            "start": difference.start,
            "tenants": list(difference.tenants),
        },
        "series": series(services, end),
    }


def series(services: Mapping[str, Service], end: float) -> dict[str, Any]:
    """Return each tenant's cumulative service at the ends of the run's slices, for plots."""
    times = [end * (number + 1) / SLICES for number in range(SLICES)] if end > 0 else []
    return {
        "times": times,
        "service": {name: [service.received.before(at) for at in times] for name, service in services.items()},
        "backlogged": {
            name: [service.is_backlogged(at - end / SLICES, at) for at in times] for name, service in services.items()
        },
    }
