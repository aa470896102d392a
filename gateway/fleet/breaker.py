"""A circuit breaker: an engine that breaks request after request gets none for a while, then one to prove itself.

Health checks see an engine that is gone; this sees one that answers them and nothing else.
"""

import time
from collections.abc import Callable

FAILURES_UNTIL_OPEN = 3
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0


class Breaker:
    """Closed until FAILURES_UNTIL_OPEN in a row; open for a pause that doubles each time; then half open: one trial,
    which closes it or opens it again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._pause = 0.0
        self._open_until = 0.0
        self._on_trial = False

    @property
    def allows(self) -> bool:
        """Whether a request may be sent now."""
        return self._pause == 0 or (not self._on_trial and self._clock() >= self._open_until)

    def sent(self) -> None:
        """A request goes out; while half open it is the trial."""
        self._on_trial = self._pause > 0

    def succeeded(self) -> None:
        self._failures, self._pause, self._on_trial = 0, 0.0, False

    def failed(self) -> None:
        if self._pause and not self._on_trial:
            # Sent before it opened: one death breaks many requests at once, and says it once.
            return
        self._failures += 1
        if self._on_trial or self._failures >= FAILURES_UNTIL_OPEN:
            self._pause = min(max(FIRST_PAUSE_SECONDS, 2 * self._pause), LONGEST_PAUSE_SECONDS)
            self._open_until = self._clock() + self._pause
            self._on_trial = False

    def gave_up(self) -> None:
        """The request ended, by its client's will, before it told anything of the engine."""
        self._on_trial = False
