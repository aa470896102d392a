"""Heads of requests that aiohttp 3.14 leaves without an answer, and the 100 Continue that it sends too early.

A URL whose host is no host name raises before there is a request: its connection stays open for ever, unanswered.
An unknown `Expect` raises before the application's middlewares. `100 Continue` is sent before anything asks who the
client is. So `guard_requests` takes these from a request before aiohttp sees them.
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
    """The request's head is not served. status: the answer's; the message is for the client."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def guard_requests(runner: web.BaseRunner) -> None:
    """Make the requests of a runner that is set up with checked heads; `check_head` then says what is wrong."""
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


def check_head(request: web.BaseRequest) -> None:
    """Raises BadHead."""
    if request.get(_HAS_BAD_URL, False):
        raise BadHead(400, "The host in the request's URL is no host name.")
    if request.get(_HAS_UNKNOWN_EXPECT, False):
        raise BadHead(417, "The request's Expect is unknown; expected 100-continue.")


async def send_continue(request: web.BaseRequest) -> None:
    """Ask a client for the body that it holds back. For whoever reads the body, before its first byte."""
    if request.get(_AWAITS_CONTINUE, False):
        request[_AWAITS_CONTINUE] = False
        await request.writer.write(CONTINUE)
        # As aiohttp does: the answer itself has not begun.
        request.writer.output_size = 0
