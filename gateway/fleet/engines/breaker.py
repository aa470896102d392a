"""Circuit breakers: an engine that fails repeatedly gets no requests for a pause, then a single trial request.

Health checks detect a dead engine; breakers detect one that answers health checks but fails requests.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

FAILURES_UNTIL_OPEN = 3
FIRST_PAUSE_SECONDS = 1.0
MAX_PAUSE_SECONDS = 30.0
# Time after which a trial without an answer no longer keeps other requests from the engine.
MAX_TRIAL_SECONDS = 30.0
# Most tenants whose failures, or failed trials, are remembered for an engine.
MAX_TENANTS = 10_000


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """A request that a tenant sent to an engine, at a time of the breakers' clock."""

    tenant_id: str
    at: float


class Breakers:
    """The breakers of an engine: one for each tenant whose requests fail on it, and a common one.

    A tenant's breaker opens after FAILURES_UNTIL_OPEN of its own failures in a row. The common breaker opens when,
    since the last success, at least FAILURES_UNTIL_OPEN - 1 failures come from tenants other than the one with the most
    failures. A failed trial opens it again. A tenant whose trial failed, or ended without an answer after at least
    FIRST_PAUSE_SECONDS, gets no further trial until any request has succeeded. After a pause its requests are still
    sent if its own breaker allows them, but they do not count as the trial. Therefore a tenant with failing requests
    blocks the engine for others by one trial at most, and an engine that only such tenants use is still tried.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._of_all = Breaker(clock, failures_until_open=1)
        self._of: dict[str, Breaker] = {}
        # Failures since the last success or opening, by tenant.
        self._failing: Counter[str] = Counter()
        # Tenants that get no trial, the earliest first.
        self._untrusted: dict[str, None] = {}

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

    def sent(self, tenant_id: str) -> Sent:
        """Note that a request is sent. Returns it for the other methods."""
        request = Sent(tenant_id, self._clock())
        if (own := self._of.get(tenant_id)) is not None:
            own.sent(request)
        if self._of_all.is_open and self._of_all.allows:
            if self._of_all.trial is not None:
                # Its time is over.
                self.gave_up(self._of_all.trial)
            if tenant_id not in self._untrusted:
                self._of_all.sent(request)
        return request

    def began(self, request: Sent) -> None:
        """Note that the request's answer has begun."""
        for breaker in self._both(request):
            breaker.began(request)

    def succeeded(self, request: Sent) -> None:
        self._of_all.succeeded()
        self._of.pop(request.tenant_id, None)
        self._failing.clear()
        self._untrusted.clear()

    def failed(self, request: Sent) -> None:
        tenant_id = request.tenant_id
        self._of.setdefault(tenant_id, Breaker(self._clock)).failed(request)
        _limit(self._of)
        is_trial = request is self._of_all.trial
        if self._of_all.is_open and not is_trial:
            # The request was sent before the breaker opened, or beside a trial.
            return
        if is_trial:
            self._distrust(tenant_id)
        self._failing[tenant_id] += 1
        if is_trial or self._failing.total() - max(self._failing.values()) >= FAILURES_UNTIL_OPEN - 1:
            self._of_all.failed(request)
            self._failing.clear()

    def gave_up(self, request: Sent) -> None:
        """Note that the request ended before it showed whether the engine works."""
        is_unanswered = self._of_all.is_open and request is self._of_all.trial
        if is_unanswered and self._clock() - request.at >= FIRST_PAUSE_SECONDS:
            self._distrust(request.tenant_id)
        for breaker in self._both(request):
            breaker.gave_up(request)

    def _distrust(self, tenant_id: str) -> None:
        self._untrusted[tenant_id] = None
        _limit(self._untrusted)

    def _both(self, request: Sent) -> list["Breaker"]:
        own = self._of.get(request.tenant_id)
        return [self._of_all] if own is None else [own, self._of_all]


def _limit(by_tenant: dict[str, Any]) -> None:
    """Remove the earliest tenant if there are too many."""
    if len(by_tenant) > MAX_TENANTS:
        del by_tenant[next(iter(by_tenant))]


class Breaker:
    """A circuit breaker.

    It is closed until `failures_until_open` failures in a row, open for a pause that doubles each time, then half open
    for a single trial, and for another one if the trial has no answer after MAX_TRIAL_SECONDS. A failed trial opens it
    again. A trial whose answer begins closes it, because an answer may take minutes; until an answer is complete, a
    single failure opens it again, for twice the pause.
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
        self._trial: Sent | None = None

    @property
    def allows(self) -> bool:
        """Return whether a request may be sent now."""
        return not self._is_open or self._clock() >= self._open_until

    @property
    def is_open(self) -> bool:
        """Return whether it is open or half open."""
        return self._is_open

    @property
    def trial(self) -> Sent | None:
        """Return the last trial until it has failed or was given up, or any request has succeeded."""
        return self._trial

    @property
    def seconds_open(self) -> float:
        """Return the seconds until a trial request is allowed; 0 if the breaker is closed."""
        return max(0.0, self._open_until - self._clock()) if self._is_open else 0.0

    def sent(self, request: Sent) -> None:
        """Note that a request is sent. While the breaker is half open, the first one is the trial."""
        if self._is_open and self.allows:
            self._trial, self._open_until = request, self._clock() + MAX_TRIAL_SECONDS

    def began(self, request: Sent) -> None:
        """Note that the request's answer has begun."""
        if request is self._trial:
            self._failures, self._is_open = self._until_open - 1, False

    def succeeded(self) -> None:
        self._failures, self._pause, self._is_open, self._trial = 0, 0.0, False, None

    def failed(self, request: Sent) -> None:
        is_trial = request is self._trial
        if self._is_open and not is_trial:
            # The request was sent before the breaker opened. A death breaks many requests at once and counts only once.
            return
        self._failures += 1
        if is_trial or self._failures >= self._until_open:
            self._pause = min(max(FIRST_PAUSE_SECONDS, 2 * self._pause), MAX_PAUSE_SECONDS)
            self._open_until = self._clock() + self._pause
            self._is_open, self._trial = True, None

    def gave_up(self, request: Sent) -> None:
        """Note that the request ended before it showed whether the engine works. Another one may be the trial now."""
        if request is self._trial:
            self._trial, self._open_until = None, self._clock()
