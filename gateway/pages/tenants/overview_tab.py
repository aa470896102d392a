"""First tab of a tenant's page: its cost by model, newest requests, busiest adapters and share of the service."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from gateway.fleet.queueing.fairness import Fairness
from gateway.records.activity.figures import ActivityReport, Percentiles
from gateway.records.activity.report import Activity, Scope
from gateway.records.adapters.list import AdapterList, ListedAdapter, ListFilter
from gateway.records.requests.log import LogEntry, LogFilter, RequestLog
from gateway.records.tenants.tenants import Tenant
from wire.money import MICRO_UNITS

DAYS = 30
# Models with a series of their own in the chart; the others are one series.
TOP_MODELS = 6
# Rows of the lists of requests and adapters.
ROWS = 5


@dataclass(frozen=True, slots=True)
class OverviewTab:
    """Reader of the tab. currency: the costs' currency."""

    fairness: Fairness
    activity: Activity
    requests: RequestLog
    adapters: AdapterList
    currency: str

    async def first_token(self, tenant: Tenant) -> Percentiles | None:
        """Return the times to first token of its streams in the last hour, in ms; None without a stream."""
        since = datetime.now(UTC) - timedelta(hours=1)
        return (await self.activity.report(since=since, scope=Scope(tenant_id=tenant.id))).total.ttft

    async def read(self, tenant: Tenant) -> dict[str, Any]:
        """Return the chart, the newest requests and the busiest adapters."""
        report, entries, adapters = await asyncio.gather(
            self.activity.report(
                since=datetime.now(UTC) - timedelta(days=DAYS),
                scope=Scope(tenant_id=tenant.id),
                group_by="model",
                order="cost",
                top=TOP_MODELS,
                has_times=False,
            ),
            self._newest(tenant),
            self._busiest(tenant),
        )
        return {"chart": self._chart(report), "entries": entries, "adapters": adapters}

    async def _newest(self, tenant: Tenant) -> Sequence[LogEntry]:
        return (await self.requests.page(LogFilter(tenant_id=tenant.id), limit=ROWS)).entries

    async def _busiest(self, tenant: Tenant) -> Sequence[ListedAdapter]:
        criteria = ListFilter(tenant_id=tenant.id)
        return (await self.adapters.page(criteria, sort="requests", descending=True, limit=ROWS)).adapters

    def _chart(self, report: ActivityReport) -> dict[str, Any] | None:
        """Return the cost by model; None without any cost."""
        if not report.total.cost:
            return None
        named = [(group.name, group.curve) for group in report.groups]
        if report.others is not None:
            named.append((report.rest_title, report.others))
        series = [
            {"name": name, "values": [round(value / MICRO_UNITS, 6) for value in curve.cost]} for name, curve in named
        ]
        times = [int(start.timestamp()) for start in report.starts]
        return {"times": times, "series": series, "unit": self.currency, "stacked": True, "kind": "bar"}
