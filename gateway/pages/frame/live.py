"""`/admin/events` and `/console/events`: server-sent events that keep an open page current.

The strip is rendered once a second for all viewers, and sent when it changed. A `tick` every few seconds makes the
page fetch its marked fragments. A stream ends with its session, and when the gateway stops.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from aiohttp import ClientConnectionResetError, web

from gateway.errors import GatewayError, Unavailable
from gateway.pages.frame.frame import Frame

SECOND = 1.0
# Data of the last event of a session that has ended.
SESSION = "session"
# Seconds between two ticks, and between two checks that the session is still valid.
TICK_SECONDS, CHECK_SECONDS = 2, 10
# Streams of one session, of one tenant, of all tenants together, and of all operators. Operators have places of their
# own, so that they can watch an outage however many tenants do.
MAX_OF_SESSION, MAX_OF_TENANT, MAX_OF_TENANTS, MAX_OF_OPERATORS = 6, 20, 300, 100
OPERATORS, TENANTS = "operators", "tenants"
HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    # Otherwise nginx buffers the events.
    "X-Accel-Buffering": "no",
}


class TooManyStreams(GatewayError):
    """Too many pages of the session, of the tenant or of this gateway process are open."""

    status, kind, code = 429, "concurrency", "too_many_streams"

    def __init__(self) -> None:
        super().__init__("Too many pages are open for live updates. Close some.", headers={"Retry-After": "30"})


class Live:
    """Routes of the streams. still_valid: checks the session of a request. stopping: whether the gateway stops."""

    def __init__(
        self,
        frame: Frame,
        visitor_of: Callable[[web.Request], Any],
        still_valid: Callable[[web.Request], Awaitable[bool]],
        stopping: Callable[[], bool],
    ) -> None:
        self._frame = frame
        self._visitor_of = visitor_of
        self._still_valid = still_valid
        self._stopping = stopping
        self._streams: Counter[str] = Counter()
        # Text of the strip by audience, and the second in which it was rendered.
        self._rendered: dict[bool, tuple[int, str]] = {}

    async def admin(self, request: web.Request) -> web.StreamResponse:
        return await self._stream(request, is_tenants=False)

    async def console(self, request: web.Request) -> web.StreamResponse:
        return await self._stream(request, is_tenants=True)

    async def _stream(self, request: web.Request, *, is_tenants: bool) -> web.StreamResponse:
        """Send events until the client leaves or the session ends. Raises TooManyStreams."""
        visitor = self._visitor_of(request)
        with self._counted(visitor):
            response = web.StreamResponse(headers=HEADERS)
            try:
                await response.prepare(request)
                if request.method == "HEAD":
                    # A client would take a body after HEAD for the connection's next answer.
                    return response
                async for event in self._events(request, visitor.expires_at, is_tenants=is_tenants):
                    await response.write(event)
            except (ClientConnectionResetError, ConnectionResetError):
                pass
            return response

    async def _events(self, request: web.Request, expires_at: datetime, *, is_tenants: bool) -> AsyncIterator[bytes]:
        sent, turn = "", 0
        while not self._stopping() and datetime.now(UTC) < expires_at:
            if turn % CHECK_SECONDS == 0 and turn and not await self._holds(request):
                yield encode("end", SESSION)
                return
            strip = self._strip(is_tenants=is_tenants)
            if strip != sent:
                yield encode("strip", strip)
                sent = strip
            if turn % TICK_SECONDS == 0:
                yield encode("tick", str(turn))
            turn += 1
            await asyncio.sleep(SECOND)
        # Without this event the browser would open the stream again. With SESSION the page says that the session ended;
        # otherwise the gateway stops, and the page opens the stream of another one later.
        yield encode("end", "" if self._stopping() else SESSION)

    async def _holds(self, request: web.Request) -> bool:
        try:
            return await self._still_valid(request)
        except Unavailable:
            # The page must stay current during the outage; the next check decides.
            return True

    def _strip(self, *, is_tenants: bool) -> str:
        second = int(time.monotonic())
        at, text = self._rendered.get(is_tenants, (-1, ""))
        if at != second:
            text = self._frame.strip_html(is_tenants=is_tenants)
            self._rendered[is_tenants] = second, text
        return text

    @contextmanager
    def _counted(self, visitor: Any) -> Any:
        """Count a stream while it is open. Raises TooManyStreams."""
        limits = {f"session {visitor.session_id}": MAX_OF_SESSION}
        if visitor.tenant is None:
            limits[OPERATORS] = MAX_OF_OPERATORS
        else:
            limits |= {f"tenant {visitor.tenant.id}": MAX_OF_TENANT, TENANTS: MAX_OF_TENANTS}
        if any(self._streams[name] >= limit for name, limit in limits.items()):
            raise TooManyStreams
        self._streams.update(limits.keys())
        try:
            yield
        finally:
            self._streams.subtract(limits.keys())
            self._streams += Counter()


def encode(name: str, data: str) -> bytes:
    """Return an event in the form of the HTML standard: one `data:` line for each line of the text."""
    lines = "".join(f"data: {line}\n" for line in data.splitlines() or [""])
    return f"event: {name}\n{lines}\n".encode()
