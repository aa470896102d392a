"""Engines that a request was sent to: the one that has it, and those that may have worked on it without a count."""

import time

from gateway.billing.charges import Ending
from gateway.fleet.engines.engine import EngineRecord


class UsedEngines:
    """Engines that a request was sent to.

    engine: URL of the engine that has the prompt, or that reported its final counts. lost: URL of the last of our
    engines that died with the request before an answer.
    """

    def __init__(self) -> None:
        self.engine: str | None = None
        self.lost: str | None = None
        self._sent: list[EngineRecord] = []
        self._sent_at = 0.0
        self._answered_at: float | None = None

    def sent(self, engine: EngineRecord) -> None:
        """Record that the engine has the prompt."""
        self._sent.append(engine)
        self.engine = engine.url
        self._sent_at = time.monotonic()

    def unsent(self) -> None:
        """Undo the last `sent`: the request did not reach that engine."""
        self._sent.pop()
        self.engine = self._sent[-1].url if self._sent else None

    def answered(self) -> None:
        """Record that the engine has a whole answer, which is not read yet."""
        self._answered_at = time.monotonic()

    def seconds(self, ended: float) -> float:
        """Return the time that the engine had for the request. ended: the request's end (monotonic)."""
        return max(0.0, (self._answered_at or ended) - self._sent_at)

    def died(self) -> None:
        """Record that the engine of the last `sent` died with the request, perhaps after work on it."""
        if self.remembers:
            self.lost = self.engine

    def to_ask(self, ending: Ending) -> list[str]:
        """Return the engines whose work on the request may be unknown to this gateway, the likeliest first."""
        served = self.engine if ending.asks_engine and self.remembers else None
        lost = self.lost if ending.is_unanswered else None
        return list(dict.fromkeys(url for url in (served, lost) if url is not None))

    @property
    def remembers(self) -> bool:
        """Return whether the engine reports the counts of ended requests; ours do."""
        return bool(self._sent) and self._sent[-1].address.traits.has_usage_log
