"""Tool calls in a model's text: two formats, chosen by the chat template, parsed as the text arrives.

Complete answers and streams use the same parser. Text that cannot be parsed as a call of one of the request's tools
stays content. Formats: Hermes (Qwen, Hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, between other
text) and Llama 3 (`{"name": ..., "parameters": {...}}; ...`, the whole answer).
"""

import json
import uuid
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from engine.answering.call_scanner import CallScanner
from engine.structured.compiler import WHITESPACE
from wire.chat import NamedTool, Tool, ToolChoice
from wire.errors import BadRequest
from wire.structured import MAX_SPEC_BYTES, GrammarSpec

PYTHON_TAG = "<|python_tag|>"
# Characters that Llama writes between two calls.
BETWEEN = " \t\r\n;,"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format of tool calls. `opening` and `closing` surround each call; `arguments` is its arguments' JSON key."""

    name: Literal["hermes", "llama3_json"]
    opening: str
    closing: str
    arguments: str
    markers: tuple[str, ...]
    between: str

    def grammar(self, tools: list[Tool], choice: ToolChoice | None, parallel: bool) -> GrammarSpec:
        """Return the grammar of an answer that consists of calls only: any calls ("required"), or one call of the named
        function.

        Raises BadRequest for tools too large for a grammar.
        """
        named = isinstance(choice, NamedTool)
        if isinstance(choice, NamedTool):
            tools = [tool for tool in tools if tool.function.name == choice.function.name]
        more = f" ({_quoted(self.between)} call)*" if parallel and not named else ""
        rules = [f"start: call{more}", "call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
        for i, tool in enumerate(tools):
            # Each schema is the root of its own rule, so that its references resolve.
            before = f'{self.opening}{{"name": "{tool.function.name}", "{self.arguments}": '
            rules.append(f"call_{i}: {_quoted(before)} arguments_{i} {_quoted('}' + self.closing)}")
            rules.append(f"arguments_{i}: %json {_schema(tool)}")
        text = "\n".join(rules) + "\n"
        if len(text) > MAX_SPEC_BYTES:
            raise BadRequest("tools", f"tools: expected schemas of at most {MAX_SPEC_BYTES} bytes together")
        return GrammarSpec("grammar", text, param="tools")


HERMES = ToolFormat("hermes", "<tool_call>\n", "\n</tool_call>", "arguments", ("<tool_call>", "</tool_call>"), "\n")
LLAMA3_JSON = ToolFormat("llama3_json", "", "", "parameters", (PYTHON_TAG,), "; ")
FORMATS: dict[str, ToolFormat] = {form.name: form for form in (HERMES, LLAMA3_JSON)}


def format_of(template: str | None) -> ToolFormat | None:
    """Return the format that a chat template asks the model for; None if it is neither."""
    if template is None:
        return None
    if "<tool_call>" in template and "<function=" not in template:
        return HERMES
    if '"name": function name, "parameters":' in template or PYTHON_TAG in template:
        return LLAMA3_JSON
    return None


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


class ToolCallParser:
    """Parser that splits one choice's text into content and calls. Whitespace next to a call is dropped."""

    def __init__(self, form: ToolFormat, names: Collection[str], parallel: bool = True) -> None:
        """names: the request's functions. parallel: report all calls, not only the first."""
        self._names = frozenset(names)
        self._parallel = parallel
        self._open_tag, self._close_tag = form.markers if form is HERMES else ("", "")
        self._state: Literal["text", "call", "plain", "start"] = "text" if self._open_tag else "start"
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
        while self._advance(parsed):
            pass
        return parsed

    def finish(self) -> Parsed:
        """Return the text held back, at the end of the text. A truncated call stays a call."""
        parsed = Parsed()
        if self._state == "call" and self._current is None:
            self._say(self._open_tag + self._scanner.raw, parsed)
        rest = self._buffer
        if self._state == "start" and self._num_calls:
            rest = rest.lstrip(BETWEEN)
        elif self._beside_call and self._close_tag.startswith(rest.lstrip()):
            rest = ""
        self._say(rest, parsed)
        self._buffer = ""
        if not self._beside_call:
            parsed.content += self._space
        return parsed

    def _advance(self, parsed: Parsed) -> bool:
        """Take one step through the buffer. Return False if more text is needed."""
        match self._state:
            case "text":
                return self._read_text(parsed)
            case "start":
                return self._read_start(parsed)
            case "call":
                return self._read_call(parsed)
        self._say(self._buffer, parsed)
        self._buffer = ""
        return False

    def _read_text(self, parsed: Parsed) -> bool:
        """Read Hermes content up to an opening tag. A closing tag after a call is dropped."""
        if self._beside_call:
            self._buffer = self._buffer.lstrip()
            if self._buffer.startswith(self._close_tag):
                self._buffer = self._buffer[len(self._close_tag) :]
                return True
            if self._close_tag.startswith(self._buffer):
                return False
        before, tag, rest = self._buffer.partition(self._open_tag)
        if not tag:
            keep = max((n for n in range(len(self._open_tag)) if before.endswith(self._open_tag[:n])), default=0)
            self._say(before[: len(before) - keep], parsed)
            self._buffer = before[len(before) - keep :]
            return False
        self._say(before, parsed)
        self._begin_call(rest)
        return True

    def _read_start(self, parsed: Parsed) -> bool:
        """Read Llama 3 text at a place where a call may begin. Anything but an object makes the rest of the answer
        content.
        """
        ahead = self._buffer.lstrip(BETWEEN if self._num_calls else None)
        ahead = ahead.removeprefix(PYTHON_TAG).lstrip()
        if not ahead or PYTHON_TAG.startswith(ahead):
            return False
        if ahead.startswith("{"):
            self._begin_call(ahead)
        else:
            self._state = "plain"
        return True

    def _begin_call(self, rest: str) -> None:
        self._buffer = rest
        self._state = "call"
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
            self._say(self._open_tag + scanner.raw, parsed)
        self._state = "text" if self._open_tag else "start" if scanner.state == "done" else "plain"
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


def _schema(tool: Tool) -> str:
    # The options come last, so that the schema cannot override them. They ignore unknown keywords and bound whitespace.
    options = {"x-guidance": {"lenient": True, "whitespace_flexible": True, "whitespace_pattern": WHITESPACE}}
    try:
        return json.dumps({**(tool.function.parameters or {}), "type": "object", **options})
    except RecursionError:
        raise BadRequest("tools", "tools: the parameters are nested too deeply") from None


def _quoted(text: str) -> str:
    return json.dumps(text)
