"""Spending of the last days, today included: the arithmetic of rolling budgets in quota.lua, for its twin in Python."""

import msgspec

DAY_MS = 86_400_000
# Maximum step of a clock that is set back, in microseconds. State of a later time is kept as it is until the clock has
# caught up, unless the step is larger than this.
MAX_STEP = 3_600_000_000


class DailySpend(msgspec.Struct, frozen=True, gc=False):
    """Spending by day. day: number of the last day since 1970 (UTC). amounts: spending on each day, the oldest first.

    `now` is in microseconds since 1970.
    """

    day: int
    amounts: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.amounts)

    def at(self, now: int) -> "DailySpend":
        """Return the spending with the present day as the last one; the days before the period are left out."""
        today = day_of(now)
        if self.day == today or (self.day > today and self.day * DAY_MS * 1000 - now <= MAX_STEP):
            return self
        kept = self.amounts[max(0, today - self.day) :]
        return DailySpend(today, kept + (0,) * (len(self.amounts) - len(kept)))

    def plus(self, amount: int, day: int) -> "DailySpend":
        """Return the spending with an amount added to a day, which has no effect before the period."""
        place = day - self.day + len(self.amounts) - 1
        if not 0 <= place < len(self.amounts):
            return self
        new = max(0, self.amounts[place] + amount)
        return DailySpend(self.day, (*self.amounts[:place], new, *self.amounts[place + 1 :]))

    def wait(self, limit: int, amount: int, held: int, now: int) -> int:
        """Return the ms until enough days have left the period that `amount` fits.

        held: the part of the spending that running requests only reserve.
        """
        left = self.total - held
        for place, spent in enumerate(self.amounts, 1):
            left -= spent
            if left + amount <= limit:
                return (self.day + place) * DAY_MS - now // 1000
        return (self.day + len(self.amounts)) * DAY_MS - now // 1000

    def reset(self, now: int) -> int:
        """Return the ms until every day with spending has left the period."""
        places = [place for place, spent in enumerate(self.amounts, 1) if spent]
        return (self.day + places[-1]) * DAY_MS - now // 1000 if places else 0


def day_of(now: int) -> int:
    """Return the number of a time's day since 1970 (UTC)."""
    return now // 1000 // DAY_MS
