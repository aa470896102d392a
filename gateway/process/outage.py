"""Log of a repeated failure in few lines: one at its start, one a minute, and one at its end."""

import logging
import time
from collections.abc import Callable

SUMMARY_SECONDS = 60.0


class Outage:
    """Outage of one part. The caller reports the result of each try."""

    def __init__(self, log: logging.Logger, subject: str, clock: Callable[[], float] = time.monotonic) -> None:
        """subject: the noun before "fails" in the log lines."""
        self._log = log
        self._subject = subject
        self._clock = clock
        self._since: float | None = None
        self._logged_at = 0.0
        self._failures = 0

    def failed(self, reason: str, meanwhile: str = "") -> None:
        """Report a failed try. meanwhile: the effect of the outage while it lasts."""
        now = self._clock()
        self._failures += 1
        because = f"{reason}; {meanwhile}" if meanwhile else reason
        if self._since is None:
            self._since = self._logged_at = now
            self._log.warning("%s fails: %s", self._subject, because)
        elif now - self._logged_at >= SUMMARY_SECONDS:
            self._logged_at = now
            seconds = now - self._since
            self._log.warning("%s has failed %d times in %.0f s: %s", self._subject, self._failures, seconds, because)

    def over(self) -> None:
        """Report a try that succeeded."""
        if self._since is not None:
            seconds = self._clock() - self._since
            self._log.warning("%s works again; it failed %d times in %.1f s", self._subject, self._failures, seconds)
            self._since, self._failures = None, 0
