"""Fields of a large JSON object, found in pieces, so that other requests run in between.

A decoder takes 2 ms a MiB and holds the interpreter lock throughout, on a thread too. Here each piece takes some tenths
of a millisecond, because the values are not decoded: brackets that end in their piece cancel each other out, and a
piece is read closely only where a field of interest begins or ends.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable

import msgspec
from msgspec import Raw

# Bytes of a large answer that are received or scanned in one iteration of the event loop, in 0.1 to 0.5 ms; up to twice
# as many are sent. The scanner reads smaller parts of them closely.
PIECE_BYTES, PART_BYTES = 2**16, 2**11
# Passes over a piece's brackets, each of which removes the innermost pairs. A piece with more levels is read closely.
MAX_PASSES = 16
# The field whose elements' fields are found too, and the depth of these.
LISTED, LISTED_DEPTH = "choices", 3

BeforePiece = Callable[[], Awaitable[None]]
"""Awaited before each piece. It ends in an iteration of the event loop in which the piece may be handled."""

_OTHER = bytes(set(range(256)) - set(b'"[]{}'))
_TOKEN = re.compile(rb'"[^"]*"?|[]\[{}:,]')
_QUOTE, _COLON, _COMMA = b'":,'
_OPENING, _CLOSING, _BLANK = b"{[", b"}]", b" \t\r\n"
_name = msgspec.json.Decoder(str)


class LargeObject(dict[str, Raw]):
    """Fields of an object as JSON texts. elements: the fields of each object in the list `choices`."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[dict[str, Raw]] = []


async def yield_once() -> None:
    """Let other tasks run once."""
    await asyncio.sleep(0)


async def read_object(text: bytes | bytearray, before_piece: BeforePiece = yield_once) -> LargeObject:
    """Return the fields of a JSON object. Values are not checked beyond the ends of their strings and brackets.

    Raises msgspec.DecodeError.
    """
    scanner, at = _Scanner(text), 0
    while at < len(text):
        await before_piece()
        at = scanner.read_piece(at)
    return scanner.end()


class _Scanner:
    """State between two pieces: the depth, whether a string is open, and for each depth the last name and separator."""

    def __init__(self, text: bytes | bytearray) -> None:
        self.found = LargeObject()
        self._text = memoryview(text)
        self._depth, self._in_string, self._end = 0, False, 0
        self._names: list[str | None] = [None] * (LISTED_DEPTH + 1)
        self._starts = [0] * (LISTED_DEPTH + 1)

    @property
    def _most(self) -> int:
        """Return the depth of the fields of interest at this place."""
        return LISTED_DEPTH if self._names[1] == LISTED else 1

    def read_piece(self, start: int) -> int:
        """Read a piece and return its end."""
        piece = self._plain(start, PIECE_BYTES)
        end = start + len(piece)
        if not self._skip(piece):
            at = start
            while at < end:
                part = self._plain(at, min(PART_BYTES, end - at))
                if not self._skip(part):
                    self._read_closely(part, at)
                at += len(part)
        return end

    def end(self) -> LargeObject:
        if self._depth or self._in_string or not self._end or bytes(self._text[self._end :]).strip(_BLANK):
            raise msgspec.DecodeError("the object does not end")
        return self.found

    def _plain(self, start: int, size: int) -> bytes:
        """Return a piece of the same length as the text's, without escapes. An escape is never cut in two."""
        piece = bytes(self._text[start : start + size])
        if b"\\" not in piece:
            return piece
        is_cut = (len(piece) - len(piece.rstrip(b"\\"))) % 2 == 1
        if is_cut and len(piece) > 1:
            piece = piece[:-1]
        return piece.replace(rb"\\", b"__").replace(rb"\"", b"__")

    def _skip(self, piece: bytes) -> bool:
        """Pass over a piece without fields of interest. Returns False if it may have some."""
        if self._in_string and b'"' not in piece:
            return True
        if self._depth <= self._most:
            return False
        outline = (b'"' if self._in_string else b"") + piece.translate(None, _OTHER)
        # Two adjacent quotes have no bracket between them, in a string or outside.
        parts = outline.replace(b'""', b"").split(b'"')
        brackets = b"".join(parts[::2])
        for _ in range(MAX_PASSES):
            fewer = brackets.replace(b"{}", b"").replace(b"[]", b"")
            if len(fewer) == len(brackets):
                break
            brackets = fewer
        else:
            return False
        opened = brackets.lstrip(_CLOSING)
        closed = len(brackets) - len(opened)
        if opened.strip(_OPENING) or self._depth - closed <= self._most:
            return False
        self._depth += len(opened) - closed
        self._in_string = len(parts) % 2 == 0
        return True

    def _read_closely(self, part: bytes, start: int) -> None:
        at = 0
        if self._in_string:
            at = part.index(b'"') + 1
            self._in_string = False
        for token in _TOKEN.finditer(part, at):
            char, place = part[token.start()], start + token.start()
            if char == _QUOTE:
                self._in_string = token.end() - token.start() == 1 or part[token.end() - 1] != _QUOTE
                continue
            if char in _OPENING:
                self._depth += 1
            if self._depth <= self._most:
                self._note(char, place)
            if char in _CLOSING:
                self._depth -= 1

    def _note(self, char: int, place: int) -> None:
        """Note a bracket or separator of interest."""
        depth = self._depth
        brackets = b"[]" if depth == 2 else b"{}"
        if char in _OPENING:
            if char != brackets[0] or (depth == 1 and (self._end or self._value(0, place))):
                raise msgspec.DecodeError("the text is not an object")
            if depth == 2:
                self.found.elements.clear()
            elif depth == LISTED_DEPTH:
                self.found.elements.append({})
            self._names[depth] = None
        elif char == _COLON:
            if depth in (0, 2) or self._names[depth] is not None:
                raise msgspec.DecodeError("a name is missing")
            self._names[depth] = _name.decode(self._value(self._starts[depth], place))
        else:
            if not depth or char not in (_COMMA, brackets[1]):
                raise msgspec.DecodeError("a bracket is missing")
            self._end_value(self._value(self._starts[depth], place), is_last=char != _COMMA)
            if depth == 1 and char != _COMMA:
                self._end = place + 1
        self._starts[depth] = place + 1

    def _end_value(self, value: memoryview, *, is_last: bool) -> None:
        depth, name = self._depth, self._names[self._depth]
        self._names[depth] = None
        if depth == 2:
            is_object = value.nbytes > 0 and value[0] == _OPENING[0]
            is_empty_list = not value.nbytes and is_last and not self.found.elements
            if not (is_object or is_empty_list):
                raise msgspec.DecodeError(f"an element of {LISTED} is not an object")
            return
        fields = self.found if depth == 1 else self.found.elements[-1]
        if name is not None and value.nbytes:
            fields[name] = Raw(value)
        elif name is not None or value.nbytes or fields or not is_last:
            raise msgspec.DecodeError("a field has no name or no value")

    def _value(self, start: int, end: int) -> memoryview:
        """Return this part of the text without the blanks around it."""
        while start < end and self._text[start] in _BLANK:
            start += 1
        while start < end and self._text[end - 1] in _BLANK:
            end -= 1
        return self._text[start:end]
