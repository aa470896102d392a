"""Thresholds of budgets that tenants' spending has reached, without examining tenants that spend nothing.

All tenants with a budget are examined first, on a new day, and every ALL_SECONDS, in case a gateway of the previous
release, or plain SQL, has changed one. Each other look examines those whose spending or terms have changed.
"""

import time
from collections.abc import AsyncIterator, Collection, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from gateway.limits.kinds import BUDGET, PERIOD_BY_LETTER, ROLLING_BUDGET
from gateway.limits.periods import period_start
from gateway.metrics import MAX_BUDGETS
from gateway.records.caches.changes import Changes
from gateway.records.events.types import EventType
from gateway.records.money.spending import Spending, Spent
from gateway.records.tenants.budgeted import BudgetedTenant, BudgetedTenants

# A budget counts as used up from this share on once it has refused a request: the rest may be too small for any.
USED_UP = 0.95
ALL_SECONDS = 3600.0


class ThresholdCrossing(NamedTuple):
    """A threshold that a tenant's spending has reached. kind: letter of the budget. spent: in micro-units. threshold:
    share of the budget; None for the soft budget.
    """

    tenant: BudgetedTenant
    kind: str
    threshold: float | None
    spent: int
    now: datetime

    @property
    def type(self) -> EventType:
        if self.threshold is None:
            return "budget.soft"
        return "budget.exhausted" if self.threshold >= 1 else "budget.threshold"

    @property
    def once(self) -> str:
        share = "soft" if self.threshold is None else f"{self.threshold:g}"
        return f"budget:{self.tenant.id}:{self.kind}:{self._period}:{self._budget}:{share}"

    @property
    def data(self) -> dict[str, Any]:
        data: dict[str, Any] = {} if self.threshold is None else {"threshold": self.threshold}
        data |= {"budget": self._budget, "spent": self.spent, "period": PERIOD_BY_LETTER[self.kind]}
        return {**data, "since": f"{period_start(self.kind, self.now):%Y-%m-%d}"}

    @property
    def _budget(self) -> int:
        return (self.tenant.soft if self.threshold is None else self.tenant.budgets)[self.kind]

    @property
    def _period(self) -> str:
        """Return the period in which there is one event.

        A rolling period begins anew each day; fixed blocks of its length count instead.
        """
        start = period_start(self.kind, self.now)
        if length := ROLLING_BUDGET.get(self.kind):
            start -= timedelta(days=start.toordinal() % length)
        return f"{start:%Y-%m-%d}"


class _Look(NamedTuple):
    """A look at budgets. mark: `Changes.mark` before the look. at: time (monotonic) of the last look at all tenants."""

    day: str
    mark: int
    spent: Spent
    at: float


class Budgets:
    """Looks at budgets, of one process. Raises Unavailable without a database."""

    def __init__(self, tenants: BudgetedTenants, spending: Spending, changes: Changes) -> None:
        self._tenants = tenants
        self._spending = spending
        self._changes = changes
        self._last: _Look | None = None
        # By tenant id: its name, and the largest used share of its budgets.
        self._used: dict[str, tuple[str, float]] = {}

    @property
    def used(self) -> dict[str, float]:
        """Return the largest used share of each tenant's budgets, by name; of unspent budgets only some."""
        return dict(self._used.values())

    def forget(self) -> None:
        """Examine all tenants in the next look."""
        self._last, self._used = None, {}

    async def reached(self, now: datetime) -> AsyncIterator[list[ThresholdCrossing]]:
        """Yield the reached thresholds of the tenants that have changed since the last look, in pages.

        A look counts once all its pages are taken.
        """
        await self._changes.read()
        mark, at = self._changes.mark, time.monotonic()
        day, spent = f"{now:%Y-%m-%d}", await self._spending.present(now)
        last, changed = self._last, self._changed(day, spent)
        if last is None or changed is None:
            pages, self._used = self._tenants.pages(), {}
        else:
            pages, at = self._tenants.with_ids(sorted(changed)), last.at
            for tenant_id in changed:
                self._used.pop(tenant_id, None)
        async for tenants in pages:
            yield [crossing for tenant in tenants for crossing in self._examine(tenant, spent, now)]
        self._last = _Look(day, mark, spent, at)

    async def exhausted(self, names: Collection[str], now: datetime) -> list[ThresholdCrossing]:
        """Return the used-up budgets of tenants that a budget has refused. See USED_UP."""
        tenants = await self._tenants.named(sorted(names))
        reached = []
        for kind in BUDGET:
            ids = [tenant.id for tenant in tenants if kind in tenant.budgets]
            spent = await self._spending.of_tenants(kind, ids, now) if ids else {}
            for tenant in tenants:
                amount = spent.get(tenant.id, 0)
                if amount and amount >= USED_UP * tenant.budgets[kind] and 1 in tenant.warn_at:
                    reached.append(ThresholdCrossing(tenant, kind, 1, amount, now))
        return reached

    def _changed(self, day: str, spent: Spent) -> set[str] | None:
        """Return the tenants with changed spending or terms, by id; None if all must be examined."""
        last = self._last
        if last is None or last.day != day or time.monotonic() - last.at > ALL_SECONDS:
            return None
        scopes = self._changes.since(last.mark)
        return None if scopes is None else scopes | spent.changed_since(last.spent)

    def _examine(self, tenant: BudgetedTenant, spent: Spent, now: datetime) -> Sequence[ThresholdCrossing]:
        amounts = {kind: spent.of(kind, tenant.id) for kind in tenant.budgets | tenant.soft}
        if tenant.budgets:
            used = max(amounts[kind] / budget for kind, budget in tenant.budgets.items())
            if used or len(self._used) < MAX_BUDGETS:
                self._used[tenant.id] = tenant.name, used
        soft = [
            ThresholdCrossing(tenant, kind, None, amounts[kind], now)
            for kind, budget in tenant.soft.items()
            if amounts[kind] >= budget
        ]
        return soft + [
            ThresholdCrossing(tenant, kind, threshold, amounts[kind], now)
            for kind, budget in tenant.budgets.items()
            for threshold in tenant.warn_at
            if amounts[kind] >= threshold * budget
        ]
