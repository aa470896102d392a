"""Circuit breakers: an engine that fails repeatedly gets no requests for a pause, then a single trial request.

Health checks detect a dead engine; breakers detect one that answers health checks but fails requests.
"""

import time
from collections import Counter
from collections.abc import Callable

FAILURES_UNTIL_OPEN = 3
FIRST_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 30.0
# Most tenants whose failures are remembered for an engine.
MAX_TENANTS = 10_000


class Breakers:
    """The breakers of an engine: one for each tenant whose requests fail on it, and a common one.

    A tenant's breaker opens after FAILURES_UNTIL_OPEN of its own failures in a row. The common breaker opens once
    FAILURES_UNTIL_OPEN - 1 failures, without any tenant's success between them, come from other tenants than the one
    with the most. A failed trial opens it again, but only a trial's own tenant fails it, and that tenant then gets no
    further trial until a request has succeeded: its requests try its own breaker. So the failing requests of a single
    tenant block the engine for that tenant only.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._of_all = Breaker(clock, failures_until_open=1)
        self._of: dict[str, Breaker] = {}
        # Failures since the last success or opening, by tenant.
        self._failing: Counter[str] = Counter()
        # Tenant of the trial until its answer is complete, and of the last failed one.
        self._trial: str | None = None
        self._failed_trial: str | None = None

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
        if (own := self._of.get(tenant_id)) is not None:
            own.sent()
        if self._of_all.is_open and not self._of_all.is_on_trial and tenant_id != self._failed_trial:
            self._of_all.sent()
            self._trial = tenant_id

    def began(self, tenant_id: str) -> None:
        for breaker in self._both(tenant_id):
            breaker.began()

    def succeeded(self, tenant_id: str) -> None:
        self._of_all.succeeded()
        self._of.pop(tenant_id, None)
        self._failing.clear()
        self._trial = self._failed_trial = None

    def failed(self, tenant_id: str) -> None:
        self._of.setdefault(tenant_id, Breaker(self._clock)).failed()
        if len(self._of) > MAX_TENANTS:
            del self._of[next(iter(self._of))]
        is_trial = tenant_id == self._trial
        if self._of_all.is_open and not (is_trial and self._of_all.is_on_trial):
            # The request was sent before the breaker opened, or beside a trial.
            return
        self._failing[tenant_id] += 1
        if is_trial or self._failing.total() - max(self._failing.values()) >= FAILURES_UNTIL_OPEN - 1:
            self._of_all.failed()
            self._failing.clear()
            self._trial, self._failed_trial = None, self._trial

    def gave_up(self, tenant_id: str) -> None:
        for breaker in self._both(tenant_id):
            breaker.gave_up()
        if tenant_id == self._trial:
            self._trial = None

    def _both(self, tenant_id: str) -> list["Breaker"]:
        """Return the tenant's breaker, and the common one if the trial is the tenant's."""
        own = self._of.get(tenant_id)
        return [each for each in (own, self._of_all if tenant_id == self._trial else None) if each is not None]


class Breaker:
    """A circuit breaker.

    It is closed until `failures_until_open` failures in a row, open for a pause that doubles each time, then half open
    for a single trial. A failed trial opens it again. A trial whose answer begins closes it, because an answer may take
    minutes; until an answer is complete, a single failure opens it again, for twice the pause.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, failures_until_open: int = FAILURES_UNTIL_OPEN
    ) -> None:
        self._clock = clock
        self._until_open = failures_until_open
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
    def is_open(self) -> bool:
        """Return whether it is open or half open."""
        return self._is_open

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
            self._failures, self._is_open, self._on_trial = self._until_open - 1, False, False

    def succeeded(self) -> None:
        self._failures, self._pause, self._is_open, self._on_trial = 0, 0.0, False, False

    def failed(self) -> None:
        if self._is_open and not self._on_trial:
            # The request was sent before the breaker opened. A death breaks many requests at once and counts only once.
            return
        self._failures += 1
        if self._on_trial or self._failures >= self._until_open:
            self._pause = min(max(FIRST_PAUSE_SECONDS, 2 * self._pause), MAX_PAUSE_SECONDS)
            self._open_until = self._clock() + self._pause
            self._is_open, self._on_trial = True, False

    def gave_up(self) -> None:
        """Note that the client ended the request before it showed whether the engine works."""
        self._on_trial = False
