"""Isolation: a request that may have killed engines runs on an engine that is kept for it.

If several tenants had requests on the engines that died, the quarantine cannot tell which one is the cause. On an
engine without other tenants' requests, a further death shows the cause, and takes no other tenant's request along.
Other requests go to other engines while one can serve them, and those already there run to their ends. A single engine
of a deployment is kept at a time (`kept_engine.py`); tenants take turns.
"""

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager

from gateway.errors import Unavailable
from gateway.fleet.engines.engine import EngineRecord
from gateway.fleet.failures.kept_engine import KeptEngine

log = logging.getLogger(__name__)

# Longest wait of a request for its turn and for an engine without other tenants' requests.
WAIT_SECONDS = 60.0
# Time for other tenants' requests on the kept engine to end. Then the turn is over.
EMPTYING_SECONDS = 15.0
# Time for the other processes to read that the engine is kept. Its later reports show all that they sent before.
SHARING_SECONDS = 0.5
# Longest time for which an engine is kept after its request's client has left.
KEPT_AFTER_LEAVING_SECONDS = 5.0
PAUSE_SECONDS = 0.05
# Requests of a tenant that may wait in a process.
MAX_WAITING = 16

Usable = Callable[[EngineRecord], bool]


class NotAlone(Unavailable):
    """No engine became free of other tenants' requests."""

    status, code = 503, "request_suspected"

    def __init__(self) -> None:
        super().__init__(
            "Engines died while they worked on this request and on other tenants' requests. It is served only on an "
            "engine without other tenants' requests, and none became free in time; try again later.",
            retry_after=math.ceil(EMPTYING_SECONDS),
        )


class Isolation:
    """Turns of suspected requests. engines: returns the engines of a base model (its id)."""

    def __init__(self, engines: Callable[[str], Sequence[EngineRecord]], kept: KeptEngine) -> None:
        self._engines = engines
        self._kept = kept
        # Waiting requests by tenant; the tenant whose turn is next comes first.
        self._waiting: dict[str, deque[object]] = {}
        # Start of this process's next turn at the earliest, so that other processes get one.
        self._next_at = 0.0
        self._alone: EngineRecord | None = None
        # Turns whose clients have left.
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def is_active(self) -> bool:
        """Return whether an engine is kept."""
        return self._kept.url is not None

    def allows(self, engine: EngineRecord) -> bool:
        """Return whether the engine is not kept for a suspected request."""
        return engine.url != self._kept.url

    def is_alone(self, engine: EngineRecord) -> bool:
        """Return whether the engine is kept and has become free of other tenants' requests."""
        return engine is self._alone and not self.allows(engine)

    def is_last(self, base: str, engine: EngineRecord) -> bool:
        """Return whether other requests would have no engine if this one died now, though another may come back."""
        others = [each for each in self._engines(base) if each is not engine and each.drained is None]
        return any(each.condition.may_come_back for each in others) and not any(each.available for each in others)

    @asynccontextmanager
    async def engine(
        self, base: str, tenant_id: str, usable: Usable, is_suspected: Callable[[], Awaitable[object]]
    ) -> AsyncIterator[EngineRecord | None]:
        """Yield an engine without other tenants' requests, and keep it until the block ends.

        base: id of the base model. usable: returns whether an engine may serve the request. is_suspected: returns
        anything true while the request must wait; None is yielded as soon as it does not. Raises NotAlone.
        """
        until = time.monotonic() + WAIT_SECONDS
        with ExitStack() as waiting:
            is_next = waiting.enter_context(self._place(tenant_id))
            while await is_suspected():
                if is_next() and not self.is_active and time.monotonic() >= self._next_at:
                    if (engine := self._choose(base, tenant_id, usable)) is not None:
                        async with self._turn(base, engine, tenant_id, usable, until) as is_free:
                            if is_free:
                                waiting.close()
                                yield engine
                                return
                    # Another request may be for a base model that has an engine for it.
                    self._waiting[tenant_id].rotate(-1)
                    self._put_last(tenant_id)
                if time.monotonic() > until:
                    raise NotAlone
                await asyncio.sleep(PAUSE_SECONDS)
        yield None

    @asynccontextmanager
    async def _turn(
        self, base: str, engine: EngineRecord, tenant_id: str, usable: Usable, until: float
    ) -> AsyncIterator[bool]:
        """Keep an engine until the block ends. Yield whether it has become free of other tenants' requests.

        If the client leaves, the engine is kept until it has shown that it survived the request, or for
        KEPT_AFTER_LEAVING_SECONDS.
        """
        async with AsyncExitStack() as turn:
            is_kept = await turn.enter_async_context(self._kept.keep(engine.url))
            is_free = is_kept and await self._empties(base, engine, tenant_id, usable, until)
            if is_free:
                self._alone = engine
                turn.callback(setattr, self, "_alone", None)
                log.warning("a request of tenant %s runs alone on engine %s", tenant_id, engine.url)
            try:
                yield is_free
            finally:
                self._next_at = time.monotonic() + SHARING_SECONDS
                if is_free and engine.requests.has_detached(tenant_id):
                    ending = asyncio.create_task(_end_later(turn.pop_all(), engine, tenant_id))
                    self._ending.add(ending)
                    ending.add_done_callback(self._ending.discard)

    def _choose(self, base: str, tenant_id: str, usable: Usable) -> EngineRecord | None:
        """Return the engine on which the fewest requests must end first, None if none is usable."""
        found = [
            each for each in self._engines(base) if each.available and usable(each) and not self.is_last(base, each)
        ]
        return min(found, key=lambda each: each.load - each.requests.by_tenant[tenant_id], default=None)

    async def _empties(self, base: str, engine: EngineRecord, tenant_id: str, usable: Usable, until: float) -> bool:
        """Wait for the ends of other tenants' requests on the engine. Return whether they have ended in time.

        until: end of the wait if it is before EMPTYING_SECONDS (monotonic).
        """
        since = time.monotonic()
        until = min(until, since + EMPTYING_SECONDS)
        while time.monotonic() < until and not self.allows(engine) and engine.available and usable(engine):
            if engine.observed_at > since + SHARING_SECONDS and engine.serves_only(tenant_id):
                return not self.is_last(base, engine)
            await asyncio.sleep(PAUSE_SECONDS)
        return False

    @contextmanager
    def _place(self, tenant_id: str) -> Iterator[Callable[[], bool]]:
        """Let a request wait. Yield a function that returns whether its turn is next. Raises NotAlone."""
        if len(self._waiting.get(tenant_id, ())) >= MAX_WAITING:
            raise NotAlone
        place = object()
        self._waiting.setdefault(tenant_id, deque()).append(place)
        try:
            yield lambda: next(iter(self._waiting)) == tenant_id and self._waiting[tenant_id][0] is place
        finally:
            self._waiting[tenant_id].remove(place)
            self._put_last(tenant_id)

    def _put_last(self, tenant_id: str) -> None:
        """Let other tenants' requests have the next turns."""
        if places := self._waiting.pop(tenant_id):
            self._waiting[tenant_id] = places


async def _end_later(turn: AsyncExitStack, engine: EngineRecord, tenant_id: str) -> None:
    """End a turn once the engine has survived the tenant's detached requests, or after KEPT_AFTER_LEAVING_SECONDS."""
    until = time.monotonic() + KEPT_AFTER_LEAVING_SECONDS
    async with turn:
        while time.monotonic() < until:
            if not engine.requests.has_detached(tenant_id):
                return
            await asyncio.sleep(PAUSE_SECONDS)
