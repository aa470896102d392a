"""Requests of this gateway process that are with an engine."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

# Time after the end of a client's connection for which its request may still be the cause of an engine's death.
LEFT_SECONDS = 2.0


@dataclass(slots=True)
class OwnRequests:
    """This process's requests on an engine.

    in_flight: number of requests that the engine has not finished. by_digest: number of requests whose answers the
    gateway has not yet passed on, by adapter (None: the base model). by_tenant: the same by tenant. loading: adapters
    that these requests made the engine load, until it reports them or the last of their requests ends. unanswered: a
    time-out for each request that the engine has not begun to answer.
    """

    in_flight: int = 0
    by_digest: Counter[str | None] = field(default_factory=Counter)
    by_tenant: Counter[str] = field(default_factory=Counter)
    loading: set[str | None] = field(default_factory=set)
    unanswered: set[asyncio.Timeout] = field(default_factory=set)
    # Tenants whose clients left before the answer's end, with the time (monotonic) of the last one, the newest last.
    _left: dict[str, float] = field(default_factory=dict)

    @property
    def num_adapters(self) -> int:
        """Return the number of adapters with requests."""
        return len(self.by_digest) - (None in self.by_digest)

    @property
    def suspects(self) -> set[str]:
        """Return the tenants with requests, and those whose clients have just left."""
        return self.by_tenant.keys() | self.just_left

    @property
    def just_left(self) -> set[str]:
        """Return the tenants whose clients have left within LEFT_SECONDS."""
        recent = time.monotonic() - LEFT_SECONDS
        return {tenant_id for tenant_id, at in self._left.items() if at > recent}

    @contextmanager
    def count(self, digest: str | None, tenant_id: str = "", *, loads: bool = False) -> Iterator["InFlight"]:
        """Count a request until the block ends. loads: whether the engine must load the adapter for it."""
        if loads:
            self.loading.add(digest)
        self.in_flight += 1
        self.by_digest[digest] += 1
        self.by_tenant[tenant_id] += 1
        request = InFlight(self)
        try:
            yield request
        except asyncio.CancelledError:
            now = time.monotonic()
            self._left.pop(tenant_id, None)
            self._left[tenant_id] = now
            while self._left[oldest := next(iter(self._left))] < now - LEFT_SECONDS:
                del self._left[oldest]
            raise
        finally:
            request.free()
            count_less(self.by_digest, digest)
            count_less(self.by_tenant, tenant_id)
            if digest not in self.by_digest:
                self.loading.discard(digest)

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

    instance: the engine's instance that has it, None if unknown. cut_off: whether its broken answer was cut off because
    the client read too slowly; None until that is asked.
    """

    def __init__(self, requests: OwnRequests) -> None:
        self._requests = requests
        self.is_counted = True
        self.instance: str | None = None
        self.cut_off: asyncio.Future[bool] | None = None

    def free(self) -> None:
        """Remove the request from `in_flight`, because the engine has finished its part. It stays in `by_digest`."""
        self._requests.in_flight -= self.is_counted
        self.is_counted = False


def count_less(counts: Counter[Any], key: Any) -> None:
    """Count one less of `key`. A count of zero is removed."""
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
