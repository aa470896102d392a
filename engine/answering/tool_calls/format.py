"""The interface of a format of tool calls, and the grammar that the formats share."""

import json
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass

from engine.answering.tool_calls.parser import ToolCallParser
from engine.structured.compiler import WHITESPACE
from wire.chat import NamedTool, Tool, ToolChoice
from wire.errors import BadRequest
from wire.structured import MAX_SPEC_BYTES, GrammarSpec


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """The text of calls. `opening` and `closing` surround each call, `between` separates two; `arguments` is its
    arguments' JSON key.
    """

    opening: str
    closing: str
    arguments: str
    between: str


class ToolFormat(ABC):
    """A format of tool calls. markers: texts that the parser reads and that may be special tokens."""

    markers: tuple[str, ...]
    syntax: CallSyntax

    @abstractmethod
    def matches(self, template: str) -> bool:
        """Return whether a chat template asks the model for this format."""

    @abstractmethod
    def parser(self, names: Collection[str], parallel: bool = True) -> ToolCallParser:
        """Return the parser of one choice. names: the request's functions. parallel: report all calls, not only the
        first.
        """

    def grammar(self, tools: list[Tool], choice: ToolChoice | None, parallel: bool) -> GrammarSpec:
        """Return the grammar of an answer that consists of calls only: any calls ("required"), or one call of the named
        function.

        Raises BadRequest for tools too large for a grammar.
        """
        syntax, named = self.syntax, isinstance(choice, NamedTool)
        if isinstance(choice, NamedTool):
            tools = [tool for tool in tools if tool.function.name == choice.function.name]
        more = f" ({_quoted(syntax.between)} call)*" if parallel and not named else ""
        rules = [f"start: call{more}", "call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
        for i, tool in enumerate(tools):
            # Each schema is the root of its own rule, so that its references resolve.
            before = f'{syntax.opening}{{"name": "{tool.function.name}", "{syntax.arguments}": '
            rules.append(f"call_{i}: {_quoted(before)} arguments_{i} {_quoted('}' + syntax.closing)}")
            rules.append(f"arguments_{i}: %json {_schema(tool)}")
        text = "\n".join(rules) + "\n"
        if len(text) > MAX_SPEC_BYTES:
            raise BadRequest("tools", f"tools: expected schemas of at most {MAX_SPEC_BYTES} bytes together.")
        return GrammarSpec("grammar", text, param="tools")


def _schema(tool: Tool) -> str:
    # The options come last, so that the schema cannot override them. They ignore unknown keywords and bound whitespace.
    options = {"x-guidance": {"lenient": True, "whitespace_flexible": True, "whitespace_pattern": WHITESPACE}}
    try:
        return json.dumps({**(tool.function.parameters or {}), "type": "object", **options})
    except RecursionError:
        raise BadRequest("tools", "tools: the parameters are nested too deeply.") from None


def _quoted(text: str) -> str:
    return json.dumps(text)
