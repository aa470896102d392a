"""Errors of recent loads, so that a failed load is not repeated for a while, however many requests need it."""

import time

from adapters.manifest import AdapterError, AdapterNotFound
from wire.bounded_dict import BoundedDict

FAILURE_SECONDS = 5.0
MAX_FAILURES = 1024


class FailedLoads:
    """Errors by digest, the newest MAX_FAILURES. Not thread-safe."""

    def __init__(self) -> None:
        self._failures = BoundedDict[str, tuple[float, Exception]](MAX_FAILURES)

    def get(self, digest: str) -> Exception | None:
        """Return the error of a load that failed within the last FAILURE_SECONDS."""
        until, error = self._failures.get(digest, (0.0, None))
        if error is not None and time.monotonic() >= until:
            del self._failures[digest]
            return None
        return error

    def add(self, digest: str, error: BaseException) -> None:
        """Remember an adapter that is refused or cannot be read.

        A missing adapter is not remembered, because it may be uploaded at any moment.
        """
        if isinstance(error, AdapterError | OSError) and not isinstance(error, AdapterNotFound):
            self._failures.put(digest, (time.monotonic() + FAILURE_SECONDS, error))

    def forget(self, digest: str) -> None:
        self._failures.pop(digest, None)
