"""Circuit breakers: an engine that fails repeatedly gets no requests for a pause, then a single trial request.

Health checks detect a dead engine; breakers detect one that answers health checks but fails requests.
"""

import time
from collections.abc import Callable

FAILURES_UNTIL_OPEN = 3
FIRST_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 30.0
# Most tenants whose failures are remembered for an engine.
MAX_TENANTS = 10_000


class Breakers:
    """The breakers of an engine: one for each tenant whose requests fail on it, and a common one.

    A tenant's breaker opens after FAILURES_UNTIL_OPEN of its own failures in a row. The common breaker counts failures
    in a row, without any tenant's success between them, and only if they come from two tenants or more. So the failing
    requests of a single tenant block the engine for that tenant only.
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

    @property
    def seconds_open(self) -> float:
        """Return the seconds until the common breaker allows a trial request; 0 if it is closed."""
        return self._of_all.seconds_open

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
    """A circuit breaker.

    It is closed until FAILURES_UNTIL_OPEN failures in a row, open for a pause that doubles each time, then half open
    for a single trial. A failed trial opens it again. A trial whose answer begins closes it, because an answer may take
    minutes; until an answer is complete, a single failure opens it again, for twice the pause.
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
        """Return whether a request may be sent now."""
        return not self._is_open or (not self._on_trial and self._clock() >= self._open_until)

    @property
    def is_on_trial(self) -> bool:
        return self._on_trial

    @property
    def seconds_open(self) -> float:
        """Return the seconds until a trial request is allowed; 0 if the breaker is closed."""
        return max(0.0, self._open_until - self._clock()) if self._is_open else 0.0

    def sent(self) -> None:
        """Note that a request is sent. While the breaker is half open, this request is the trial."""
        self._on_trial = self._is_open

    def began(self) -> None:
        """Note that an answer has begun."""
        if self._on_trial:
            self._failures, self._is_open, self._on_trial = FAILURES_UNTIL_OPEN - 1, False, False

    def succeeded(self) -> None:
        self._failures, self._pause, self._is_open, self._on_trial = 0, 0.0, False, False

    def failed(self) -> None:
        if self._is_open and not self._on_trial:
            # The request was sent before the breaker opened. A death breaks many requests at once and counts only once.
            return
        self._failures += 1
        if self._on_trial or self._failures >= FAILURES_UNTIL_OPEN:
            self._pause = min(max(FIRST_PAUSE_SECONDS, 2 * self._pause), MAX_PAUSE_SECONDS)
            self._open_until = self._clock() + self._pause
            self._is_open, self._on_trial = True, False

    def gave_up(self) -> None:
        """Note that the client ended the request before it showed whether the engine works."""
        self._on_trial = False
