"""Periods of budgets, in UTC: days, weeks from Monday, months, and the last 30 days with today."""

from datetime import UTC, datetime, timedelta

from gateway.quota.kinds import BUDGET_PERIOD, DAY, MONTH, ROLLING, ROLLING_DAYS, WEEK

# Days of the periods that have a fixed length.
LENGTHS = {DAY: 1, WEEK: 7, ROLLING: ROLLING_DAYS}
# Present periods of budgets, for sentences about spending.
PERIOD_WORDS = {DAY: "today", WEEK: "this week", MONTH: "this month", ROLLING: "in the last 30 days"}


def period_start(kind: str, now: datetime) -> datetime:
    """Return the start of a budget's present period. kind: its letter."""
    today = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if BUDGET_PERIOD[kind] == MONTH:
        return today.replace(day=1)
    if BUDGET_PERIOD[kind] == ROLLING:
        return today - timedelta(days=ROLLING_DAYS - 1)
    return today - timedelta(days=today.weekday()) if BUDGET_PERIOD[kind] == WEEK else today


def period_end(kind: str, now: datetime) -> datetime:
    """Return the end of a budget's present period, which is the start of the next one in the calendar."""
    start = period_start(kind, now)
    if BUDGET_PERIOD[kind] == MONTH:
        return (start + timedelta(days=31)).replace(day=1)
    return start + timedelta(days=LENGTHS[BUDGET_PERIOD[kind]])


def period_words(kind: str) -> str:
    """Return the period for messages: "This month's", and the like."""
    if BUDGET_PERIOD[kind] == ROLLING:
        return f"The last {ROLLING_DAYS} days'"
    return "Today's" if BUDGET_PERIOD[kind] == DAY else f"This {BUDGET_PERIOD[kind]}'s"
