"""Text to token ids and back, from a model's own files.

Torch-free, so that the gateway counts tokens with the same code. Equal to transformers' `tokenizer(text)`,
`apply_chat_template` and `decode(skip_special_tokens=True)` on the files of Llama-family models.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
import tokenizers
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from wire.text.detokenizer import CONTEXT, ByteLevelStream, Stream, WindowStream

# Mark appended to a message that is to be continued, to find its end in the rendered text. The space shows whether the
# template trims messages. The two characters are from the private-use area, which meaningful text does not contain.
_CONTINUED = "\ue0c0\ue0c1 "
# Average characters per token above which a long text is counted piece by piece before all of it is encoded, and the
# number of characters in such a piece.
_LONG_TOKEN = 8
_PIECE = 16384
# Template variable: the maximum number of characters of the rendered text, None for no limit.
_ROOM = "_room"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerError(ValueError):
    """A folder without a tokenizer, or with files that cannot be read; the message names the file."""


class TextTooLong(ValueError):
    """A text with more tokens than allowed; counting stopped after `at_least` tokens."""

    def __init__(self, at_least: int) -> None:
        super().__init__(f"the text has more than {at_least} tokens")
        self.at_least = at_least


class ChatTemplateError(ValueError):
    """A conversation that cannot be rendered, because there is no template or the template refuses it.

    The message has the template's own words. `param` names the cause: `messages`, `tools` or `continue_final_message`.
    """

    def __init__(self, message: str, param: str = "messages") -> None:
        super().__init__(message)
        self.param = param


class _NoRoom(Exception):
    """A rendered text with more characters than the allowed tokens can have."""


class Tokenizer:
    """The tokenizer and chat template of one model. Thread-safe: holds no state of a request."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special: Mapping[str, str],
        template: str | None,
        eos: Iterable[int],
        tool_template: str | None = None,
    ) -> None:
        """tool_template: separate template for conversations with tools, if the model has one."""
        self._backend = backend
        self._special = dict(special)
        self._template = _compile(template) if template is not None else None
        self.tool_template = tool_template or (template if template and _takes_tools(template) else None)
        self._tool_template = _compile(self.tool_template) if self.tool_template is not None else None
        self.eos_token_ids = frozenset(eos)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._longest_token = max([_LONG_TOKEN, *map(len, backend.get_vocab(with_added_tokens=True))])
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        self._bytes: dict[int, bytes] = {}
        decoder = json.loads(backend.to_str())["decoder"] if backend.decoder is not None else None
        self._is_byte_level = _is_byte_level(decoder)

    @classmethod
    def from_dir(cls, path: str | Path) -> "Tokenizer":
        """Load tokenizer.json, tokenizer_config.json, chat_template.jinja, generation_config.json and config.json.

        `encode` adds the special tokens of tokenizer.json's post-processor. transformers ignores add_bos_token in that
        case, and so does this class. Raises TokenizerError.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise TokenizerError(f"no tokenizer.json in {folder}")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as exc:  # noqa: BLE001 - the library raises nothing narrower
            raise TokenizerError(f"{file}: {exc}") from None
        backend.no_padding()
        backend.no_truncation()
        config = _read_json(folder / "tokenizer_config.json")
        special = {name: _content(folder, name, config[name]) for name in SPECIAL_TOKENS if config.get(name)}
        backend.add_special_tokens([token for token in special.values() if backend.token_to_id(token) is None])
        eos = _eos_ids(folder)
        if not eos and "eos_token" in special:
            eos_id = backend.token_to_id(special["eos_token"])
            eos = set() if eos_id is None else {eos_id}
        template, tool_template = _read_templates(folder, config)
        return cls(backend, special, template, eos, tool_template)

    def to_json(self) -> str:
        """Return a tokenizer.json with the special tokens of all files, for libraries that read the vocabulary."""
        return self._backend.to_str()

    def encode(self, text: str, *, add_special_tokens: bool = True, limit: int | None = None) -> list[int]:
        """Encode a text.

        limit: maximum number of useful tokens. Raises TextTooLong for a far longer text without encoding all of it: a
        prompt of megabytes would occupy a processor for seconds and then be refused.
        """
        if limit is not None and len(text) > limit * _LONG_TOKEN:
            self._check_length(text, limit)
        return self._encode(text, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # `encode` holds the interpreter lock throughout (14 ms for 8,000 digits); a batch releases it. A batch of one
        # text stays on this thread.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def _check_length(self, text: str, limit: int) -> None:
        """Count piece by piece. Each cut adds a token or two, so a count of twice the limit certainly exceeds it."""
        count = 0
        for start in range(0, len(text), _PIECE):
            count += len(self._encode(text[start : start + _PIECE], add_special_tokens=False))
            if count > 2 * limit:
                raise TextTooLong(limit)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        limit: int | None = None,
    ) -> list[int]:
        """Render a conversation with the model's template, which writes the special tokens itself, and encode it.

        limit: see `encode`. Raises ChatTemplateError, TextTooLong.
        """
        if limit is not None and len(messages) > limit:
            raise TextTooLong(limit)  # a message is at least one token; rendering half a million takes seconds
        text = self.render_chat(
            messages, tools, add_generation_prompt, continue_final_message, template_kwargs, limit=limit
        )
        return self.encode(text, add_special_tokens=False, limit=limit)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        limit: int | None = None,
    ) -> str:
        """Return the conversation as the model's template writes it.

        continue_final_message: end the text where the last message's content ends, as if the model had written it.
        template_kwargs: additional variables of the template; they cannot replace the ones set here. limit: maximum
        number of useful tokens; rendering stops when the text certainly has more. Raises ChatTemplateError,
        TextTooLong.
        """
        if continue_final_message:
            marked = {**messages[-1], "content": messages[-1]["content"] + _CONTINUED}
            text = self.render_chat([*messages[:-1], marked], tools, False, False, template_kwargs, limit=limit)
            return _cut_at_mark(text)
        template = self._tool_template if tools else self._template
        if template is None:
            what = (
                "tools: the model's chat template does not support tools."
                if tools
                else "The model has no chat template."
            )
            raise ChatTemplateError(what, "tools" if tools else "messages")
        room = None if limit is None else limit * self._longest_token
        variables = {
            **(template_kwargs or {}),
            **self._special,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            _ROOM: room,
        }
        try:
            return _join(template.generate(variables), room)
        except _NoRoom:
            raise TextTooLong(limit or 0) from None
        except RecursionError:
            raise ChatTemplateError("The model's chat template refuses the messages: nested too deeply.") from None
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as exc:
            raise ChatTemplateError(f"The model's chat template refuses the messages: {str(exc).rstrip('.')}.") from exc

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def stream(self, shown_ids: frozenset[int] = frozenset(), after: Sequence[int] = ()) -> Stream:
        """Return an incremental detokenizer.

        shown_ids: special tokens to write nevertheless. after: the preceding tokens, such as the prompt's:
        SentencePiece writes no space before the first word of a text, and a character may begin there.
        """
        kind = ByteLevelStream if self._is_byte_level else WindowStream
        return kind(self, shown_ids, after[-CONTEXT:])

    def token(self, token_id: int) -> str:
        """Return the token as the vocabulary writes it; empty for an unknown id."""
        return self._backend.id_to_token(token_id) or ""

    def token_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for on its own; empty if the vocabulary has no such token."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._backend.id_to_token(token_id)
            if token is None:
                return b""  # is not kept: clients choose the ids of their prompts
            known = self._bytes[token_id] = self._token_bytes(token, token_id)
        return known

    def _token_bytes(self, token: str, token_id: int) -> bytes:
        if self._is_byte_level:
            # The decoder does the same: a token with any character outside of the alphabet is used as it is.
            if all(char in _BYTE_OF for char in token):
                return bytes(_BYTE_OF[char] for char in token)
            return token.encode()
        if self.is_byte_token(token_id):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()

    def has_text(self, token_id: int) -> bool:
        """Return whether `decode` shows the token: it is in the vocabulary and not special."""
        return token_id not in self.special_ids and self._backend.id_to_token(token_id) is not None

    def is_byte_token(self, token_id: int) -> bool:
        """Return whether the token is one raw byte of a byte-fallback vocabulary, such as `<0xE4>`."""
        token = self._backend.id_to_token(token_id) or ""
        return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _cut_at_mark(text: str) -> str:
    """Cut the text before the mark as transformers does. If the template trims messages, no space remains."""
    at = text.rfind(_CONTINUED.strip())
    if at < 0:
        raise ChatTemplateError("The model's chat template leaves out the last message.", "continue_final_message")
    before = text[:at]
    return before if text.startswith(_CONTINUED, at) else before.rstrip()


class _GenerationBlock(Extension):
    """The tag `{% generation %}`, which marks the assistant's words for training; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: "jinja2.parser.Parser") -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )


def _takes_tools(template: str) -> bool:
    try:
        return "tools" in jinja2.meta.find_undeclared_variables(_environment().parse(template))
    except jinja2.TemplateError as exc:
        raise TokenizerError(f"the chat template is not valid: {exc}") from None


def _compile(template: str) -> jinja2.Template:
    environment = _environment()
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as exc:
        raise TokenizerError(f"the chat template is not valid: {exc}") from None


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _join(pieces: Iterable[str], room: int | None) -> str:
    """Join pieces of at most `room` characters together. Raises _NoRoom before producing more."""
    joined, length = [], 0
    for piece in pieces:
        joined.append(piece)
        length += len(piece)
        if room is not None and length > room:
            raise _NoRoom
    return "".join(joined)


@jinja2.pass_context
def _to_json(
    context: jinja2.runtime.Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which no model was trained on.
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    # Indentation multiplies the size of a deep value, so it is encoded in pieces.
    return encoder.encode(value) if indent is None else _join(encoder.iterencode(value), context.get(_ROOM))


def _read_json(file: Path) -> dict[str, Any]:
    """Return the object in a file, or an empty one if the file does not exist."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text("utf-8"))
    except ValueError as exc:
        raise TokenizerError(f"{file}: {exc}") from None
    if not isinstance(content, dict):
        raise TokenizerError(f"{file}: expected a JSON object")
    return content


def _read_templates(folder: Path, config: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the model's template and its template for tools, in transformers' order: files, then the config."""
    file, tool_file = folder / "chat_template.jinja", folder / "additional_chat_templates" / "tool_use.jinja"
    if file.is_file():
        return file.read_text("utf-8"), tool_file.read_text("utf-8") if tool_file.is_file() else None
    template, tool_template = config.get("chat_template"), None
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template, tool_template = named.get("default"), named.get("tool_use")
    if not isinstance(template, str | None) or not isinstance(tool_template, str | None):
        raise _damaged(folder / "tokenizer_config.json", "chat_template", "a template or named templates", template)
    return template, tool_template


def _content(folder: Path, name: str, token: Any) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise _damaged(folder / "tokenizer_config.json", name, "a token", token)
    return text


def _damaged(file: Path, field: str, expected: str, value: Any) -> TokenizerError:
    return TokenizerError(f"{file}: {field}: expected {expected}, got {str(value)[:40]!r}")


def _eos_ids(folder: Path) -> set[int]:
    """Return the end-of-sequence ids. generation_config.json comes first: it lists the end of a turn and of a text."""
    for name in ("generation_config.json", "config.json"):
        eos = _read_json(folder / name).get("eos_token_id")
        if eos is not None:
            ids = eos if isinstance(eos, list) else [eos]
            if any(type(i) is not int for i in ids):
                raise _damaged(folder / name, "eos_token_id", "token ids", eos)
            return set(ids)
    return set()


def _is_byte_level(decoder: Mapping[str, Any] | None) -> bool:
    if decoder is None:
        return False
    if decoder["type"] == "Sequence":
        return bool(decoder["decoders"]) and all(_is_byte_level(part) for part in decoder["decoders"])
    return decoder["type"] == "ByteLevel"


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's map of characters to bytes: printable bytes map to themselves, the others start at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()
