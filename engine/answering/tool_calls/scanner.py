"""Scanner of one tool call, `{"name": "f", "arguments": {...}}`, as it arrives. Independent of the text around it."""

from collections.abc import Collection
from typing import Literal

import msgspec

ARGUMENTS = ("arguments", "parameters")
_SPACE = " \t\r\n"


class CallScanner:
    """Incremental scanner: `push` takes text and returns the arguments' text, once the object is certain to be a call.

    state: "open" until the object has ended ("done") or cannot be a call of `names` ("bad"). raw: all text of the
    object.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self.state: Literal["open", "done", "bad"] = "open"
        self.name: str | None = None
        # Texts are kept in pieces: appending to a long string copies all of it.
        self._raw: list[str] = []
        self._at: Literal["{", "key", ":", "value", "next"] = "{"
        self._key = ""
        self._token: list[str] = []  # the key or value being read
        self._depth = 0
        self._in_string = self._escaped = False
        self._held: str | None = None  # arguments that precede the name
        self._sent = self._streaming = False

    @property
    def raw(self) -> str:
        return "".join(self._raw)

    def push(self, text: str) -> tuple[str, str]:
        """Return the arguments' text that became certain, and the text after the object or after the character that
        broke it.
        """
        out: list[str] = []
        for i, char in enumerate(text):
            self._read(char, out)
            if self.state != "open":
                self._raw.append(text[: i + 1])
                return "".join(out), text[i + 1 :]
        self._raw.append(text)
        return "".join(out), ""

    def _read(self, char: str, out: list[str]) -> None:
        if self._token:
            self._continue(char, out)
        elif char in _SPACE:
            return
        elif self._at == "{" and char == "{":
            self._at = "key"
        elif self._at == "key" and char == '"':
            self._start(char)
        elif self._at == ":" and char == ":":
            self._at = "value"
        elif self._at == "value":
            self._begin_value(char, out)
        elif self._at == "next" and char == ",":
            self._at = "key"
        elif self._at == "next" and char == "}":
            self._end(out)
        else:
            self._fail()

    def _begin_value(self, char: str, out: list[str]) -> None:
        self._start(char)
        if self._is_arguments and char not in '{"n':
            self._fail()
        elif self._is_arguments and char == "{" and self.name is not None and not self._sent:
            self._sent = self._streaming = True
            out.append(char)

    def _start(self, char: str) -> None:
        self._token = [char]
        self._in_string, self._escaped = char == '"', False
        self._depth = 1 if char in "{[" else 0

    @property
    def _is_arguments(self) -> bool:
        return self._at == "value" and self._key in ARGUMENTS

    def _continue(self, char: str, out: list[str]) -> None:
        """Read one more character of a key or value. A number or word ends at the character after it."""
        if not (self._in_string or self._depth) and (char in _SPACE or char in ",}"):
            self._finish_value(out)
            if self.state == "open":
                self._read(char, out)
            return
        if self._streaming:
            out.append(char)
        else:
            self._token.append(char)
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        if not self._in_string and not self._depth and self._token[0] in '"{[':
            self._finish_value(out)

    def _finish_value(self, out: list[str]) -> None:
        token, streamed = "".join(self._token), self._streaming
        self._token, self._streaming = [], False
        if self._at == "key":
            self._key, self._at = self._text(token) or "", ":"
            return
        if self._key == "name" and self.name is None:
            self.name = self._text(token)
            if self.name not in self._names:
                self._fail()
        elif self._is_arguments and not streamed:
            self._held = self._as_object(token)
            if self._held is None:
                self._fail()
        self._at = "next"
        self._release(out)

    def _release(self, out: list[str]) -> None:
        if self.state == "open" and self.name is not None and self._held is not None and not self._sent:
            out.append(self._held)
            self._sent = True

    def _end(self, out: list[str]) -> None:
        if self.name is None:
            self._fail()
            return
        if not self._sent:
            out.append("{}")
        self.state = "done"

    def _fail(self) -> None:
        # A call whose first part was returned stays a call, even if it is malformed.
        self.state = "done" if self._sent else "bad"
        if self.state == "bad":
            self.name = None

    @staticmethod
    def _text(token: str) -> str | None:
        try:
            return msgspec.json.decode(token, type=str)
        except msgspec.DecodeError:
            return None

    def _as_object(self, token: str) -> str | None:
        """Return the arguments' JSON object: given as such, as null (`{}`), or as a string with the object's text.
        Return None for anything else.
        """
        text = self._text(token) if token[0] == '"' else "{}" if token == "null" else token
        return text if text is not None and text.startswith("{") else None
