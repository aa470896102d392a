"""Running requests, each of which ends early when one of its keys becomes invalid."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class RunningRequest:
    """A running request. keys: ids of the keys that must stay valid. limit: its time limit. is_ended: whether it was
    ended early, because one of its keys became invalid.
    """

    __slots__ = ("is_ended", "keys", "limit")

    def __init__(self, keys: tuple[str, ...], limit: asyncio.Timeout) -> None:
        self.keys, self.limit = keys, limit
        self.is_ended = False


class RunningRequests:
    """The running requests of this process. present: set while there are any."""

    def __init__(self) -> None:
        self._requests: set[RunningRequest] = set()
        self.present = asyncio.Event()

    @property
    def keys(self) -> set[str]:
        """Return the ids of the keys that must stay valid."""
        return {key_id for request in self._requests for key_id in request.keys}

    @contextmanager
    def add(self, keys: tuple[str, ...], limit: asyncio.Timeout) -> Iterator[RunningRequest]:
        """Register a request during the block. Enter it inside of `limit`."""
        request = RunningRequest(keys, limit)
        self._requests.add(request)
        self.present.set()
        try:
            yield request
        finally:
            self._requests.discard(request)
            if not self._requests:
                self.present.clear()

    def end(self, invalid: set[str]) -> None:
        """Expire the time limits of the requests with one of these keys."""
        now = asyncio.get_running_loop().time()
        for request in self._requests:
            if not invalid.isdisjoint(request.keys) and not request.limit.expired():
                request.is_ended = True
                request.limit.reschedule(now)
