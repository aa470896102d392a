"""Turns of suspected tenants: a tenant's requests run on an engine that is kept for them.

A tenant that was there at several deaths without a known cause may send requests that kill engines, each one different.
No request is then ever at a second death. In its turn, all processes send the tenant's requests to the kept engine, and
other tenants' elsewhere. A death there shows the cause, and after several the tenant is refused. A tenant whose
requests have run so for a time is suspected again only after as many further deaths.

A single tenant of a deployment has a turn at a time, so suspected tenants run apart from each other too. The others run
as usual, because most of them are innocent. A tenant that was alone at a death waits for its turns.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from gateway.fleet.engines.engine import EngineRecord
from gateway.fleet.failures.isolation import (
    EMPTYING_SECONDS,
    PAUSE_SECONDS,
    SHARING_SECONDS,
    WAIT_SECONDS,
    Isolation,
    NotAlone,
    Usable,
)
from gateway.fleet.failures.quarantine import Quarantine

log = logging.getLogger(__name__)

# Requests that begin within this time (seconds) of a turn must have run to their ends, or have been left and survived,
# for the tenant to be cleared.
STRETCH_SECONDS = 5.0
# A tenant without a turn keeps its place in the order for this time after its last request, and gets no further turn
# for this time after one whose engine did not become free, because its requests wait in turns.
PLACE_SECONDS = REST_SECONDS = 60.0

# A tenant and a base model (its id).
Key = tuple[str, str]


class _Turn:
    """A turn of this process. begun: requests that the engine got. first: those of STRETCH_SECONDS that still run."""

    def __init__(self, key: Key) -> None:
        self.key = key
        self.opened_at: float | None = None
        self.begun = self.first = 0

    @property
    def is_beginning(self) -> bool:
        return self.opened_at is not None and time.monotonic() < self.opened_at + STRETCH_SECONDS

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a request until the block ends."""
        is_first = self.is_beginning
        self.begun += 1
        self.first += is_first
        try:
            yield
        finally:
            self.first -= is_first


class TenantTurns:
    """Turns of suspected tenants. isolation: has the kept engine. quarantine: knows who is suspected."""

    def __init__(self, isolation: Isolation, quarantine: Quarantine) -> None:
        self._isolation = isolation
        self._kept = isolation.kept
        self._quarantine = quarantine
        self._turn: _Turn | None = None
        self._running: asyncio.Task[None] | None = None
        # Time of the last request of each suspected tenant; the one whose turn is next comes first.
        self._wanted: dict[Key, float] = {}
        # Start of a tenant's, and of any tenant's, next turn at the earliest.
        self._rests_until: dict[Key, float] = {}
        self._next_at = 0.0

    @asynccontextmanager
    async def engine(self, base: str, tenant_id: str, usable: Usable) -> AsyncIterator[EngineRecord | None]:
        """Yield the engine that is kept for a tenant's requests, None if the request may run beside others'.

        base: id of the base model. usable: returns whether an engine may serve the request. Raises NotAlone.
        """
        key, until = (tenant_id, base), time.monotonic() + WAIT_SECONDS
        while self._runs_apart(key, usable):
            if (engine := self._ready(key, usable)) is not None:
                turn = self._turn if self._turn is not None and self._turn.key == key else _Turn(key)
                with turn.counted():
                    yield engine
                return
            if time.monotonic() > until:
                raise NotAlone
            await asyncio.sleep(PAUSE_SECONDS)
        yield None

    async def close(self) -> None:
        """End the turn of this process."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    def _ready(self, key: Key, usable: Usable) -> EngineRecord | None:
        """Return the engine that is kept for a tenant, None if a request must wait for it."""
        engine = self._kept_for(key)
        is_ready = engine is not None and self._kept.is_open and engine.available and usable(engine)
        if engine is None or not is_ready or engine.fullness() or self._isolation.is_last(key[1], engine):
            return None
        return engine

    def _kept_for(self, key: Key) -> EngineRecord | None:
        """Return the engine that some process keeps for a tenant's requests for a base model."""
        if self._kept.tenant_id != key[0]:
            return None
        return next((each for each in self._isolation.engines(key[1]) if each.url == self._kept.url), None)

    def _runs_apart(self, key: Key, usable: Usable) -> bool:
        """Return whether a request must run on the kept engine. Begin its tenant's turn if that is next."""
        if (self._turn is not None and self._turn.key == key) or self._kept_for(key) is not None:
            return True
        if not self._quarantine.known.is_suspected(*key):
            return False
        self._wanted[key] = time.monotonic()
        return self._begin(key, usable) or self._quarantine.known.was_alone(*key)

    def _begin(self, key: Key, usable: Usable) -> bool:
        """Begin a tenant's turn if it is next and no engine is kept. Return whether it has begun."""
        now = time.monotonic()
        if self._turn is not None or self._isolation.is_active or now < self._next_at or self._next(now) != key:
            return False
        engine = self._isolation.choose(key[1], key[0], usable)
        # It is next again after all others, unless it was alone at a death.
        del self._wanted[key]
        self._wanted[key] = now
        if engine is None:
            return False
        self._turn = _Turn(key)
        self._running = asyncio.create_task(self._run(self._turn, engine, usable))
        return True

    def _next(self, now: float) -> Key | None:
        """Return the suspected tenant whose turn is next: those that were alone at a death come first."""
        self._wanted = {key: at for key, at in self._wanted.items() if at > now - PLACE_SECONDS}
        self._rests_until = {key: until for key, until in self._rests_until.items() if until > now}
        known = self._quarantine.known
        waiting = [key for key in self._wanted if known.is_suspected(*key)]
        alone = [key for key in waiting if known.was_alone(*key)]
        return next(iter(alone or [key for key in waiting if key not in self._rests_until]), None)

    async def _run(self, turn: _Turn, engine: EngineRecord, usable: Usable) -> None:
        """Keep an engine for a tenant's turn, and clear the tenant if it has shown nothing."""
        tenant_id, base = turn.key
        try:
            async with self._kept.keep(engine.url, tenant_id) as lease:
                if lease is None:
                    return
                until = time.monotonic() + EMPTYING_SECONDS
                if not await self._isolation.empties(base, engine, tenant_id, usable, until):
                    self._rests_until[turn.key] = time.monotonic() + REST_SECONDS
                    return
                if not await self._kept.open(lease):
                    return
                log.warning("the requests of tenant %s run alone on engine %s for a time", tenant_id, engine.url)
                turn.opened_at = time.monotonic()
                if await self._survives(turn, engine):
                    await self._quarantine.clear_tenant(tenant_id, base)
                    log.info("tenant %s is no longer suspected: engine %s survived its requests", tenant_id, engine.url)
        except Exception:
            # A bug. The tenant stays suspected, and its next turn may go on.
            log.exception("the turn of a suspected tenant failed")
        finally:
            self._turn = None
            self._next_at = time.monotonic() + 2 * SHARING_SECONDS

    async def _survives(self, turn: _Turn, engine: EngineRecord) -> bool:
        """Wait for the ends of a turn's first requests. Return whether the engine has survived them, at least one."""
        while (
            engine.available
            and not self._quarantine.died_lately(engine)
            and self._kept.url == engine.url
            and not self._isolation.is_last(turn.key[1], engine)
        ):
            if not (turn.is_beginning or turn.first or engine.requests.has_left(turn.key[0])):
                return turn.begun > 0
            await asyncio.sleep(PAUSE_SECONDS)
        return False
