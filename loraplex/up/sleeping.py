"""Engines that sleep while their base model is idle, and the HTTP server by which gateways wake them.

`gateway/fleet/discovery/sleeping.py` is its client. Each base model sleeps and wakes by itself. All base models are
loaded at the start of `loraplex up`, so that they fit beside each other, and their load times are known.
"""

import asyncio
import hmac
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp
from aiohttp import web

from loraplex.up.processes import Child, ChildError, ProcessGroup
from wire.headers import INTERNAL_TOKEN_HEADER
from wire.http_errors import HTTP_ERRORS

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
LOOK_TIMEOUT = aiohttp.ClientTimeout(total=2.0)
# Estimated time of an idle engine's stop.
STOP_SECONDS = 1.0
# Remaining time of a load that takes longer than the last one, as a share of its time so far.
OVERDUE_SHARE = 0.25
# Pauses after a load that failed; the last one applies to all further ones.
RETRY_SECONDS = (1.0, 5.0, 30.0)

State = Literal["awake", "stopping", "asleep", "loading"]


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine of the base model. is_healthy: returns whether it serves. url: its address."""

    child: Child
    url: str
    is_healthy: Callable[[], Awaitable[bool]]


class SleepingBase:
    """The engines of one base model. They are stopped after `sleep_after` idle seconds, and started by `wake`.

    load_seconds: time of their load at the start of `loraplex up`. ready_seconds: time limit of a load. note: called
    with a line for the operator at each change.
    """

    def __init__(
        self,
        name: str,
        engines: Sequence[Engine],
        processes: ProcessGroup,
        *,
        sleep_after: float,
        load_seconds: float,
        ready_seconds: float,
        token: str,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.name = name
        self.state: State = "awake"
        self._engines, self._processes = engines, processes
        self._sleep_after, self._load_seconds, self._ready_seconds = sleep_after, load_seconds, ready_seconds
        self._headers = {INTERNAL_TOKEN_HEADER: token}
        self._note = note
        self._wanted = asyncio.Event()
        self._since = self._now()
        self._failures = 0
        # Reported by the engines while they are awake.
        self._model: str | None = None
        self._digest: str | None = None
        self._steps: list[int] = []

    def wake(self) -> None:
        """Start the engines, now or once they have stopped. Does nothing while they serve or load."""
        if self.state in ("stopping", "asleep"):
            self._wanted.set()

    def report(self) -> dict[str, Any]:
        """Return the state, and the seconds until the engines serve, if they are woken now."""
        return {
            "state": self.state,
            "seconds": self._seconds(),
            "model": self._model or self.name,
            "base_digest": self._digest,
        }

    def _seconds(self) -> float:
        passed = self._now() - self._since
        if self.state == "awake":
            return 0.0
        if self.state == "loading":
            return max(1.0, OVERDUE_SHARE * passed, self._load_seconds - passed)
        stop = max(0.0, STOP_SECONDS - passed) if self.state == "stopping" else 0.0
        return stop + self._pause_left() + self._load_seconds

    def _pause_left(self) -> float:
        """Return the rest of the pause after a load that failed."""
        if not self._failures:
            return 0.0
        pause = RETRY_SECONDS[min(self._failures, len(RETRY_SECONDS)) - 1]
        return max(0.0, pause - (self._now() - self._since))

    async def run(self) -> None:
        """Let the engines sleep and wake, until cancelled. A load that fails is tried again when they are woken."""
        async with aiohttp.ClientSession(headers=self._headers, timeout=LOOK_TIMEOUT) as session:
            while True:
                await self._until_idle(session)
                await self._stop()
                while self.state != "awake":
                    await self._wanted.wait()
                    await asyncio.sleep(self._pause_left())
                    await self._start()

    async def _until_idle(self, session: aiohttp.ClientSession) -> None:
        used = self._now()
        while self._now() - used < self._sleep_after:
            await asyncio.sleep(min(LOOK_SECONDS, self._sleep_after / 4))
            if await self._is_active(session):
                used = self._now()

    async def _is_active(self, session: aiohttp.ClientSession) -> bool:
        """Return whether an engine has work, has worked since the last look, or does not answer."""
        try:
            states = await asyncio.gather(*(self._read(session, engine) for engine in self._engines))
        except (*HTTP_ERRORS, ValueError):
            return True
        self._model, self._digest = states[0].get("model"), states[0].get("base_digest")
        before, self._steps = self._steps, [state["steps"] for state in states]
        return before != self._steps or any(state["running"] or state["waiting"] for state in states)

    async def _read(self, session: aiohttp.ClientSession, engine: Engine) -> dict[str, Any]:
        async with session.get(f"{engine.url}/state") as response:
            response.raise_for_status()
            return dict(await response.json())

    async def _stop(self) -> None:
        """Stop the engines. A request that arrives now ends as usual, or wakes them."""
        self._wanted.clear()
        self._change("stopping")
        await asyncio.gather(*(self._processes.pause(engine.child) for engine in self._engines))
        self._change("asleep")
        self._note(f"{self.name} sleeps: it was idle for {self._sleep_after:g} s")

    async def _start(self) -> None:
        self._wanted.clear()
        self._change("loading")
        began = self._now()
        starts = [
            self._processes.resume(engine.child, engine.is_healthy, self._ready_seconds) for engine in self._engines
        ]
        failed = [each for each in await asyncio.gather(*starts, return_exceptions=True) if each is not None]
        if any(not isinstance(each, ChildError | OSError) for each in failed):
            raise failed[0]
        if failed:
            await asyncio.gather(*(self._processes.pause(engine.child) for engine in self._engines))
            self._failures += 1
            self._change("asleep")
            self._note(f"{self.name} did not wake: {failed[0]}")
            return
        self._failures, self._load_seconds = 0, self._now() - began
        self._change("awake")
        self._note(f"{self.name} is awake after {self._load_seconds:.1f} s")

    def _change(self, state: State) -> None:
        self.state, self._since = state, self._now()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()


class Supervisor:
    """HTTP server for gateways: `GET /bases/N` reports a base model, `POST` also wakes it, with the internal token."""

    def __init__(self, bases: Sequence[SleepingBase], token: str) -> None:
        self._bases, self._token = bases, token.encode()
        self._tasks: list[asyncio.Task[None]] = []
        app = web.Application()
        app.router.add_get("/bases/{number}", self._handle)
        app.router.add_post("/bases/{number}", self._handle)
        self._runner = web.AppRunner(app, access_log=None)

    async def start(self, host: str, port: int = 0) -> int:
        """Serve, and let the bases sleep. Returns the port. port: 0 for any free one."""
        await self._runner.setup()
        await web.TCPSite(self._runner, host, port).start()
        self._tasks = [asyncio.create_task(base.run()) for base in self._bases]
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError):
                await task
        await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.Response:
        given = request.headers.get(INTERNAL_TOKEN_HEADER, "").encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(given, self._token):
            raise web.HTTPUnauthorized
        number = request.match_info["number"]
        if not number.isdecimal() or int(number) >= len(self._bases):
            raise web.HTTPNotFound
        base = self._bases[int(number)]
        if request.method == "POST":
            base.wake()
        return web.Response(text=json.dumps(base.report()), content_type="application/json")
