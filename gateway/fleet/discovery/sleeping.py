"""Engines that sleep: their supervisor has stopped them and starts them again on demand.

An engine's address in LORAPLEX_ENGINES names its supervisor with `?wake=URL`. `GET` returns the state of the base
model's engines, `POST` also wakes them. A request for a base model whose engines all sleep wakes them and is refused
with the time until they serve. Base models wake independently of each other, and a POST for one that is already waking
changes nothing, so no tenant can delay another's base model.
"""

import asyncio
import logging
import math
from typing import Literal

import msgspec
from aiohttp import ClientSession, ClientTimeout

from gateway.errors import NoEngine
from gateway.fleet.engines.engine import EngineRecord
from gateway.fleet.engines.health import Health
from wire.headers import INTERNAL_TOKEN_HEADER
from wire.http_errors import HTTP_ERRORS

log = logging.getLogger(__name__)

TIMEOUT = ClientTimeout(total=2.0)
# Time from the end of an engine's load until its gateways have its first report: they check it every second.
NOTICED_SECONDS = 1.5


class SupervisorReport(msgspec.Struct, frozen=True, kw_only=True):
    """A supervisor's report. seconds: time until the engines serve, if they are woken now. model, base_digest: as the
    engines report them.
    """

    state: Literal["awake", "stopping", "asleep", "loading"]
    seconds: float
    model: str | None = None
    base_digest: str | None = None


class BaseAsleep(NoEngine):
    """The base model's engines sleep, and this request has woken them."""

    code = "base_asleep"

    def __init__(self, seconds: int) -> None:
        super().__init__(
            f"The base model was idle, so its engines were stopped. They start now; try again in {seconds} s.",
            retry_after=seconds,
        )


class Supervisors:
    """Client of the supervisors. They get the internal token, because the operator lists their URLs."""

    def __init__(self, session: ClientSession, internal_token: str) -> None:
        self._session = session
        self._headers = {INTERNAL_TOKEN_HEADER: internal_token}
        self._waking: dict[str, asyncio.Task[SupervisorReport | None]] = {}

    async def mark_if_asleep(self, engine: EngineRecord) -> bool:
        """Mark an unreachable engine as asleep if its supervisor says so. Return whether it is.

        An engine without a supervisor is not asleep.
        """
        found = None if engine.address.wake is None else await self._call("GET", engine.address.wake)
        if found is None or found.state == "awake":
            return False
        if engine.state.model is None and engine.state.base_digest is None:
            engine.state.model, engine.state.base_digest = found.model, found.base_digest
        doing = "it sleeps; a request wakes it" if found.state == "asleep" else "it is woken and serves"
        engine.mark_down(f"{doing} in about {math.ceil(found.seconds)} s", Health.ASLEEP)
        return True

    async def wake(self, url: str) -> int | None:
        """Wake the engines of a supervisor's URL. Return the whole seconds until they serve.

        Return None without an answer, and if they do not sleep: an engine that is down then has crashed. Concurrent
        calls share one request.
        """
        task = self._waking.get(url)
        if task is None:
            task = self._waking[url] = asyncio.create_task(self._call("POST", url))
            task.add_done_callback(lambda _: self._waking.pop(url, None))
        found = await asyncio.shield(task)
        if found is None or found.state == "awake":
            return None
        return max(1, math.ceil(found.seconds + NOTICED_SECONDS))

    async def _call(self, method: str, url: str) -> SupervisorReport | None:
        try:
            async with self._session.request(
                method, url, headers=self._headers, timeout=TIMEOUT, allow_redirects=False
            ) as response:
                if response.status == 200:
                    return msgspec.json.decode(await response.read(), type=SupervisorReport)
                problem = f"status {response.status}"
        except (*HTTP_ERRORS, msgspec.MsgspecError) as error:
            problem = type(error).__name__
        log.warning("the supervisor of sleeping engines at %s did not answer %s: %s", url, method, problem)
        return None
