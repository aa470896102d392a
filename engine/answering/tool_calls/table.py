"""The formats of tool calls by the name in `--tool-call-parser`. The first one that a chat template matches applies."""

from engine.answering.tool_calls.format import ToolFormat
from engine.answering.tool_calls.hermes import Hermes
from engine.answering.tool_calls.llama3 import Llama3
from engine.config import ToolFormatName

FORMATS: dict[ToolFormatName, ToolFormat] = {"hermes": Hermes(), "llama3_json": Llama3()}


def format_of(template: str | None) -> ToolFormat | None:
    """Return the format that a chat template asks the model for; None if it is none of them."""
    if template is None:
        return None
    return next((form for form in FORMATS.values() if form.matches(template)), None)
