"""Figures of activity: sums, percentiles and curves, as the API and the pages show them."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime

import msgspec

from gateway.records.activity.tables import BOUNDS, LATENCY, LATENCY_MAX, MAXIMA, STATUSES, TTFT, TTFT_MAX

# Columns of groups' curves, and all columns of sums and percentiles.
SHOWN = ("requests", *STATUSES, "prompt_tokens", "cached_tokens", "completion_tokens", "cost", "queue_ms")
COLUMNS = (*SHOWN, *LATENCY, *TTFT, *MAXIMA)
Values = Mapping[str, int]
"""Sums and maxima by column."""


QUANTILES = (0.5, 0.95, 0.99)


class Percentiles(msgspec.Struct, frozen=True):
    """Percentiles in ms. Each lies in the bucket of the exact one, and not above the largest value if that is known."""

    p50: float
    p95: float
    p99: float


class Sums(msgspec.Struct, frozen=True, kw_only=True):
    """Sums of admitted requests. failed: those that did not end as "ok" or "cancelled". cost: micro-units.

    ttft, latency: None without a request that has it. queue_ms: the sum of the waits in queues.
    """

    requests: int
    statuses: dict[str, int]
    failed: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost: int
    queue_ms: int
    ttft: Percentiles | None
    latency: Percentiles | None


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Values of a group by step, as many as the report's `starts`."""

    requests: list[int]
    failed: list[int]
    prompt_tokens: list[int]
    cached_tokens: list[int]
    completion_tokens: list[int]
    cost: list[int]


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles by step in ms; None in a step without requests, and in a report that does not read them."""

    ttft: list[Percentiles | None]
    latency: list[Percentiles | None]


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant, a model or an engine.

    name: the tenant's, the model's or the engine's URL ("" for requests without an engine). tenant: the owner of a
    model; None for a base model of all tenants. before: the sums of the period before.
    """

    name: str
    tenant: str | None = None
    sums: Sums
    before: Sums
    curve: Curve


class Refusals(msgspec.Struct, frozen=True, kw_only=True):
    """Number of failed requests by code. status: HTTP status; 0 for requests that failed after their admission.

    limit: the name of the limit, "" without one.
    """

    code: str
    status: int
    limit: str
    requests: int
    before: int
    curve: list[int]


class ActivityReport(msgspec.Struct, frozen=True, kw_only=True):
    """Activity of `[since, until)`, which is rounded to whole minutes, or hours where minutes are not kept.

    step: seconds between `starts`. total, before: the sums of all groups in this period and in the one before it, which
    begins at `before_since`. curve, times: activity and times of all groups. groups: the first in the order, by their
    sums; others: the curve of all the rest, None if there is none. num_groups: number of all groups; None if not all
    were looked at. active_tenants: tenants with requests.
    """

    since: datetime
    until: datetime
    before_since: datetime
    step: int
    starts: list[datetime]
    total: Sums
    before: Sums
    curve: Curve
    times: Times
    groups: list[Group]
    others: Curve | None
    num_groups: int | None
    active_tenants: int
    refusals: list[Refusals]

    @property
    def rest_title(self) -> str:
        """Return the title of `others`."""
        return "others" if self.num_groups is None else f"{self.num_groups - len(self.groups)} others"


def as_sums(values: Values) -> Sums:
    statuses = {status: values.get(status, 0) for status in STATUSES}
    names = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "cost", "queue_ms")
    return Sums(
        **{name: values.get(name, 0) for name in names},
        statuses={status: number for status, number in statuses.items() if number},
        failed=_failed(values),
        ttft=_ttft(values),
        latency=_latency(values),
    )


def _failed(values: Values) -> int:
    return values.get("requests", 0) - values.get("ok", 0) - values.get("cancelled", 0)


def added(every: Iterable[Values]) -> Values:
    total = dict.fromkeys(COLUMNS, 0)
    for values in every:
        for name in COLUMNS:
            value = values.get(name, 0)
            total[name] = max(total[name], value) if name in MAXIMA else total[name] + value
    return total


def as_curve(starts: Sequence[int], by_step: Mapping[int, Values]) -> Curve:
    found = [by_step.get(start, {}) for start in starts]
    names = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "cost")
    lists = {name: [values.get(name, 0) for values in found] for name in names}
    return Curve(**lists, failed=[_failed(values) for values in found])


def as_times(starts: Sequence[int], by_step: Mapping[int, Values]) -> Times:
    found = [by_step.get(start) for start in starts]
    return Times(
        ttft=[None if each is None else _ttft(each) for each in found],
        latency=[None if each is None else _latency(each) for each in found],
    )


def rest_of(every: Curve, groups: Sequence[Curve]) -> Curve:
    """Return the rest of a curve beside its groups."""
    fields = {}
    for name in Curve.__struct_fields__:
        parts = [getattr(group, name) for group in groups]
        whole = getattr(every, name)
        fields[name] = [max(0, value - sum(values)) for value, *values in zip(whole, *parts, strict=True)]
    return Curve(**fields)


def _ttft(values: Values) -> Percentiles | None:
    return percentiles([values.get(name, 0) for name in TTFT], values.get(TTFT_MAX, 0))


def _latency(values: Values) -> Percentiles | None:
    return percentiles([values.get(name, 0) for name in LATENCY], values.get(LATENCY_MAX, 0))


def percentiles(buckets: Sequence[int], largest: int = 0) -> Percentiles | None:
    """Return percentiles of a histogram with the bounds BOUNDS, None if it is empty.

    A percentile is the value of its nearest rank. The n values of a bucket are taken to lie evenly in it, the k-th at
    (k - 0.5) / n, and those beyond the last bound at this bound. largest: the largest value, which ends the last bucket
    with values; it is ignored if it is not in this bucket, because then not all values' maxima are known.
    """
    total = sum(buckets)
    if not total:
        return None
    top = max(i for i, number in enumerate(buckets) if number)
    is_known = bisect_left(BOUNDS, largest) == top and largest > 0
    found = []
    for quantile in QUANTILES:
        rank = max(1, math.ceil(quantile * total - 1e-9))
        if is_known and rank == total:
            found.append(float(largest))
            continue
        for i, number in enumerate(buckets):
            if rank <= number:
                low = BOUNDS[i - 1] if i else 0
                high = largest if is_known and i == top else BOUNDS[min(i, len(BOUNDS) - 1)]
                found.append(round(low + (high - low) * (rank - 0.5) / number, 1))
                break
            rank -= number
    return Percentiles(*found)
