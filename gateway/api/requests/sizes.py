"""Size limits of a request's fields besides its prompt, whose size the context limits.

Such fields are copied, encoded for the engine and sent with every request. 8 MiB of them take 30 ms of the event loop.
"""

import msgspec
from msgspec import Raw

from gateway.errors import BadRequest
from wire.chat import MAX_TOOLS_BYTES, Message
from wire.requests import ChatCompletionRequest, CompletionRequest

# Characters of a `user`. OpenAI allows as many in a value of `metadata`; a user's records keep fewer.
MAX_USER_CHARS = 512
# Bytes of all fields together besides the prompt, `model` (no model has a name of that size) and LARGE, and bytes of
# `messages` besides their texts.
MAX_OTHER_BYTES = 2**20
# Fields with limits of their own: of their entries, and of their declared members.
LARGE = {"allowed_token_ids": 2**22, "tools": 2 * MAX_TOOLS_BYTES}
# Bytes of a character as JSON, at most: two escapes. Bytes of a message besides its texts, such as names of fields.
ESCAPE_BYTES, MESSAGE_BYTES = 12, 256

AnyRequest = ChatCompletionRequest | CompletionRequest
Kind = type[ChatCompletionRequest] | type[CompletionRequest]


def check_raw_sizes(raw: bytes, kind: Kind) -> int:
    """Return the bytes of the prompt's field, 0 for a small body. Raises BadRequest for a field that is too large.

    No field is copied. A body that is not a JSON object passes, because the decoder reports it.
    """
    if len(raw) <= MAX_OTHER_BYTES:
        return 0
    try:
        fields = msgspec.json.decode(raw, type=dict[str, Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return 0
    sizes = {name: memoryview(value).nbytes for name, value in fields.items() if name != "model"}
    prompt_bytes = sizes.pop("messages" if kind is ChatCompletionRequest else "prompt", 0)
    if sizes.get("user", 0) > ESCAPE_BYTES * MAX_USER_CHARS + len('""'):
        raise _user_too_long()
    for name, most in LARGE.items():
        if sizes.get(name, 0) > most:
            raise BadRequest(f"{name}: expected at most {most} bytes as JSON, got {sizes[name]}.", param=name)
    others = {name: size for name, size in sizes.items() if name not in LARGE}
    if sum(others.values()) > MAX_OTHER_BYTES:
        largest = max(others, key=lambda name: others[name])
        raise BadRequest(
            f"{largest[:64]}: the fields besides the prompt may have at most {MAX_OTHER_BYTES} bytes together, got "
            f"{sum(others.values())}.",
            param=largest[:64],
        )
    return prompt_bytes


def check_sizes(request: AnyRequest, prompt_bytes: int) -> None:
    """Raise BadRequest for a long `user`, and for messages with large members besides their texts.

    prompt_bytes: the result of `check_raw_sizes`.
    """
    if request.user is not None and len(request.user) > MAX_USER_CHARS:
        raise _user_too_long()
    if prompt_bytes <= MAX_OTHER_BYTES or not isinstance(request, ChatCompletionRequest):
        return
    texts = sum(_text_bytes(message) for message in request.messages)
    beyond = prompt_bytes - texts - MESSAGE_BYTES * len(request.messages)
    if beyond > MAX_OTHER_BYTES:
        raise BadRequest(
            f"messages: the members besides content and arguments may have at most {MAX_OTHER_BYTES} bytes together, "
            f"got {beyond}.",
            param="messages",
        )


def _text_bytes(message: Message) -> int:
    """Return the most bytes that the texts of a message, which its template writes, take as JSON."""
    content = message.content or ""
    chars = len(content) if isinstance(content, str) else sum(len(part.text or "") for part in content)
    for call in message.tool_calls or ():
        given = call.function.arguments
        chars += len(given) if isinstance(given, str) else len(msgspec.json.encode(given))
    return ESCAPE_BYTES * chars


def _user_too_long() -> BadRequest:
    return BadRequest(f"user: expected at most {MAX_USER_CHARS} characters.", param="user")
