"""`/admin/api/fairness`: the tenants' shares against their weights, waits and preemptions in this process."""

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from msgspec import Struct

from gateway.api.answers import row_struct
from gateway.fleet.queueing.fairness import Fairness, PreemptionRow, Share, Sums, TenantFairness

# Maximum number of tenants with a curve of their own.
MAX_CURVES = 8
ShownShare: Any = row_struct("ShownShare", Share)
ShownFairness: Any = row_struct("ShownFairness", TenantFairness, now=ShownShare, hour=ShownShare, is_behind=bool)
ShownPreemptions: Any = row_struct("ShownPreemptions", PreemptionRow)


class JainIndex(Struct, frozen=True, kw_only=True):
    """Jain's index of the tenants that wait: 1 is fair. now: the index of the last minute; hour: the mean of the last
    hour.
    """

    now: float | None
    hour: float | None


class QueueWaits(Struct, frozen=True, kw_only=True):
    """Waits of all tenants, in seconds. p50, p95: percentiles of the waits that ended in the last hour.
    waiting: requests that wait now, in this gateway process and on the engines. waiting_on_engines: those on the
    engines, from all gateways; null if no engine reports it. oldest: the longest wait of these so far, 0 if none waits,
    null if it is not known.
    """

    p50: float | None
    p95: float | None
    waiting: int
    waiting_in_gateway: int
    waiting_on_engines: int | None
    oldest: float | None


class FairnessHistory(Struct, frozen=True, kw_only=True):
    """Curves of the last hour. times: Unix seconds. shares: by the tenant's name, of those with most service."""

    times: list[int]
    jain: list[float | None]
    shares: dict[str, list[float | None]]


class FairnessAnswer(Struct, frozen=True, kw_only=True):
    """Fairness in one gateway process. process: its id. since: time of its start."""

    object: Literal["fairness"] = "fairness"
    process: int
    since: datetime
    jain: JainIndex
    waits: QueueWaits
    data: list[ShownFairness]
    history: FairnessHistory
    preemptions: list[ShownPreemptions]


def describe_fairness(fairness: Fairness) -> FairnessAnswer:
    """Return the figures of the page of fairness."""
    waits, (p50, p95) = fairness.waits(), fairness.wait_percentiles()
    points = list(fairness.points)
    shares = {fairness.name(each): share_curve(points, each) for each in largest(fairness)}
    return FairnessAnswer(
        process=os.getpid(),
        since=datetime.fromtimestamp(fairness.since, UTC),
        jain=JainIndex(now=fairness.jain(), hour=fairness.jain_hour()),
        waits=QueueWaits(**waits.counts, oldest=waits.oldest, p50=p50, p95=p95),
        data=[_describe(row) for row in fairness.tenants()],
        history=FairnessHistory(
            times=[point.at for point in points], jain=[point.jain for point in points], shares=shares
        ),
        preemptions=[ShownPreemptions(**row._asdict()) for row in fairness.preemptions()],
    )


def largest(fairness: Fairness) -> list[str]:
    """Return the ids of the tenants with most service in the last hour."""
    service = fairness.hour.service
    return sorted(service, key=lambda each: -service[each])[:MAX_CURVES]


def share_curve(points: Sequence[Sums], tenant_id: str) -> list[float | None]:
    """Return a tenant's share at each point."""
    return [point.share(tenant_id).share for point in points]


def _describe(row: TenantFairness) -> Any:
    shares = {"now": ShownShare(**row.now._asdict()), "hour": ShownShare(**row.hour._asdict())}
    return ShownFairness(**row._asdict() | shares, is_behind=row.is_behind)
