"""Circuit breakers: an engine that fails repeatedly gets no requests for a pause, then a single trial.

Health checks detect a dead engine; breakers detect one that answers health checks but fails requests.
"""

import time
from collections.abc import Callable

FAILURES_UNTIL_OPEN = 3
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0
# Tenants with failures that are remembered for an engine.
MAX_TENANTS = 10_000


class Breakers:
    """The breakers of an engine: one for each tenant whose requests fail on it, and a common one.

    A tenant's breaker opens after FAILURES_UNTIL_OPEN of its own failures in a row. The common one counts failures in a
    row, without any tenant's success between them, and only if they come from two tenants or more. So requests of a
    single tenant, whatever they do to the engine, close it to that tenant alone.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._of_all = Breaker(clock)
        self._of: dict[str, Breaker] = {}
        # Tenants of the failures since the last success.
        self._failing: set[str] = set()

    @property
    def allows_some(self) -> bool:
        """Return whether the engine accepts tenants without failures of their own."""
        return self._of_all.allows

    def allows(self, tenant_id: str) -> bool:
        """Return whether a request of the tenant may be sent now."""
        own = self._of.get(tenant_id)
        return self._of_all.allows and (own is None or own.allows)

    def sent(self, tenant_id: str) -> None:
        for breaker in self._both(tenant_id):
            breaker.sent()

    def began(self, tenant_id: str) -> None:
        for breaker in self._both(tenant_id):
            breaker.began()

    def succeeded(self, tenant_id: str) -> None:
        self._of_all.succeeded()
        self._of.pop(tenant_id, None)
        self._failing.clear()

    def failed(self, tenant_id: str) -> None:
        self._of.setdefault(tenant_id, Breaker(self._clock)).failed()
        self._failing.add(tenant_id)
        if len(self._failing) > 1 or self._of_all.is_on_trial:
            self._of_all.failed()
        if len(self._of) > MAX_TENANTS:
            del self._of[next(iter(self._of))]

    def gave_up(self, tenant_id: str) -> None:
        for breaker in self._both(tenant_id):
            breaker.gave_up()

    def _both(self, tenant_id: str) -> list["Breaker"]:
        own = self._of.get(tenant_id)
        return [self._of_all] if own is None else [self._of_all, own]


class Breaker:
    """Closed until FAILURES_UNTIL_OPEN in a row; open for a pause that doubles each time; then half open for a single
    trial.

    A trial that fails opens it again. A trial that begins to answer closes it, because an answer may take minutes;
    until an answer is complete, the next failure opens it again, for twice the pause.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._pause = 0.0
        self._is_open = False
        self._open_until = 0.0
        self._on_trial = False

    @property
    def allows(self) -> bool:
        """Whether a request may be sent now."""
        return not self._is_open or (not self._on_trial and self._clock() >= self._open_until)

    @property
    def is_on_trial(self) -> bool:
        return self._on_trial

    def sent(self) -> None:
        """A request goes out; while half open it is the trial."""
        self._on_trial = self._is_open

    def began(self) -> None:
        """An answer has begun."""
        if self._on_trial:
            self._failures, self._is_open, self._on_trial = FAILURES_UNTIL_OPEN - 1, False, False

    def succeeded(self) -> None:
        self._failures, self._pause, self._is_open, self._on_trial = 0, 0.0, False, False

    def failed(self) -> None:
        if self._is_open and not self._on_trial:
            # Sent before it opened: one death breaks many requests at once, and says it once.
            return
        self._failures += 1
        if self._on_trial or self._failures >= FAILURES_UNTIL_OPEN:
            self._pause = min(max(FIRST_PAUSE_SECONDS, 2 * self._pause), LONGEST_PAUSE_SECONDS)
            self._open_until = self._clock() + self._pause
            self._is_open, self._on_trial = True, False

    def gave_up(self) -> None:
        """The request ended, by its client's will, before it told anything of the engine."""
        self._on_trial = False
