"""Llama 3: `{"name": ..., "parameters": {...}}; ...`, the whole answer."""

from collections.abc import Collection

from engine.answering.tool_calls.format import CallSyntax, ToolFormat
from engine.answering.tool_calls.parser import Parsed, ToolCallParser

PYTHON_TAG = "<|python_tag|>"
# Characters that Llama writes between two calls.
BETWEEN = " \t\r\n;,"


class Llama3(ToolFormat):
    markers = (PYTHON_TAG,)
    syntax = CallSyntax("", "", "parameters", "; ")

    def matches(self, template: str) -> bool:
        return '"name": function name, "parameters":' in template or PYTHON_TAG in template

    def parser(self, names: Collection[str], parallel: bool = True) -> ToolCallParser:
        return Llama3Parser(names, parallel)


class Llama3Parser(ToolCallParser):
    def __init__(self, names: Collection[str], parallel: bool = True) -> None:
        super().__init__(names, parallel)
        # The rest of the answer is content.
        self._is_plain = False

    def _read_text(self, parsed: Parsed) -> bool:
        """Read text at a place where a call may begin. Anything but an object makes the rest of the answer content."""
        if self._is_plain:
            self._say(self._buffer, parsed)
            self._buffer = ""
            return False
        ahead = self._buffer.lstrip(BETWEEN if self._num_calls else None)
        ahead = ahead.removeprefix(PYTHON_TAG).lstrip()
        if not ahead or PYTHON_TAG.startswith(ahead):
            return False
        if ahead.startswith("{"):
            self._begin_call(ahead)
        else:
            self._is_plain = True
        return True

    def _end_call(self, is_call: bool) -> None:
        super()._end_call(is_call)
        self._is_plain = not is_call

    def _held_back(self) -> str:
        return self._buffer.lstrip(BETWEEN) if self.has_calls else self._buffer
