"""Times to first token of the tenants' streams in the last hour, from the sums of activity."""

import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from gateway.errors import Unavailable
from gateway.records.activity.figures import Percentiles
from gateway.records.activity.report import MAX_GROUPS, Activity

# Lifetime of the figures, which all viewers share.
FRESH_SECONDS = 30.0
PERIOD = timedelta(hours=1)


class FirstTokens:
    """Reader of the times to first token, in ms."""

    def __init__(self, activity: Activity) -> None:
        self._activity = activity
        self._by_tenant: Mapping[str, Percentiles] = {}
        self._read_at = 0.0

    async def by_tenant(self) -> Mapping[str, Percentiles]:
        """Return the percentiles by the tenant's name, for at most MAX_GROUPS tenants: those with most requests.

        The figures are older while the database is unavailable. Tenants without streams have none.
        """
        if time.monotonic() - self._read_at > FRESH_SECONDS or not self._read_at:
            # Set before the read, so that only one viewer reads; the others get the last result.
            self._read_at = time.monotonic()
            try:
                report = await self._activity.report(
                    since=datetime.now(UTC) - PERIOD, group_by="tenant", top=MAX_GROUPS, step=3600
                )
            except Unavailable:
                self._read_at = 0.0
            else:
                self._by_tenant = {each.name: each.sums.ttft for each in report.groups if each.sums.ttft is not None}
        return self._by_tenant
