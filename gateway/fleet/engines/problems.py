"""Log of the engines' lasting problems: one line for each, until it changes or ends."""

import logging
from weakref import WeakKeyDictionary

from gateway.fleet.engines.engine import EngineRecord


class EngineProblems:
    """The present problem of each engine, as far as one caller knows it."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._present: WeakKeyDictionary[EngineRecord, str] = WeakKeyDictionary()

    def found(self, engine: EngineRecord, problem: str, reason: str = "") -> None:
        """Log a problem unless it is the engine's present one. problem: words after the engine's URL.

        reason: logged after the problem. A change of the reason alone is not logged.
        """
        if self._present.get(engine) != problem:
            self._present[engine] = problem
            self._log.warning("engine %s %s%s", engine.url, problem, f": {reason}" if reason else "")

    def ended(self, engine: EngineRecord) -> None:
        """Forget the engine's problem, so that it is logged again when it comes back."""
        self._present.pop(engine, None)
