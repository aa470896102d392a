"""Calendar periods of budgets, in UTC: days, weeks from Monday, months."""

from datetime import UTC, datetime, timedelta

from gateway.quota.kinds import BUDGET_PERIOD, DAY, MONTH, WEEK


def period_start(kind: str, now: datetime) -> datetime:
    """Return the start of a budget's present period. kind: its letter."""
    today = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if BUDGET_PERIOD[kind] == MONTH:
        return today.replace(day=1)
    return today - timedelta(days=today.weekday()) if BUDGET_PERIOD[kind] == WEEK else today


def period_end(kind: str, now: datetime) -> datetime:
    """Return the end of a budget's present period, which is the start of the next one."""
    start = period_start(kind, now)
    if BUDGET_PERIOD[kind] == MONTH:
        return (start + timedelta(days=31)).replace(day=1)
    return start + timedelta(days=7 if BUDGET_PERIOD[kind] == WEEK else 1)


def period_words(kind: str) -> str:
    """Return the period for messages: "This month's", and the like."""
    return "Today's" if BUDGET_PERIOD[kind] == DAY else f"This {BUDGET_PERIOD[kind]}'s"
