"""Health checks of engines: their health route and state, then the stream of their state changes, if they push it."""

import logging
from collections.abc import Callable

import msgspec
from aiohttp import ClientResponseError, ClientSession

from gateway.fleet.discovery.sleeping import Supervisors
from gateway.fleet.engines.engine import EngineRecord
from gateway.fleet.engines.health import REFUSED, Health, is_refused, network_reason
from gateway.fleet.kinds.kind import HEALTH_TIMEOUT, STATE_ERRORS, EngineKind, Misconfigured, read_body
from gateway.fleet.kinds.table import Kinds
from gateway.records.bases.registry import Bases, NoBase
from gateway.records.caches.lookups import Lookups
from wire.http_errors import HTTP_ERRORS

log = logging.getLogger(__name__)

# Statuses in the body of a health route.
DRAINING, LOADING = "draining", "loading"
OUR_KEY = "it refuses the internal token; start it with this gateway's LORAPLEX_INTERNAL_TOKEN"
ITS_KEY = "{} refuses this gateway's key; name its API key by ?key_env= or ?key_file= in LORAPLEX_ENGINES"


class HealthChecks:
    """Health checks of engines, which also find the base model that each serves."""

    def __init__(self, session: ClientSession, kinds: Kinds, bases: Bases, internal_token: str = "") -> None:
        self._session = session
        self._supervisors = Supervisors(session, internal_token)
        self._kinds = kinds
        self._bases = bases
        self._instances = Lookups(self._read_instance)

    async def check(self, engine: EngineRecord) -> None:
        """Check the engine and update its record. Raises no network errors."""
        kind = self._kinds[engine.address.traits.name]
        if not await self._is_alive(engine, kind):
            return
        own = engine.requests.sequences
        try:
            engine.observe_state(await kind.read_state(engine), own)
        except Misconfigured as error:
            engine.mark_misconfigured(str(error))
            return
        except STATE_ERRORS as error:
            if isinstance(error, ClientResponseError) and error.status in (401, 403):
                traits = engine.address.traits
                engine.mark_misconfigured(ITS_KEY.format(traits.title) if traits.has_own_secret else OUR_KEY)
                return
            # The state waits for a step to end; until it is read again, the last known state stays in use.
            log.debug("engine %s: its state could not be read: %s", engine.url, type(error).__name__)
            if engine.address.traits.has_own_secret and not engine.is_up:
                # Nothing shows yet that its release and settings keep tenants apart.
                engine.mark_down(f"its state could not be read: {_unread_reason(error)}")
                return
        self.judge(engine)

    async def _is_alive(self, engine: EngineRecord, kind: EngineKind) -> bool:
        """Return whether the health route answers 200; otherwise note the reason."""
        route = f"GET {kind.health_path}"
        try:
            answered, status = await self._ask_health(engine, kind)
        except TimeoutError:
            engine.note_missed_check(f"{route} had no answer within {HEALTH_TIMEOUT.total:g} s")
        except HTTP_ERRORS as error:
            engine.condition.note_loading(is_loading=False)
            if await self._supervisors.mark_if_asleep(engine):
                self._find_base(engine)
            else:
                engine.mark_down(f"{route} failed: {network_reason(error)}")
                if is_refused(error) and engine.is_listed:
                    engine.note_death(REFUSED)
        else:
            if answered == 200:
                engine.condition.note_loaded()
                return True
            reason = f"{route} answered {answered}" + (f" ({status})" if status else "")
            engine.mark_down(reason, Health.DRAINING if status == DRAINING else Health.DOWN)
            engine.condition.note_loading(is_loading=status == LOADING)
        return False

    async def _ask_health(self, engine: EngineRecord, kind: EngineKind) -> tuple[int, str]:
        """Return the health route's status code, and the status in its body unless the code is 200.

        Raises ClientError, OSError, TimeoutError.
        """
        url = engine.url + kind.health_path
        async with self._session.get(url, timeout=HEALTH_TIMEOUT, allow_redirects=False) as response:
            return response.status, "" if response.status == 200 else _status(await read_body(response))

    async def running_instance(self, engine: EngineRecord) -> str | None:
        """Return the instance that runs at the engine's address, None if that cannot be read now.

        This changes nothing in the engine's record and counts no missed check. Concurrent callers share a check.
        """
        return await self._instances.get(engine)

    async def _read_instance(self, engine: EngineRecord) -> str | None:
        kind = self._kinds[engine.address.traits.name]
        try:
            answered, status = await self._ask_health(engine, kind)
            if answered != 200 and status != DRAINING:
                return None
            return (await kind.read_state(engine)).instance
        except (Misconfigured, *STATE_ERRORS) as error:
            log.debug("engine %s: its instance could not be read: %s", engine.url, type(error).__name__)
            return None

    async def wake(self, url: str) -> int | None:
        """Wake the engines of a supervisor; see `Supervisors.wake`."""
        return await self._supervisors.wake(url)

    async def follow(self, engine: EngineRecord, changed: Callable[[], None]) -> bool:
        """Update the record from the engine's state stream until it ends or falls silent. Raises no network errors.

        changed: called after each line. Returns whether there was any line.
        """
        pushed = False
        try:
            async for state in self._kinds[engine.address.traits.name].follow(engine):
                engine.observe_state(state, engine.requests.sequences)
                if engine.state.draining:
                    engine.mark_down("it finishes its requests and stops", Health.DRAINING)
                else:
                    self.judge(engine)
                changed()
                pushed = True
        except TimeoutError:
            # An engine that has sent no line yet may have to finish a long step first.
            if pushed:
                engine.mark_down("its state stream stopped sending", Health.SILENT)
            else:
                engine.note_missed_check("its state stream did not begin in time")
        except STATE_ERRORS as error:
            # The next check of the health route finds the reason.
            log.debug("engine %s: its state stream ended: %s", engine.url, type(error).__name__)
        return pushed

    def judge(self, engine: EngineRecord) -> None:
        """Mark an answering engine as up if it serves a base model on record, else as misconfigured."""
        problem = self._find_base(engine)
        if problem is None:
            engine.mark_up()
        else:
            engine.mark_misconfigured(problem)

    def _find_base(self, engine: EngineRecord) -> str | None:
        """Set the base model that the engine serves. Return the reason if it is not on record."""
        try:
            engine.base = self._bases.served_by(engine.state.model, engine.state.base_digest).id
        except NoBase as error:
            engine.base = None
            return str(error)
        return None


def _unread_reason(error: BaseException) -> str:
    """Return the reason why a state could not be read, without the server's address or answer."""
    if isinstance(error, ClientResponseError):
        return f"{error.request_info.url.path} answered {error.status}, expected 200"
    if isinstance(error, HTTP_ERRORS):
        return network_reason(error)
    return "an answer does not have the expected form"


def _status(body: bytes) -> str:
    """Return the status in the body of a health route, "" if there is none."""
    try:
        status = msgspec.json.decode(body, type=_Health).status
    except (ValueError, RecursionError):
        return ""
    return status[:40]


class _Health(msgspec.Struct):
    status: str = ""
