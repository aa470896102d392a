"""Checks of request heads that aiohttp 3.14 handles badly, and `100 Continue` after authentication.

A URL with an invalid host raises before aiohttp creates the request, so its connection stays open for ever without an
answer. An unknown `Expect` raises before the application's middlewares run. aiohttp sends `100 Continue` before the
client is authenticated. `guard_requests` removes all three from a request before aiohttp sees them.

The error of a parser quotes up to 64 KiB of the client's bytes, and its traceback refers to frames that refer to the
error. Such a cycle stays until the next full garbage collection: 350 KB for each connection, 380 MiB in six seconds.
`guard_requests` gives each connection a parser whose errors are short and have no traceback.
"""

from collections.abc import Sequence
from typing import Any

from aiohttp import HttpVersion11, hdrs, web
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import BadHttpMessage, BadHttpMethod, HttpProcessingError
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.web_protocol import _ErrInfo
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_NOWHERE = URL("/")
# Limit of an error's message in characters. The rest of it would quote the client.
_MESSAGE_CHARS = 80
_HAS_BAD_URL = web.RequestKey("has_bad_url", bool)
_HAS_UNKNOWN_EXPECT = web.RequestKey("has_unknown_expect", bool)
_AWAITS_CONTINUE = web.RequestKey("awaits_continue", bool)


class BadHead(ValueError):
    """A request head that is not served. status: status of the answer; the message goes to the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class _Parser:
    """A connection's parser that returns the answer to what is no HTTP, and takes nothing more after that."""

    def __init__(self, parser: Any) -> None:
        self._parser = parser
        self._has_failed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)

    def feed_data(self, data: bytes) -> tuple[Sequence[Any], bool, bytes]:
        if self._has_failed:
            return (), False, b""
        try:
            return self._parser.feed_data(data)
        except HttpProcessingError as error:
            self._has_failed = True
            message = error.message.partition("\n")[0][:_MESSAGE_CHARS].rstrip(": ") + "."
            # aiohttp logs a wrong method at a lower level, because it is common.
            short = BadHttpMethod() if isinstance(error, BadHttpMethod) else BadHttpMessage(message)
            short.message = message
            return [(_ErrInfo(status=400, exc=short, message=message), EMPTY_PAYLOAD)], False, b""


def guard_requests(runner: web.BaseRunner) -> None:
    """Install head checks and short errors in a runner that has been set up; `check_head` then reports a bad head."""
    server = runner.server
    assert server is not None
    make, made = server.request_factory, server.connection_made

    def connection_made(handler: Any, transport: Any) -> None:
        handler._parser = _Parser(handler._parser)
        made(handler, transport)

    def make_request(message: RawRequestMessage, *connection: Any) -> web.BaseRequest:
        expect = message.headers.get(hdrs.EXPECT) if message.version == HttpVersion11 else None
        if expect is not None:
            headers = CIMultiDict(message.headers)
            headers.popall(hdrs.EXPECT)
            message = message._replace(headers=CIMultiDictProxy(headers))
        try:
            request = make(message, *connection)
        except ValueError:
            request = make(message._replace(url=_NOWHERE, path="/", should_close=True), *connection)
            request[_HAS_BAD_URL] = True
        if expect is not None:
            is_continue = expect.lower() == "100-continue"
            request[_AWAITS_CONTINUE if is_continue else _HAS_UNKNOWN_EXPECT] = True
        return request

    server.request_factory = make_request
    server.connection_made = connection_made  # type: ignore[method-assign]


def has_bad_head(request: web.BaseRequest) -> bool:
    """Return whether `check_head` raises."""
    return request.get(_HAS_BAD_URL, False) or request.get(_HAS_UNKNOWN_EXPECT, False)


def check_head(request: web.BaseRequest) -> None:
    """Raise BadHead for an invalid host or an unknown `Expect`."""
    if request.get(_HAS_BAD_URL, False):
        raise BadHead(400, "The host in the request's URL is not a valid host name.")
    if request.get(_HAS_UNKNOWN_EXPECT, False):
        raise BadHead(417, "The request's Expect is unknown; expected 100-continue.")


async def send_continue(request: web.BaseRequest) -> None:
    """Send `100 Continue` if the client waits for it. Call it before reading the first byte of the body."""
    if request.get(_AWAITS_CONTINUE, False):
        request[_AWAITS_CONTINUE] = False
        await request.writer.write(CONTINUE)
        # aiohttp does the same: the answer itself has not begun.
        request.writer.output_size = 0
