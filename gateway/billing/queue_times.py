"""Waits of a request in the gateway's queue and in its engine's queue."""

from collections.abc import Callable


def _ignore(_: float) -> None:
    pass


class QueueTimes:
    """Waits of one request, in seconds; None while they are not known.

    gateway: wait in the gateway's queue. engine: wait in the engine's queue before the first step. Only our engines
    report it. on_start: called once with the sum, when the engine has begun to answer. It has no reference to the
    request's account, because each request would leave a cycle then.
    """

    __slots__ = ("_has_started", "engine", "gateway", "on_start")

    def __init__(self) -> None:
        self.gateway: float | None = None
        self.engine: float | None = None
        self.on_start: Callable[[float], None] = _ignore
        self._has_started = False

    @property
    def milliseconds(self) -> int | None:
        """Return the sum of the known waits; None before the end of the wait in the gateway."""
        return None if self.gateway is None else round(1000 * (self.gateway + (self.engine or 0.0)))

    def observe(self, engine: float | None) -> None:
        """Note an event or an answer of the engine. engine: the wait that it reports."""
        if engine is not None:
            self.engine = engine
        if not self._has_started:
            self._has_started = True
            self.on_start((self.gateway or 0.0) + (self.engine or 0.0))
