"""Parser of multipart/form-data with bounded memory: part by part, keeping a single chunk.

aiohttp's reader takes a preamble line by line without ever leaving the event loop, and reports broken forms by a dozen
kinds of exceptions. Here a form has to begin with its boundary, and every fault is a FormError.
"""

from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import parse_content_disposition

MAX_BOUNDARY_CHARS = 70
MAX_HEADER_BYTES = 8192
_PLAIN_ENCODINGS = ("", "binary", "8bit", "7bit")


class FormError(ValueError):
    """The form is malformed; the message says how."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """name: the form's field. filename: None for a part that is no file."""

    name: str
    filename: str | None


class Form:
    """A form that is parsed as its bytes arrive. receive: returns the next bytes, b"" at the end."""

    def __init__(self, boundary: str, receive: Callable[[], Awaitable[bytes]]) -> None:
        if not 0 < len(boundary) <= MAX_BOUNDARY_CHARS or not boundary.isascii() or not boundary.isprintable():
            raise FormError(f"expected a boundary of 1 to {MAX_BOUNDARY_CHARS} characters")
        self._delimiter = b"\r\n--" + boundary.encode()
        self._receive = receive
        # The first boundary follows no line.
        self._buffer = bytearray(b"\r\n")
        self._in_part = False

    async def next(self) -> Part | None:
        """Return the next part, None after the last. Raises FormError, and the errors of `receive`."""
        while self._in_part:
            await self.read()
        length = len(self._delimiter)
        await self._fill(length + 2)
        if not self._buffer.startswith(self._delimiter):
            raise FormError("expected the boundary at the form's beginning")
        behind = bytes(self._buffer[length : length + 2])
        del self._buffer[: length + 2]
        if behind == b"--":
            return None
        if behind != b"\r\n":
            raise FormError("expected a line's end after a boundary")
        part = _part(await self._headers())
        self._in_part = True
        return part

    async def read(self) -> bytes:
        """Return a piece of the part's content, b"" at its end. Raises FormError if the form ends before."""
        while True:
            at = self._buffer.find(self._delimiter)
            if at == 0:
                self._in_part = False
                return b""
            ready = at if at > 0 else len(self._buffer) - len(self._delimiter) + 1
            if ready > 0:
                piece = bytes(self._buffer[:ready])
                del self._buffer[:ready]
                return piece
            await self._more()

    async def _headers(self) -> list[bytes]:
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            if len(self._buffer) > MAX_HEADER_BYTES:
                break
            await self._more()
        if not 0 <= end <= MAX_HEADER_BYTES:
            raise FormError(f"a part's headers have more than {MAX_HEADER_BYTES} bytes")
        lines = bytes(self._buffer[:end]).split(b"\r\n")
        del self._buffer[: end + 4]
        return lines

    async def _fill(self, size: int) -> None:
        while len(self._buffer) < size:
            await self._more()

    async def _more(self) -> None:
        received = await self._receive()
        if not received:
            raise FormError("the form ends before its last boundary")
        self._buffer += received


def _part(lines: list[bytes]) -> Part:
    headers = {}
    for line in lines:
        key, colon, value = line.decode("utf-8", "replace").partition(":")
        if not colon:
            raise FormError("a part has a header without a colon")
        headers[key.strip().lower()] = value.strip()
    if headers.get("content-transfer-encoding", "").lower() not in _PLAIN_ENCODINGS:
        raise FormError("a part has a Content-Transfer-Encoding; expected raw bytes")
    kind, parameters = parse_content_disposition(headers.get("content-disposition"))
    if kind != "form-data" or not parameters.get("name"):
        raise FormError("a part has no Content-Disposition: form-data with a name")
    return Part(name=parameters["name"], filename=parameters.get("filename") or parameters.get("filename*"))
