"""Time-limited writes of answers, and reports: token counts that precede a complete answer while it is generated.

A report is a response of type `REPORT_TYPE`, used between gateway and engine only: lines of JSON with the tokens so
far, then a line with the head of the answer, then the answer's bytes. A request whose allowance suffices has no report,
and its answer is plain.
"""

import asyncio
import logging
import time

import msgspec
from aiohttp import web

from engine.answering.sequence_group import SequenceGroup
from wire.responses import ASK_TOKENS, REPORT_TYPE, AnswerHead, ReportLine

logger = logging.getLogger(__name__)

# Time limit for a client to receive a piece. A slower client is disconnected, because it holds a place and memory.
WRITE_SECONDS = 30.0
# The same for a gateway, which waits for its own client and cuts it off by a rule of its own. A gateway stops reading
# at 1 MiB unread (LORAPLEX_READER_BUFFER_BYTES) and reads again once a quarter is left. A client that it does not cut
# off reads 1 KiB/s (LORAPLEX_MIN_READ_RATE), so that takes at most 768 s.
GATEWAY_WRITE_SECONDS = 900.0
PIECE_BYTES = 64 << 10
# Unread bytes up to which a write returns at once: less than the event loop's limit of 64 KiB, HTTP's framing included.
UNREAD_BYTES = 48 << 10
# Maximum seconds between two counts of a request, because the use that they report decays.
REPORT_SECONDS = 5.0


class Report:
    """The report of one request."""

    def __init__(self, request: web.Request, group: SequenceGroup) -> None:
        self._request = request
        self._group = group
        self._response: web.StreamResponse | None = None
        self._reported_at = time.monotonic()
        self._reported = 0

    @property
    def is_open(self) -> bool:
        """Return whether a line was written, so that the answer must end the report."""
        return self._response is not None

    async def update(self) -> None:
        """Write the tokens so far if the allowance is nearly used or the last count is old."""
        left, now = self._group.left, time.monotonic()
        if left is None or (left >= ASK_TOKENS * self._group.choices and now - self._reported_at < REPORT_SECONDS):
            return
        tokens = self._group.total_generated
        if tokens > self._reported:
            self._reported, self._reported_at = tokens, now
            await self._write(_line(ReportLine(tokens)))

    async def end(self, head: AnswerHead, body: bytes | bytearray) -> web.StreamResponse:
        """Write the answer and end the response."""
        head.length = len(body)
        response = await self._write(_line(ReportLine(self._group.total_generated, head)) + body)
        try:
            await response.write_eof()
        except ConnectionError:
            return response
        return response

    async def _write(self, data: bytes) -> web.StreamResponse:
        response = self._response
        try:
            if response is None:
                response = self._response = web.StreamResponse(headers={"Content-Type": REPORT_TYPE})
                await response.prepare(self._request)
            await write(self._request, response, data, internal=True)
        except ConnectionError:
            # The client left, so this handler is about to be cancelled.
            assert response is not None
        return response


async def write(
    request: web.Request, response: web.StreamResponse, payload: bytes | bytearray, *, internal: bool
) -> None:
    """Write in pieces, each within the time limit of the caller. Raises ConnectionError for one that is too slow.

    internal: the caller is a gateway.
    """
    transport = request.transport
    if transport is not None and transport.get_write_buffer_size() + len(payload) <= UNREAD_BYTES:
        # The usual event of a stream: the buffer has room for it, so the write does not wait and needs no timer.
        await response.write(payload)
        return
    seconds = GATEWAY_WRITE_SECONDS if internal else WRITE_SECONDS
    for start in range(0, len(payload), PIECE_BYTES):
        try:
            async with asyncio.timeout(seconds):
                await response.write(payload[start : start + PIECE_BYTES])
        except TimeoutError:
            logger.info("cut off a client that read too little of its answer within %g s", seconds)
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionAbortedError("the client reads too slowly") from None


def _line(line: ReportLine) -> bytes:
    return msgspec.json.encode(line) + b"\n"
