"""Rows of limits with what is used of them, on a tenant's page and in its console."""

from datetime import datetime, timedelta
from typing import NamedTuple

from markupsafe import Markup

from gateway.pages.frame.filters import money, number
from gateway.pages.parts.forms import MONEY
from gateway.quota.peek import Left


class LimitRow(NamedTuple):
    """A term. used: of `limit`; None if that is unknown or does not apply. shown, text: for people."""

    title: str
    text: str
    source: str
    used: int | None = None
    limit: int = 0
    shown: Markup | str = ""
    resets_at: datetime | None = None


def used_row(left: Left, title: str, text: str, source: str, currency: str, now: datetime) -> LimitRow:
    """Return the row of a limit whose rest is known."""
    limit, used = left.limit.value, max(0, left.used)
    is_money = left.limit.name in MONEY
    amounts = [money(value, currency) if is_money else number(value) for value in (used, limit)]
    resets_at = now + timedelta(milliseconds=left.reset) if used else None
    return LimitRow(title, text, source, used, limit, Markup("{} of {}").format(*amounts), resets_at)
