"""Isolation: a request that may have killed engines runs on an engine that is kept for it.

If several tenants had requests on the engines that died, the quarantine cannot tell which one is the cause. On an
engine without other tenants' requests, a further death shows the cause, and takes no other tenant's request along.
Other requests go to other engines while one can serve them, and those already there run to their ends. A single engine
of a deployment is kept at a time (`kept_engine.py`); tenants take turns. A turn of one request answers for all that are
identical to it, so these wait for its result instead of turns of their own.
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
from gateway.fleet.engines.suspects import Suspect
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
# Different requests of a tenant that may wait in a process. The tenant's own limits bound the identical ones.
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


class Line:
    """Identical requests of a tenant. The first one waits for a turn, or has it; the others wait until they are first.

    is_running: whether the first one has its turn.
    """

    def __init__(self) -> None:
        self.is_running = False
        # Set for the first one.
        self._places: deque[asyncio.Event] = deque()

    def __bool__(self) -> bool:
        return bool(self._places)

    def join(self) -> asyncio.Event:
        """Return a new place: an event that is set while the place is the first one."""
        place = asyncio.Event()
        self._places.append(place)
        self._places[0].set()
        return place

    def leave(self, place: asyncio.Event) -> None:
        self._places.remove(place)
        if self._places:
            self._places[0].set()

    def rotate(self) -> None:
        """Put the first place last."""
        self._places[0].clear()
        self._places.rotate(-1)
        self._places[0].set()


class Isolation:
    """Turns of suspected requests. engines: returns the engines of a base model (its id)."""

    def __init__(self, engines: Callable[[str], Sequence[EngineRecord]], kept: KeptEngine) -> None:
        self._engines = engines
        self._kept = kept
        # Suspected requests by tenant. The tenant whose turn is next comes first, and so does its next request.
        self._lines: dict[str, dict[Suspect, Line]] = {}
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
        self, base: str, request: Suspect, usable: Usable, is_suspected: Callable[[], Awaitable[object]]
    ) -> AsyncIterator[EngineRecord | None]:
        """Yield an engine without other tenants' requests, and keep it until the block ends.

        base: id of the base model. request: its name. usable: returns whether an engine may serve the request.
        is_suspected: returns anything true while the request must wait; None is yielded as soon as it does not. Raises
        NotAlone.
        """
        until, tenant_id = time.monotonic() + WAIT_SECONDS, request.tenant_id
        with ExitStack() as waiting:
            line, place = waiting.enter_context(self._place(request))
            await _until_first(place, until)
            while await is_suspected():
                if self._is_next(line) and not self.is_active and time.monotonic() >= self._next_at:
                    if (engine := self._choose(base, tenant_id, usable)) is not None:
                        async with self._turn(base, engine, tenant_id, usable, until) as is_free:
                            if is_free:
                                line.is_running = True
                                self._put_last(request)
                                # The next identical request finds the result before the engine is given back.
                                with waiting:
                                    yield engine
                                return
                    # Another request may have an engine: an identical one that has not tried it, or one for another
                    # base model.
                    line.rotate()
                    self._put_last(request)
                if time.monotonic() > until:
                    raise NotAlone
                await asyncio.sleep(PAUSE_SECONDS)
                await _until_first(place, until)
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
    def _place(self, request: Suspect) -> Iterator[tuple[Line, asyncio.Event]]:
        """Let a request wait behind identical ones. Yield their line, and its place there. Raises NotAlone."""
        lines = self._lines.get(request.tenant_id, {})
        if request not in lines and len(lines) >= MAX_WAITING:
            raise NotAlone
        line = self._lines.setdefault(request.tenant_id, lines).setdefault(request, Line())
        place = line.join()
        try:
            yield line, place
        finally:
            line.leave(place)
            if place.is_set():
                line.is_running = False
                self._put_last(request)

    def _is_next(self, line: Line) -> bool:
        """Return whether the next turn is that of a line's first request."""
        waiting = (each for lines in self._lines.values() for each in lines.values() if not each.is_running)
        return next(waiting, None) is line

    def _put_last(self, request: Suspect) -> None:
        """Let other tenants, then the tenant's other requests, have the next turns. Remove an empty line."""
        lines = self._lines.pop(request.tenant_id)
        if line := lines.pop(request):
            lines[request] = line
        if lines:
            self._lines[request.tenant_id] = lines


async def _until_first(place: asyncio.Event, until: float) -> None:
    """Wait until no identical request is before this one. Raises NotAlone at a time (monotonic)."""
    try:
        async with asyncio.timeout(until - time.monotonic()):
            await place.wait()
    except TimeoutError:
        raise NotAlone from None


async def _end_later(turn: AsyncExitStack, engine: EngineRecord, tenant_id: str) -> None:
    """End a turn once the engine has survived the tenant's detached requests, or after KEPT_AFTER_LEAVING_SECONDS."""
    until = time.monotonic() + KEPT_AFTER_LEAVING_SECONDS
    async with turn:
        while time.monotonic() < until:
            if not engine.requests.has_detached(tenant_id):
                return
            await asyncio.sleep(PAUSE_SECONDS)
