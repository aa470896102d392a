"""Writing answers in time, and the report of a whole answer while it runs, a form between gateway and engine only.

A report is a response of `REPORT_TYPE`: lines of JSON with the tokens so far, then a line with the head of the answer,
then the answer's bytes. A request whose allowance lasts has none, and its answer is plain.
"""

import asyncio
import logging
import time

import msgspec
from aiohttp import web

from engine.answering.ticket import Generation
from wire.responses import ASK_TOKENS, REPORT_TYPE, AnswerHead, ReportLine

logger = logging.getLogger(__name__)

# A client that takes longer for a piece is cut off, because it holds its request's place and memory.
WRITE_SECONDS = 30.0
PIECE_BYTES = 64 << 10
# Seconds without a report after which the count is reported, because reported use decays.
REPORT_SECONDS = 5.0


class Report:
    """The report of one request."""

    def __init__(self, request: web.Request, generation: Generation) -> None:
        self._request = request
        self._generation = generation
        self._response: web.StreamResponse | None = None
        self._told_at = time.monotonic()
        self._told = 0

    @property
    def is_open(self) -> bool:
        """Return whether a line was written, so that the answer must be the report's."""
        return self._response is not None

    async def tell(self) -> None:
        """Write the tokens so far if the gateway needs to know them."""
        left, now = self._generation.left, time.monotonic()
        if left is None or (left >= ASK_TOKENS * self._generation.choices and now - self._told_at < REPORT_SECONDS):
            return
        tokens = self._generation.total_generated
        if tokens > self._told:
            self._told, self._told_at = tokens, now
            await self._write(_line(ReportLine(tokens)))

    async def end(self, head: AnswerHead, body: bytes) -> web.StreamResponse:
        """Write the answer."""
        head.length = len(body)
        response = await self._write(_line(ReportLine(self._generation.total_generated, head)) + body)
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
            await write(self._request, response, data)
        except ConnectionError:
            # The client left; this handler is cancelled at once.
            assert response is not None
        return response


async def write(request: web.Request, response: web.StreamResponse, payload: bytes) -> None:
    """Write in pieces, each within `WRITE_SECONDS`. Raises ConnectionError for a client that is too slow."""
    for start in range(0, len(payload), PIECE_BYTES):
        try:
            async with asyncio.timeout(WRITE_SECONDS):
                await response.write(payload[start : start + PIECE_BYTES])
        except TimeoutError:
            logger.info("a client was cut off: it read too little of its answer within %g s", WRITE_SECONDS)
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionAbortedError("the client reads too slowly") from None


def _line(line: ReportLine) -> bytes:
    return msgspec.json.encode(line) + b"\n"
