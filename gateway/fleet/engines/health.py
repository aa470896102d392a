"""Health of an engine, and texts for the reasons of its faults."""

import errno
import time
from dataclasses import dataclass, field
from enum import StrEnum

from aiohttp import ClientConnectorDNSError, ClientConnectorError, ClientSSLError, ServerDisconnectedError

# An engine in a long step may miss a check or two. A refused connection means down at once.
MISSES_UNTIL_SILENT = 3
# Longest time for which requests are held back because an engine may come back.
COMES_BACK_SECONDS = 120.0
REFUSED = "connection refused; no process listens at this address"


class Health(StrEnum):
    """State of an engine as its health checks show it. Only an engine that is UP gets new requests."""

    # No check has been answered yet.
    UNKNOWN = "unknown"
    UP = "up"
    # It does not answer although its connections stay open, for example in a long step or while it is stopped.
    SILENT = "silent"
    DOWN = "down"
    # It finishes its requests and takes no new ones.
    DRAINING = "draining"
    # Its supervisor has stopped it; a request wakes it.
    ASLEEP = "asleep"
    # It answers, but its model, version, secret or receipts rule it out until the operator acts.
    MISCONFIGURED = "misconfigured"


@dataclass(slots=True)
class Condition:
    """An engine's health, as its health checks have shown it.

    reason: its cause and the remedy, if there is one; "" while the engine is up. since: time (monotonic) of the last
    change of health. misses: unanswered health checks in a row. is_loading: whether the engine said at its last check
    that it loads its model. load_seconds: time of the last load that this process saw from its first to its last
    check; None before.
    """

    health: Health = Health.UNKNOWN
    reason: str = "it has not been checked yet"
    since: float = field(default_factory=time.monotonic)
    misses: int = 0
    is_loading: bool = False
    load_seconds: float | None = None
    _loads_since: float | None = None

    @property
    def may_come_back(self) -> bool:
        """Return whether the engine may soon serve requests again without an operator.

        An engine that is up counts too, because its circuit breaker may be open. Any other engine counts until its
        health has not changed for COMES_BACK_SECONDS.
        """
        if self.health in (Health.MISCONFIGURED, Health.ASLEEP):
            return False
        return self.health is Health.UP or time.monotonic() - self.since < COMES_BACK_SECONDS

    def change(self, health: Health, reason: str) -> bool:
        """Set the health and its reason. Return whether either changed."""
        changed = (health, reason) != (self.health, self.reason)
        if health is not self.health:
            self.since = time.monotonic()
        self.health, self.reason = health, reason
        self.is_loading = False
        if health is Health.SILENT:
            # Whether it still loads is unknown, and its silence is no part of a load.
            self._loads_since = None
        if health in (Health.UP, Health.MISCONFIGURED):
            # The engine has answered.
            self.misses = 0
        return changed

    def note_loaded(self) -> None:
        """Record the time of the load that ends now, if there is one. The engine may still not be usable."""
        if self._loads_since is not None:
            self.load_seconds, self._loads_since = time.monotonic() - self._loads_since, None

    def note_loading(self, *, is_loading: bool) -> None:
        """Record whether the engine loads its model. False: it has ended, or has another fault."""
        self.is_loading = is_loading
        if not is_loading:
            self._loads_since = None
        elif self._loads_since is None:
            self._loads_since = time.monotonic()

    def seconds_to_load(self) -> float:
        """Return the rest of the present load, if it takes as long as the last one; 0 if that is unknown or over."""
        if self.load_seconds is None or self._loads_since is None:
            return 0.0
        return max(0.0, self.load_seconds - (time.monotonic() - self._loads_since))

    def miss(self, reason: str) -> bool:
        """Count an unanswered health check. Return whether the engine counts as silent."""
        self.misses += 1
        if self.health is Health.UNKNOWN:
            self.reason = reason
        return self.misses >= MISSES_UNTIL_SILENT


def is_refused(error: BaseException) -> bool:
    """Return whether a connection was refused: the host answers, and no process listens at the address."""
    return isinstance(error, ClientConnectorError) and error.os_error.errno == errno.ECONNREFUSED


def network_reason(error: BaseException) -> str:
    """Return the reason for a failed connection or call, without the engine's address."""
    if isinstance(error, ClientConnectorDNSError):
        return "its host name cannot be resolved"
    if isinstance(error, ClientSSLError):
        return "the TLS handshake failed"
    if isinstance(error, ClientConnectorError):
        if is_refused(error):
            return REFUSED
        cause = error.os_error
        return f"it cannot be reached: {cause.strerror or type(cause).__name__}"
    if isinstance(error, ServerDisconnectedError | ConnectionError):
        return "it closed the connection"
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    return type(error).__name__
