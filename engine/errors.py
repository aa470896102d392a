"""Errors of an engine that takes no requests, and the form in which errors cross between a core and its front."""

import logging
from typing import Any, NamedTuple

from adapters.manifest import AdapterError, AdapterNotFound
from wire.errors import BadRequest, ConfigError

logger = logging.getLogger(__name__)

# Reasons for clients. The cause is in the log only, because it may quote a request.
FAILED = "The engine failed; send the request again."
CLOSED = "The engine is shut down."


class EngineUnavailable(RuntimeError):
    """Error of an engine that takes no requests: it is loading, failed or shutting down. retry_after: seconds.

    The gateway sends no request of any tenant to an engine that answers with this error.
    """

    def __init__(self, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after = retry_after


class EngineFailed(EngineUnavailable):
    """The engine failed while it had this request, which may be the cause."""


class QueueFull(EngineUnavailable):
    """Error of an engine that cannot serve this request now, but serves others."""


class TenantQueueFull(QueueFull):
    """The tenant uses all of its own share of the engine, which still serves other tenants.

    param: the request's field whose grammar is not compiled, None if the request needs another share.
    """

    def __init__(self, message: str, retry_after: int | None = None, param: str | None = None) -> None:
        super().__init__(message, retry_after)
        self.param = param


# Errors that cross from core to front, with their constructor arguments; the first matching class applies.
_KINDS: dict[type[Exception], tuple[str, ...]] = {
    BadRequest: ("param", "message", "code"),
    TenantQueueFull: ("message", "retry_after", "param"),
    QueueFull: ("message", "retry_after"),
    EngineUnavailable: ("message", "retry_after"),
    AdapterNotFound: ("field", "message"),
    AdapterError: ("field", "message"),
    ConfigError: ("field", "message"),
}
_BY_NAME = {kind.__name__: kind for kind in (*_KINDS, OSError)}


class Fault(NamedTuple):
    """An error as data. kind: name of its class, "" for an unexpected error. values: its constructor's arguments."""

    kind: str
    values: list[Any]

    @classmethod
    def of(cls, error: BaseException) -> "Fault":
        """Return an error as data. Log an unexpected one, whose text stays here because it may quote a request."""
        for kind, names in _KINDS.items():
            if isinstance(error, kind):
                return cls(kind.__name__, [getattr(error, name) for name in names])
        if isinstance(error, OSError):
            file = None if error.filename is None else str(error.filename)
            return cls("OSError", [str(error)] if error.errno is None else [error.errno, error.strerror, file])
        logger.error("unexpected error in the core", exc_info=error)
        return cls("", [])

    def error(self) -> Exception:
        """Return the error."""
        if not self.kind:
            return RuntimeError("unexpected error in the core; its log has the cause")
        return _BY_NAME[self.kind](*self.values)
