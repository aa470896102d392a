"""Measured acceptance of drafts."""

# Weight of the newest prediction in a request's rates. It is large, so that the rates rise within a few tokens when the
# text repeats an earlier passage.
NEWEST = 0.15
# Rates of an adapter's first request, and the weight of a prediction in the rates of an adapter's next request.
INITIAL_FIRST, INITIAL_AFTER_SUCCESS = 0.5, 0.8
ADAPTER_WEIGHT = 0.02


class DraftAcceptance:
    """Rates of predictions that came true, as moving averages: `first` for the first of several predictions,
    `after_success` for a prediction that follows a true one.
    """

    __slots__ = ("after_success", "first")

    def __init__(self, first: float, after_success: float) -> None:
        self.first = first
        self.after_success = after_success

    def observe(self, is_true: bool, *, is_first: bool, weight: float = NEWEST) -> None:
        """Count a prediction."""
        if is_first:
            self.first += (is_true - self.first) * weight
        else:
            self.after_success += (is_true - self.after_success) * weight

    def recover(self, weight: float) -> None:
        """Move the rates towards those of a first request, so that drafts are tried again."""
        self.first += max(0.0, INITIAL_FIRST - self.first) * weight
        self.after_success += max(0.0, INITIAL_AFTER_SUCCESS - self.after_success) * weight

    def chances(self, number: int, *, is_first: bool) -> list[float]:
        """Return the probability that all of the first 1, 2, ... `number` predictions come true."""
        first = self.first if is_first else self.after_success
        return [first * self.after_success**i for i in range(number)]
