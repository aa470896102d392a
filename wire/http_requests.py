"""Checks of request heads that aiohttp 3.14 handles badly, and `100 Continue` after authentication.

A URL with an invalid host raises before aiohttp creates the request, so its connection stays open for ever without an
answer. An unknown `Expect` raises before the application's middlewares run. aiohttp sends `100 Continue` before the
client is authenticated. `guard_requests` removes all three from a request before aiohttp sees them.
"""

from typing import Any

from aiohttp import HttpVersion11, hdrs, web
from aiohttp.http import RawRequestMessage
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_NOWHERE = URL("/")
_HAS_BAD_URL = web.RequestKey("has_bad_url", bool)
_HAS_UNKNOWN_EXPECT = web.RequestKey("has_unknown_expect", bool)
_AWAITS_CONTINUE = web.RequestKey("awaits_continue", bool)


class BadHead(ValueError):
    """A request head that is not served. status: status of the answer; the message goes to the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def guard_requests(runner: web.BaseRunner) -> None:
    """Install head checks in a runner that has been set up; `check_head` then reports a bad head."""
    server = runner.server
    assert server is not None
    make = server.request_factory

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
