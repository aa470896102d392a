"""Hermes (Qwen, Hermes): `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, between other text."""

from collections.abc import Collection

from engine.answering.tool_calls.format import CallSyntax, ToolFormat
from engine.answering.tool_calls.parser import Parsed, ToolCallParser

OPENING, CLOSING = "<tool_call>", "</tool_call>"


class Hermes(ToolFormat):
    markers = (OPENING, CLOSING)
    syntax = CallSyntax(f"{OPENING}\n", f"\n{CLOSING}", "arguments", "\n")

    def matches(self, template: str) -> bool:
        """Return whether the template has the tag, and not the calls in XML that newer Qwen models write in it."""
        return OPENING in template and "<function=" not in template

    def parser(self, names: Collection[str], parallel: bool = True) -> ToolCallParser:
        return HermesParser(names, parallel)


class HermesParser(ToolCallParser):
    opening = OPENING

    def _read_text(self, parsed: Parsed) -> bool:
        """Read content up to an opening tag. A closing tag after a call is dropped."""
        if self._beside_call:
            self._buffer = self._buffer.lstrip()
            if self._buffer.startswith(CLOSING):
                self._buffer = self._buffer[len(CLOSING) :]
                return True
            if CLOSING.startswith(self._buffer):
                return False
        before, tag, rest = self._buffer.partition(OPENING)
        if not tag:
            keep = max((n for n in range(len(OPENING)) if before.endswith(OPENING[:n])), default=0)
            self._say(before[: len(before) - keep], parsed)
            self._buffer = before[len(before) - keep :]
            return False
        self._say(before, parsed)
        self._begin_call(rest)
        return True

    def _held_back(self) -> str:
        return "" if self._beside_call and CLOSING.startswith(self._buffer.lstrip()) else self._buffer
