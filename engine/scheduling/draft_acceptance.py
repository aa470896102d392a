"""Measured acceptance of drafts."""

# Weight of the newest prediction in a rate: a place that is copied is recognised within a few tokens.
NEWEST = 0.15
# Rates of an adapter's first request, and the weight of a prediction in the rates of an adapter's next request.
FIRST_FRESH, FIRST_NEXT = 0.5, 0.8
ADAPTER_WEIGHT = 0.02


class DraftAcceptance:
    """Rates of predictions that came true, as moving averages: `fresh` for the first of several predictions, `next`
    for those after predictions that came true.
    """

    __slots__ = ("fresh", "next")

    def __init__(self, fresh: float, next_: float) -> None:
        self.fresh = fresh
        self.next = next_

    def observe(self, is_true: bool, *, is_fresh: bool, weight: float = NEWEST) -> None:
        """Count a prediction."""
        if is_fresh:
            self.fresh += (is_true - self.fresh) * weight
        else:
            self.next += (is_true - self.next) * weight

    def recover(self, weight: float) -> None:
        """Move the rates towards those of a first request, so that drafts are tried again."""
        self.fresh += max(0.0, FIRST_FRESH - self.fresh) * weight
        self.next += max(0.0, FIRST_NEXT - self.next) * weight

    def chances(self, number: int, *, is_fresh: bool) -> list[float]:
        """Return the probability that all of the first 1, 2, ... `number` predictions come true."""
        first = self.fresh if is_fresh else self.next
        return [first * self.next**i for i in range(number)]
