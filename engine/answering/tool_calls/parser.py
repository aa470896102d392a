"""The parser of tool calls that the formats share: content and calls, split as the text arrives.

Complete answers and streams use the same parser. Text that cannot be parsed as a call of one of the request's tools
stays content.
"""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, field

from engine.answering.tool_calls.scanner import CallScanner


@dataclass(slots=True)
class CallDelta:
    """The text that one call gained. Only the first delta of a call has `call_id` and `name`."""

    index: int
    arguments: str = ""
    call_id: str | None = None
    name: str | None = None


@dataclass(slots=True)
class Parsed:
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class ToolCallParser(ABC):
    """Parser that splits one choice's text into content and calls. Whitespace next to a call is dropped.

    opening: the text before a call; it becomes content if no call follows.
    """

    opening = ""

    def __init__(self, names: Collection[str], parallel: bool = True) -> None:
        """names: the request's functions. parallel: report all calls, not only the first."""
        self._names = frozenset(names)
        self._parallel = parallel
        self._in_call = False
        self._buffer = ""
        self._space = ""
        self._beside_call = False
        self._num_calls = 0
        self._scanner = CallScanner(self._names)
        self._current: CallDelta | None = None

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    def push(self, text: str) -> Parsed:
        parsed = Parsed()
        self._buffer += text
        while self._read_call(parsed) if self._in_call else self._read_text(parsed):
            pass
        return parsed

    def finish(self) -> Parsed:
        """Return the text held back, at the end of the text. A truncated call stays a call."""
        parsed = Parsed()
        if self._in_call and self._current is None:
            self._say(self.opening + self._scanner.raw, parsed)
        self._say(self._held_back(), parsed)
        self._buffer = ""
        if not self._beside_call:
            parsed.content += self._space
        return parsed

    @abstractmethod
    def _read_text(self, parsed: Parsed) -> bool:
        """Read text outside of calls, up to the next call (`_begin_call`). Return False if more text is needed."""

    @abstractmethod
    def _held_back(self) -> str:
        """Return the content in the buffer, at the end of the text."""

    def _end_call(self, is_call: bool) -> None:
        """Continue after an object. is_call: it was a call, and is no content."""
        self._in_call = False

    def _begin_call(self, rest: str) -> None:
        self._buffer = rest
        self._in_call = True
        self._scanner = CallScanner(self._names)
        self._current = None

    def _read_call(self, parsed: Parsed) -> bool:
        scanner = self._scanner
        pieces, self._buffer = scanner.push(self._buffer)
        if scanner.name is not None and (pieces or scanner.state == "done"):
            self._take(pieces, parsed)
        if scanner.state == "open":
            return False
        if scanner.state == "bad":
            self._say(self.opening + scanner.raw, parsed)
        self._end_call(scanner.state == "done")
        return True

    def _take(self, arguments: str, parsed: Parsed) -> None:
        if self._current is None:
            self._current = CallDelta(self._num_calls, arguments, f"call_{uuid.uuid4().hex[:24]}", self._scanner.name)
            self._num_calls += 1
            self._beside_call, self._space = True, ""
            delta = self._current
        else:
            delta = CallDelta(self._current.index, arguments)
        if (self._parallel or delta.index == 0) and (arguments or delta.name is not None):
            parsed.calls.append(delta)

    def _say(self, text: str, parsed: Parsed) -> None:
        """Append content, and hold back trailing whitespace, which is dropped if a call follows."""
        text = text.lstrip() if self._beside_call else self._space + text
        if not text:
            return
        said = text.rstrip()
        self._beside_call = self._beside_call and not said
        self._space = text[len(said) :]
        parsed.content += said
