"""Parser of multipart/form-data with bounded memory: part by part, keeping a single chunk.

aiohttp's reader takes a preamble line by line without ever yielding to the event loop, and raises a dozen kinds of
exceptions for malformed forms. Here a form must begin with its boundary, and every fault is a FormError.
"""

import re
from collections.abc import Awaitable, Callable
from urllib.parse import unquote

import msgspec

MAX_BOUNDARY_CHARS = 70
MAX_HEADER_BYTES = 8192
# Control characters could forge lines wherever a name is printed.
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")
# A parameter of Content-Disposition: a token, or text in quotes, where a backslash escapes a quote or a backslash.
_PARAMETER = re.compile(r"""\s*;\s*([\w*.-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s";\\]+))""", re.ASCII)
_ESCAPED = re.compile(r'\\(["\\])')
_PLAIN_ENCODINGS = ("", "binary", "8bit", "7bit")


class FormError(ValueError):
    """The form is malformed. The message names the fault."""


class FormPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a form. name: the form's field. filename: None for a part that is not a file."""

    name: str
    filename: str | None


class Form:
    """A form that is parsed as its bytes arrive. receive: returns the next bytes, b"" at the end."""

    def __init__(self, boundary: str, receive: Callable[[], Awaitable[bytes]]) -> None:
        if not 0 < len(boundary) <= MAX_BOUNDARY_CHARS or not boundary.isascii() or not boundary.isprintable():
            raise FormError(f"expected a boundary of 1 to {MAX_BOUNDARY_CHARS} characters")
        self._delimiter = b"\r\n--" + boundary.encode()
        self._receive = receive
        # The first boundary has no line before it, so its line break is added here.
        self._buffer = bytearray(b"\r\n")
        self._in_part = False

    async def next(self) -> FormPart | None:
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
        part = _parse_part_headers(await self._headers())
        self._in_part = True
        return part

    async def read(self) -> bytes:
        """Return a piece of the part's content, b"" at its end. Raises FormError if the form ends before that."""
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


def _parse_part_headers(lines: list[bytes]) -> FormPart:
    headers = {}
    for line in lines:
        text = line.decode("utf-8", "replace")
        if _CONTROL.search(text):
            raise FormError("a part's headers have a control character")
        key, colon, value = text.partition(":")
        if not colon:
            raise FormError("a part has a header without a colon")
        headers[key.strip().lower()] = value.strip()
    if headers.get("content-transfer-encoding", "").lower() not in _PLAIN_ENCODINGS:
        raise FormError("a part has a Content-Transfer-Encoding; expected raw bytes")
    parameters = _parameters(headers.get("content-disposition", ""))
    if not parameters.get("name"):
        raise FormError("a part has no Content-Disposition: form-data with a name")
    return FormPart(
        name=parameters["name"], filename=parameters.get("filename") or _extended(parameters.get("filename*"))
    )


def _parameters(disposition: str) -> dict[str, str]:
    """Return the parameters of a part's Content-Disposition. Raises FormError.

    aiohttp's parser is not used, because it reports a malformed header by a Python warning, which prints the header and
    keeps it in memory forever.
    """
    kind, _, _ = disposition.partition(";")
    if kind.strip().lower() != "form-data":
        raise FormError("a part has no Content-Disposition: form-data with a name")
    parameters: dict[str, str] = {}
    at = len(kind)
    while found := _PARAMETER.match(disposition, at):
        name, quoted, token = found.groups()
        if name.lower() in parameters:
            raise FormError("a part's Content-Disposition has a parameter twice")
        parameters[name.lower()] = token if quoted is None else _ESCAPED.sub(r"\1", quoted)
        at = found.end()
    if disposition[at:].strip(" \t;"):
        raise FormError('a part\'s Content-Disposition is malformed: expected name=token or name="text" after each ;')
    return parameters


def _extended(value: str | None) -> str | None:
    """Return the file name from RFC 5987's form: a charset, a language, and percent-encoded bytes. Raises FormError."""
    if value is None:
        return None
    charset, _, rest = value.partition("'")
    _, quote, encoded = rest.partition("'")
    try:
        if not quote or charset.lower() != "utf-8":
            raise ValueError
        name = unquote(encoded, errors="strict")
    except ValueError:
        raise FormError("a part's filename* is malformed: expected UTF-8''name, percent-encoded") from None
    if _CONTROL.search(name):
        raise FormError("a part's filename* has a control character")
    return name
