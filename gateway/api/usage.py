"""Usage reports: `/v1/usage` for a tenant itself, and the same report for operators."""

from typing import Any

from aiohttp import web

from gateway.admission.auth import Authenticator
from gateway.api.bodies import json_response, read_period
from gateway.errors import BadRequest
from gateway.records.usage_report import GROUPS, SUMMED, UsageReport
from gateway.turns import Turns

# Concurrent reports, at most one for each tenant, so that database connections stay free for other work.
READS = 4


class Usage:
    """A tenant's reports of its own usage."""

    def __init__(self, *, auth: Authenticator, report: UsageReport) -> None:
        self._auth = auth
        self._report = report
        self._reads = Turns(READS)

    async def get(self, request: web.Request) -> web.Response:
        principal = await self._auth.tenant(request.headers.get("Authorization"), "usage")
        async with self._reads.turn(principal.tenant.id):
            return await usage_answer(request, self._report, tenant_id=principal.tenant.id)


async def usage_answer(
    request: web.Request, report: UsageReport, *, tenant_id: str | None = None, tenant: str | None = None
) -> web.Response:
    """Sums by tenant and what `?group_by=` names, in the time from `?since=` to `?until=`, and over all of it."""
    since, until = read_period(request)
    sums = await report.sums(_read_groups(request), tenant_id=tenant_id, tenant=tenant, since=since, until=until)
    total: dict[str, Any] = {name: sum(getattr(part, name) for part in sums) for name in SUMMED}
    return json_response({"object": "usage", "data": sums, "total": total})


def _read_groups(request: web.Request) -> list[str]:
    given = request.query.get("group_by", "model").split(",")
    for name in given:
        if name not in GROUPS:
            expected = ", ".join(GROUPS)
            raise BadRequest(f"group_by: expected one or more of {expected}, comma separated.", param="group_by")
    return given
