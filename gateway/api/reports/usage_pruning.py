"""`POST /admin/api/usage/prune`: removal of old usage rows by an operator. Sums by hour and day stay."""

from datetime import UTC, date, datetime, time, timedelta
from typing import Annotated, Literal

from aiohttp import web
from msgspec import Meta, Struct

from gateway.api.requests.fields import json_response, read_body, read_flag
from gateway.api.scopes import ACTOR
from gateway.billing.activity_rebuild import ActivityRebuild
from gateway.errors import BadRequest
from gateway.records.audit import Audit
from gateway.records.maintenance.retention import Retention
from wire.money import exact_money

# Maximum rows per request, so that its answer does not take longer than clients wait.
MAX_ROWS = 1_000_000


class NewPruning(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body for a removal. before: a date (UTC); rows of earlier days are removed."""

    before: Annotated[str, Meta(max_length=32)]


class Pruned(Struct, frozen=True, kw_only=True):
    """Removed usage rows and their cost; with dry_run, those that would be removed. has_more: older rows are left."""

    object: Literal["usage.pruned"] = "usage.pruned"
    before: date
    dry_run: bool
    rows: int
    cost: str
    cost_micros: int
    currency: str
    has_more: bool = False


class UsagePruning:
    """Route of the removal. currency: the costs' currency."""

    def __init__(self, *, retention: Retention, rebuild: ActivityRebuild, audit: Audit, currency: str) -> None:
        self._retention = retention
        self._rebuild = rebuild
        self._audit = audit
        self._currency = currency

    async def prune(self, request: web.Request) -> web.Response:
        """Remove the rows of the days before a date; with `?dry_run=true`, only count them.

        The audit entry has the number and cost of all rows to remove, and precedes the removal.
        """
        before = _read_date((await read_body(request, NewPruning)).before)
        moment, dry_run = datetime.combine(before, time(), UTC), read_flag(request, "dry_run")
        rows, cost = found = await self._retention.count_usage(moment)
        if rows and not dry_run:
            # Sums for charts that an earlier release did not write are made from the rows.
            await self._rebuild.run()
            detail = {"before": before.isoformat(), "rows": rows, "cost": exact_money(cost)}
            await self._audit.add(request[ACTOR], "usage.prune", before.isoformat(), detail)
            rows, cost = await self._retention.remove_usage(moment, MAX_ROWS)
        return json_response(
            Pruned(
                before=before,
                dry_run=dry_run,
                rows=rows,
                cost=exact_money(cost),
                cost_micros=cost,
                currency=self._currency,
                has_more=rows < found[0],
            )
        )


def _read_date(text: str) -> date:
    """Return the date. Raises BadRequest, also for one that would remove rows of the present or the last month."""
    try:
        before = date.fromisoformat(text)
    except ValueError as error:
        raise BadRequest("before: expected a date such as 2026-01-31.", param="before") from error
    latest = (datetime.now(UTC).date().replace(day=1) - timedelta(days=1)).replace(day=1)
    if before > latest:
        raise BadRequest(
            f"before: expected {latest} or an earlier date, because rows of the present and the last month are kept.",
            param="before",
        )
    return before
