"""The fields of a chat request besides sampling, in the form that chat templates take: messages, tools, tool choice."""

from typing import Annotated, Any, Literal, NamedTuple, Protocol

import msgspec
from msgspec import Meta, Struct

from wire.errors import BadRequest

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_TOOLS = 128
# Keys refused in `chat_template_kwargs`: the request has its own field for them, or they are not served.
TEMPLATE_OWN = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template")
# Suffix of the variables for the model's special tokens, such as `eos_token`; templates write them once per message.
TEMPLATE_TOKENS = "_token"
# Limits of the values that templates write as JSON: nesting depth of lists and objects, and total bytes.
MAX_DEPTH, MAX_KWARGS_BYTES, MAX_TOOLS_BYTES = 64, 2**14, 2**20

FunctionName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$(?!\n)")]


class FunctionDefinition(Struct, omit_defaults=True):
    """A function that the model may call; `parameters` is a JSON schema of the arguments."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Struct):
    name: str


class NamedTool(Struct):
    """The form of `tool_choice` that requires a call of this one function."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


class FunctionCall(Struct):
    """A call made by the assistant; `arguments` is a JSON object, either as text (the API's form) or as an object."""

    name: str
    arguments: str | dict[str, Any]


class ToolCall(Struct, omit_defaults=True):
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] | None = None


class ContentPart(Struct):
    type: str
    text: str | None = None


class Message(Struct):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    def check(self, at: str) -> None:
        if self.role not in ROLES:
            raise BadRequest(f"{at}.role", f"{at}.role: expected one of {', '.join(ROLES)}, got {self.role[:40]!r}.")
        if self.content is None and not self.tool_calls:
            raise BadRequest(f"{at}.content", f"{at}.content: expected a string or a list of text parts.")
        for i, part in enumerate(self.content if isinstance(self.content, list) else ()):
            if part.type != "text":
                where = f"{at}.content[{i}].type"
                raise BadRequest(where, f"{where}: expected 'text', the only kind of content that is served.")
            if part.text is None:
                raise BadRequest(f"{at}.content[{i}].text", f"{at}.content[{i}].text: is required.")
        if self.tool_calls and self.role != "assistant":
            raise BadRequest(f"{at}.tool_calls", f"{at}.tool_calls: only the assistant calls tools.")
        if self.tool_call_id is not None and self.role != "tool":
            raise BadRequest(f"{at}.tool_call_id", f"{at}.tool_call_id: only a tool's message answers a call.")
        for i, call in enumerate(self.tool_calls or ()):
            where = f"{at}.tool_calls[{i}].function.arguments"
            arguments = _parsed_arguments(call.function.arguments, where)
            check_size(arguments, where, MAX_TOOLS_BYTES)
            check_depth(arguments, where)

    def as_template_input(self) -> dict[str, Any]:
        """Return the message as chat templates expect it, with its content as one string."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join(part.text or "" for part in content)
        # OpenAI's newer name for the system role; the templates of open models do not have it.
        role = "system" if self.role == "developer" else self.role
        message: dict[str, Any] = {"role": role, "content": content or ""}
        for key in ("name", "tool_call_id"):
            if getattr(self, key) is not None:
                message[key] = getattr(self, key)
        if self.tool_calls:
            message["tool_calls"] = [_call_as_template_input(call) for call in self.tool_calls]
        return message


class Conversation(NamedTuple):
    """The arguments of `Tokenizer.encode_chat`, in order. template_kwargs: extra variables of the template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    template_kwargs: dict[str, Any]


class TemplateFields(Protocol):
    """The request fields that control how its conversation is rendered. None means not given."""

    @property
    def messages(self) -> list[Message] | None: ...

    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None


def check_template_fields(request: TemplateFields) -> None:
    """Check the fields that control rendering. Raises BadRequest."""
    check_template_kwargs(request.chat_template_kwargs or {})
    if not request.continue_final_message:
        return
    field = "continue_final_message"
    if request.add_generation_prompt:
        raise BadRequest(field, f"{field}: cannot be combined with add_generation_prompt.")
    if not (request.messages or [])[-1].content:
        raise BadRequest(field, f"{field}: expected content in the last message.")


def check_template_kwargs(kwargs: dict[str, Any]) -> None:
    """Check the keys, size and depth of `chat_template_kwargs`. Raises BadRequest."""
    field = "chat_template_kwargs"
    for key in kwargs:
        if key in TEMPLATE_OWN or key.startswith("_") or key.endswith(TEMPLATE_TOKENS):
            raise BadRequest(field, f"{field}: {key[:64]} is not allowed here.")
    check_size(kwargs, field, MAX_KWARGS_BYTES)
    check_depth(kwargs, field)


def check_size(value: Any, at: str, max_bytes: int) -> None:
    """Raise BadRequest for a value of more than `max_bytes` bytes as JSON."""
    size = len(msgspec.json.encode(value))
    if size > max_bytes:
        raise BadRequest(at, f"{at}: expected at most {max_bytes} bytes as JSON, got {size}.")


def check_depth(value: Any, at: str) -> None:
    """Raise BadRequest for a value whose lists and objects are nested more than MAX_DEPTH deep."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [each for values in inner for each in values if isinstance(each, dict | list)]
        if not level:
            return
    raise BadRequest(at, f"{at}: expected lists and objects nested at most {MAX_DEPTH} deep.")


def conversation_of(request: TemplateFields, tools: list[Tool] | None) -> Conversation:
    return Conversation(
        messages=[message.as_template_input() for message in request.messages or ()],
        tools=tools_as_template_input(tools),
        add_generation_prompt=request.add_generation_prompt is not False and not request.continue_final_message,
        continue_final_message=bool(request.continue_final_message),
        template_kwargs=request.chat_template_kwargs or {},
    )


def check_messages(messages: list[Message]) -> None:
    if not messages:
        raise BadRequest("messages", "messages: expected at least one message.")
    for i, message in enumerate(messages):
        message.check(f"messages[{i}]")


def check_tools(tools: list[Tool], choice: ToolChoice | None) -> None:
    check_size(tools, "tools", MAX_TOOLS_BYTES)
    for i, tool in enumerate(tools):
        check_depth(tool.function.parameters, f"tools[{i}].function.parameters")
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRequest("tools", f"tools: expected one function of each name, got two named {twice}.")
    if choice in (None, "none", "auto"):
        return
    if not tools:
        raise BadRequest("tool_choice", "tool_choice: expected only with tools.")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise BadRequest("tool_choice", f"tool_choice: no function named {choice.function.name[:64]!r} is among tools.")


def tools_as_template_input(tools: list[Tool] | None) -> list[dict[str, Any]] | None:
    """Return the tools as dictionaries, or None for an empty list, because templates test whether tools are present."""
    return [msgspec.to_builtins(tool) for tool in tools] if tools else None


def _call_as_template_input(call: ToolCall) -> dict[str, Any]:
    """Return a call with its arguments as an object, as templates expect; the API carries them as a JSON string."""
    function = {"name": call.function.name, "arguments": _parsed_arguments(call.function.arguments, "messages")}
    known = {"id": call.id} if call.id is not None else {}
    return {**known, "type": "function", "function": function}


def _parsed_arguments(arguments: str | dict[str, Any], at: str) -> dict[str, Any]:
    if isinstance(arguments, dict):
        return arguments
    try:
        # Some clients send an empty string for a function without parameters.
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        raise BadRequest(at, f"{at}: expected a JSON object, as text.") from None
