"""Periods of budgets, in UTC: days, weeks from Monday, months, and the last 30 days with today."""

from datetime import UTC, datetime, timedelta

from gateway.limits.kinds import DAY, MONTH, PERIOD_BY_LETTER, ROLLING, ROLLING_DAYS, WEEK

# Days of the periods that have a fixed length.
LENGTHS = {DAY: 1, WEEK: 7, ROLLING: ROLLING_DAYS}
# Present periods of budgets, for sentences about spending.
PERIOD_WORDS = {DAY: "today", WEEK: "this week", MONTH: "this month", ROLLING: "in the last 30 days"}


def period_start(letter: str, now: datetime) -> datetime:
    """Return the start of a budget's present period. letter: that of the budget's kind."""
    today = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if PERIOD_BY_LETTER[letter] == MONTH:
        return today.replace(day=1)
    if PERIOD_BY_LETTER[letter] == ROLLING:
        return today - timedelta(days=ROLLING_DAYS - 1)
    return today - timedelta(days=today.weekday()) if PERIOD_BY_LETTER[letter] == WEEK else today


def period_end(letter: str, now: datetime) -> datetime:
    """Return the end of a budget's present period, which is the start of the next one in the calendar."""
    start = period_start(letter, now)
    if PERIOD_BY_LETTER[letter] == MONTH:
        return (start + timedelta(days=31)).replace(day=1)
    return start + timedelta(days=LENGTHS[PERIOD_BY_LETTER[letter]])


def period_words(letter: str) -> str:
    """Return the period for messages: "This month's", and the like."""
    if PERIOD_BY_LETTER[letter] == ROLLING:
        return f"The last {ROLLING_DAYS} days'"
    return "Today's" if PERIOD_BY_LETTER[letter] == DAY else f"This {PERIOD_BY_LETTER[letter]}'s"
