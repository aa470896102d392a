"""Requests of this gateway process that are with an engine."""

import asyncio
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from gateway.fleet.engines.suspects import OrphanedRequests, Suspect

# Minimum time between the detaching of a request and a reading of the engine's state, for the reading to show that the
# engine survived the request: earlier readings may have begun before.
SURVIVED_SECONDS = 2.0
# Maximum number of a tenant's detached requests that are kept for an engine; the earliest are forgotten first.
MAX_DETACHED = 1000
# Names of a request in the quarantine. Those of a large body are computed in a thread.
Names = Future[list[Suspect]]


@dataclass(slots=True, eq=False)
class NamedBody:
    """Body by which the quarantine names a request: as it was asked, whatever limit of tokens the quota grants.

    suspects: the request's names, once they are computed.
    """

    body: dict[str, Any]
    suspects: list[Suspect] | None = None


def named(suspects: Sequence[Suspect]) -> Names:
    """Return names that are known already."""
    names: Names = Future()
    names.set_result([*suspects])
    return names


@dataclass(slots=True)
class DetachedRequest:
    """A request or a hint whose answer this process stopped reading before its end: the client left or read too slowly,
    or a time limit passed. A hint also counts if its connection broke. The engine may still work on it.

    at: time at which that happened (monotonic). names: its names in the quarantine; a hint has none. is_reported:
    whether a death was reported with it.
    """

    at: float
    names: Names
    is_reported: bool = False


@dataclass(slots=True)
class OwnRequests:
    """This process's requests on an engine.

    in_flight: number of requests that the engine has not finished.
    sequences: number of their sequences, as engines count their load.
    by_digest: number of requests whose answers the gateway has not yet passed on, by adapter (None: the base model).
    by_tenant: the same by tenant.
    hinted: number of hints that the engine has not answered, by tenant.
    loading: adapters that the requests made the engine load, until it reports them or the last of their requests ends.
    unanswered: a time-out for each request that the engine has not begun to answer.
    """

    in_flight: int = 0
    sequences: int = 0
    by_digest: Counter[str | None] = field(default_factory=Counter)
    by_tenant: Counter[str] = field(default_factory=Counter)
    hinted: Counter[str] = field(default_factory=Counter)
    loading: set[str | None] = field(default_factory=set)
    unanswered: set[asyncio.Timeout] = field(default_factory=set)
    # Detached requests and hints by tenant, until the engine has shown that it survived them.
    _detached: dict[str, deque[DetachedRequest]] = field(default_factory=dict)

    @property
    def num_adapters(self) -> int:
        """Return the number of adapters with requests."""
        return len(self.by_digest) - (None in self.by_digest)

    @property
    def tenants(self) -> set[str]:
        """Return the tenants with requests or hints of which one may be the cause if the engine dies now."""
        return self.by_tenant.keys() | self.hinted.keys() | self._detached.keys()

    def has_detached(self, tenant_id: str) -> bool:
        """Return whether the engine may still work on a detached request or hint of the tenant."""
        return tenant_id in self._detached

    def report_detached(self) -> tuple[set[str], list[Names]]:
        """Return `tenants`, and the names of the requests that were detached since the last report.

        The tenants count at each death: a connection may break without the engine's death, which may follow.
        """
        detached = [each for requests in self._detached.values() for each in requests if not each.is_reported]
        for each in detached:
            each.is_reported = True
        return self.tenants, [each.names for each in detached]

    def forget_detached(self) -> None:
        """Forget the detached requests, because the engine's instance has ended."""
        for requests in self._detached.values():
            for each in requests:
                _forget(each)
        self._detached.clear()

    @contextmanager
    def loading_for(self, tenant_id: str) -> Iterator[None]:
        """Count a hint for a tenant until the block ends. It is detached if the block raises.

        Its load may be the cause of a death, and its connection may break before those of requests.
        """
        self.hinted[tenant_id] += 1
        try:
            yield
        except BaseException:
            self._detach(tenant_id, named(()))
            raise
        finally:
            count_less(self.hinted, tenant_id)

    def survived(self) -> None:
        """Forget the detached requests that the engine has survived, because it reports its state now."""
        before = time.monotonic() - SURVIVED_SECONDS
        for tenant_id, requests in list(self._detached.items()):
            while requests and requests[0].at < before:
                _forget(requests.popleft())
            if not requests:
                del self._detached[tenant_id]

    @contextmanager
    def count(
        self,
        digest: str | None,
        tenant_id: str = "",
        *,
        sequences: int = 1,
        loads: bool = False,
        is_sent: bool = True,
        suspects: Callable[[], Names] = lambda: named(()),
    ) -> Iterator["InFlight"]:
        """Count a request until the block ends. It is detached then, if it was sent and its `end` was not called.

        loads: whether the engine must load the adapter for it. is_sent: whether the engine may have it from the
        beginning, before a call of `sent`. suspects: returns its names in the quarantine.
        """
        if loads:
            self.loading.add(digest)
        self.in_flight += 1
        self.sequences += sequences
        self.by_digest[digest] += 1
        self.by_tenant[tenant_id] += 1
        request = InFlight(self, is_sent, sequences)
        try:
            yield request
        finally:
            request.free()
            count_less(self.by_digest, digest)
            count_less(self.by_tenant, tenant_id)
            if digest not in self.by_digest:
                self.loading.discard(digest)
            if request.is_sent and not request.has_ended:
                self._detach(tenant_id, suspects())

    def _detach(self, tenant_id: str, names: Names) -> None:
        request = DetachedRequest(time.monotonic(), names)
        self._detached.setdefault(tenant_id, deque(maxlen=MAX_DETACHED)).append(request)

    def take_over(self, orphaned: OrphanedRequests, age: float, is_reported: bool) -> None:
        """Count requests that another process left here `age` seconds ago as detached ones of this process.

        is_reported: whether a death was reported with them.
        """
        suspects = defaultdict[str, list[Suspect]](list)
        for suspect in orphaned.suspects:
            suspects[suspect.tenant_id].append(suspect)
        for tenant_id in orphaned.tenants:
            request = DetachedRequest(time.monotonic() - age, named(suspects[tenant_id]), is_reported)
            self._detached.setdefault(tenant_id, deque(maxlen=MAX_DETACHED)).append(request)

    def abandon_unanswered(self) -> None:
        """End the wait of all requests that the engine has not begun to answer; they go to other engines."""
        now = asyncio.get_running_loop().time()
        for wait in self.unanswered:
            if not wait.expired():
                wait.reschedule(now)


class Prefetched:
    """Adapters that an engine loads, or has loaded, into host memory for this process's hints.

    Each is forgotten after SECONDS, because the engine may have evicted it.
    """

    SECONDS = 10.0

    def __init__(self) -> None:
        # Oldest first.
        self._since: dict[str, float] = {}

    def add(self, digest: str) -> None:
        now = time.monotonic()
        while self._since and now - self._since[oldest := next(iter(self._since))] > self.SECONDS:
            del self._since[oldest]
        self._since.pop(digest, None)
        self._since[digest] = now

    def has(self, digest: str) -> bool:
        return time.monotonic() - self._since.get(digest, -self.SECONDS) < self.SECONDS

    def remove(self, digest: str) -> None:
        self._since.pop(digest, None)


class InFlight:
    """A request that counts in `in_flight`.

    instance: the engine's instance that has it, None if unknown. is_sent: whether the engine may have any byte of it.
    has_ended: whether the engine has no more to do with it. cut_off: whether its broken answer was cut off because the
    client read too slowly; None until that is asked.
    """

    def __init__(self, requests: OwnRequests, is_sent: bool, sequences: int = 1) -> None:
        self._requests = requests
        self._sequences = sequences
        self.is_sent = is_sent
        self.is_counted = True
        self.has_ended = False
        self.instance: str | None = None
        self.cut_off: asyncio.Future[bool] | None = None

    def sent(self) -> None:
        """Note that bytes of the request go to the engine from now on."""
        self.is_sent = True

    def end(self) -> None:
        """Note that the engine has no more to do with the request."""
        self.has_ended = True

    @contextmanager
    def ending_with(self, *errors: type[Exception]) -> Iterator[None]:
        """Note the request's end if the block raises one of these errors, unless its `may_still_run` is true."""
        try:
            yield
        except errors as error:
            self.has_ended = self.has_ended or not getattr(error, "may_still_run", False)
            raise

    def free(self) -> None:
        """Remove the request from `in_flight`, because the engine has finished its part. It stays in `by_digest`."""
        if self.is_counted:
            self._requests.in_flight -= 1
            self._requests.sequences -= self._sequences
            self.is_counted = False


def _forget(request: DetachedRequest) -> None:
    """Cancel the computation of names that no report waits for."""
    if not request.is_reported:
        request.names.cancel()


def count_less(counts: Counter[Any], key: Any) -> None:
    """Count one less of `key`. A count of zero is removed."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
