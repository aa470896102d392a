"""Rows of limits with what is used of them, on a tenant's page and in its console."""

from datetime import datetime, timedelta
from typing import NamedTuple

from markupsafe import Markup

from gateway.limits.kinds import ALERT_KINDS
from gateway.pages.frame.filters import money, number
from gateway.pages.widgets.forms import MONEY, term_text
from gateway.quota.remaining_limits import Remaining
from gateway.records.tenants.list import TenantMonth
from gateway.records.tenants.tenants import Tenant

SOFT_KINDS = {kind.name: kind for kind in ALERT_KINDS}


class LimitRow(NamedTuple):
    """A term. used: used part of `limit`; None if that is unknown or does not apply. shown, text: texts for people."""

    title: str
    text: str
    source: str
    used: int | None = None
    limit: int = 0
    shown: Markup | str = ""
    resets_at: datetime | None = None


def soft_row(tenant: Tenant, name: str, month: TenantMonth, source: str, currency: str) -> LimitRow:
    """Return the row of a soft budget with what is spent of it. name: name of its kind."""
    kind = SOFT_KINDS[name]
    limit, spent = getattr(tenant.soft_budgets, name), month.spent.get(str(kind.period), 0)
    if not limit:
        return LimitRow(kind.help, term_text(name, limit), source)
    shown = Markup("{} of {}").format(money(spent, currency), money(limit, currency))
    return LimitRow(kind.help, term_text(name, limit), source, spent, limit, shown)


def used_row(left: Remaining, title: str, text: str, source: str, currency: str, now: datetime) -> LimitRow:
    """Return the row of a limit whose rest is known."""
    limit, used = left.limit.value, max(0, left.used)
    is_money = left.limit.name in MONEY
    amounts = [money(value, currency) if is_money else number(value) for value in (used, limit)]
    resets_at = now + timedelta(milliseconds=left.reset) if used else None
    return LimitRow(title, text, source, used, limit, Markup("{} of {}").format(*amounts), resets_at)
