"""Readers of engines' answers: within a size limit and one level deep, so that a large answer creates no objects.

A whole answer of our engine is not even decoded: the engine says the length of each field.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Annotated, Any, NamedTuple, Protocol

import msgspec
from aiohttp import ClientResponse, StreamReader
from msgspec import Raw
from multidict import CIMultiDict

from gateway.errors import BadRequest, UpstreamFailed
from gateway.fleet.calls.json_field_scanner import PIECE_BYTES, BeforePiece, LargeObject, read_object, yield_once
from gateway.fleet.engines.traits import Traits
from wire.error_codes import ADAPTER_FILES_UNREADABLE, ENGINE_OVERLOADED, ENGINE_UNAVAILABLE, GENERATION_FAILED
from wire.http_errors import HTTP_ERRORS
from wire.responses import FIELDS_HEADER, AnswerHead, ReportLine

# Error responses of our engine are shorter; the rest of a longer one is not read.
MAX_ERROR_BYTES = 2**16
# Larger answers are not decoded, because that takes about 4 ms for 1 MiB.
LARGE_BYTES = 2**20
# Larger fields of a choice are not decoded.
SMALL_BYTES = 2**12

# Largest count of tokens that is believed, so that sums of counts fit the database's integers.
MAX_TOKENS = 2**31 - 1

# Time-out between two pieces of a whole answer, which the engine sends only when its body is complete.
BODY_SECONDS = 60.0

# Fields of a chat's event with generated text. vLLM has used both names for the text before an answer.
GENERATED = ("content", "tool_calls", "reasoning", "reasoning_content")

# Errors of decoding a JSON text of any content: a foreign server may nest lists as deep as it likes.
JSON_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

Fields = dict[str, Raw]
"""An answer's or an event's fields by name, each as its JSON text."""

_fields = msgspec.json.Decoder(Fields)
_lengths = msgspec.json.Decoder(dict[str, Annotated[int, msgspec.Meta(ge=1)]])


class Incoming(Protocol):
    """A response whose body is unread: aiohttp's, or a `ReportedResponse` answer."""

    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> Mapping[str, str]: ...
    @property
    def content_length(self) -> int | None: ...
    @property
    def content(self) -> StreamReader: ...
    def close(self) -> None: ...


class ReportedResponse:
    """A whole answer that follows a report: its own head, and the rest of the response that carries both."""

    def __init__(self, head: AnswerHead, carrier: ClientResponse) -> None:
        self.status, self.content_length, self.headers = head.status, head.length, CIMultiDict(head.headers)
        self.content, self.close = carrier.content, carrier.close


_line = msgspec.json.Decoder(ReportLine)


# Codes of our engine's failures, and their messages for clients. An engine's own message may quote another request or
# its host's paths.
FAILURES = {
    ENGINE_OVERLOADED: "The engine is overloaded; try again shortly.",
    ADAPTER_FILES_UNREADABLE: "The adapter's files cannot be read at present; try again shortly.",
    ENGINE_UNAVAILABLE: "The engine accepts no requests; send the request again.",
    GENERATION_FAILED: "The engine could not generate an answer to this request.",
}
FAILED = "The engine failed; send the request again."
REFUSED = "The engine refused the request."


def public_error(event: Fields, traits: Traits) -> Fields:
    """Return a stream's error for the client.

    An error that its request caused is returned whole, or with a fixed message if the kind's messages are not for
    clients. Any other error keeps its code and gets a fixed message.
    """
    try:
        detail = msgspec.json.decode(event["error"], type=dict[str, Any])
    except JSON_ERRORS:
        detail = {}
    kind = detail.get("type")
    if isinstance(kind, str) and kind in traits.request_errors:
        return {"error": event["error"]} if traits.shows_messages else _error(REFUSED, "invalid_request_error", None)
    code = detail.get("code")
    code = code if isinstance(code, str) and code in FAILURES else "engine_error"
    return _error(FAILURES.get(code, FAILED), "server_error", code)


def _error(message: str, kind: str, code: str | None) -> Fields:
    return {"error": Raw(msgspec.json.encode({"message": message, "type": kind, "param": None, "code": code}))}


async def read_report(response: ClientResponse, on_progress: Callable[[int], None]) -> ReportedResponse:
    """Read the progress lines that our engine sends before a non-streaming answer, and return that answer with its body
    unread. on_progress: called with the completion tokens so far.

    Raises EngineBroke.
    """
    while True:
        try:
            line = _line.decode(await response.content.readline())
        except (*HTTP_ERRORS, ValueError) as error:
            raise _how_it_broke(error) from error
        on_progress(line.completion_tokens)
        if line.answer is not None:
            return ReportedResponse(line.answer, response)


class AnswerTooLarge(BadRequest):
    """The engine's answer is larger than the gateway's limit; the generated tokens are billed."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"The answer is larger than this gateway's limit of {limit} bytes. "
            "Request fewer log-probabilities, choices or tokens.",
            code="answer_too_large",
        )


class Choice(msgspec.Struct):
    """The fields of a choice that the gateway reads."""

    index: Any = None
    finish_reason: Any = None
    text: Any = None
    delta: Any = None

    @property
    def has_text(self) -> bool:
        """Return whether it has generated text."""
        delta = self.delta if isinstance(self.delta, dict) else {}
        return bool(self.text or any(delta.get(name) for name in GENERATED))


class ReportedProgress(msgspec.Struct):
    """The fields of our engine's `GenerationProgress`. A release may leave out each of them."""

    completion_tokens: Any = None
    prompt_tokens: Any = None
    cached_tokens: Any = None
    adapter_digest: Any = None
    ended_by_allowance: Any = None
    finish_reason: Any = None
    queue_ms: Any = None

    @property
    def queue_seconds(self) -> float | None:
        """Return the wait in the engine's queue; None if the engine sends none, or one that no request can have."""
        is_valid = type(self.queue_ms) is int and 0 <= self.queue_ms <= MAX_TOKENS
        return self.queue_ms / 1000 if is_valid else None

    @property
    def usage(self) -> "Usage":
        return Usage.of(self.prompt_tokens, self.completion_tokens, self.cached_tokens)


class Usage(NamedTuple):
    """Token counts of an answer or event; None where the engine sends none, or one that no request can have."""

    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None

    @classmethod
    def of(cls, *counts: Any) -> "Usage":
        """Check the counts of an engine, in the order of the fields: a foreign server may send any value."""
        return cls(*(each if type(each) is int and 0 <= each <= MAX_TOKENS else None for each in counts))


_choices = msgspec.json.Decoder(list[Choice] | None)
_progress = msgspec.json.Decoder(ReportedProgress)


async def read_answer(
    response: Incoming,
    limit: int,
    reserve: Callable[[int], Awaitable[None]],
    seconds: float = BODY_SECONDS,
    *,
    is_own: bool = False,
    before_piece: BeforePiece = yield_once,
) -> Fields:
    """Read a whole JSON answer. reserve: awaited with the answer's size before its body is read.

    is_own: whether it is an answer of our engine, whose fields are taken unread by their lengths in its header. Without
    that header (the previous release) they are found like other engines'. before_piece: awaited before each whole
    piece. Raises AnswerTooLarge, UpstreamFailed.
    """
    size = response.content_length
    if size is not None and size > limit:
        raise AnswerTooLarge(limit)
    await reserve(limit if size is None else size)
    body = bytearray()
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(seconds) as patience:
            while chunk := await response.content.read(PIECE_BYTES):
                if len(chunk) == PIECE_BYTES:
                    await before_piece()
                body += chunk
                if len(body) > limit:
                    raise AnswerTooLarge(limit)
                patience.reschedule(loop.time() + seconds)
    except HTTP_ERRORS as error:
        raise _how_it_broke(error) from error
    lengths = response.headers.get(FIELDS_HEADER) if is_own else None
    return await read_fields(body, "answer", before_piece) if lengths is None else slice_fields(body, lengths)


async def read_events(response: Incoming, limit: int) -> AsyncIterator[Fields]:
    """Yield the JSON objects of a server-sent event stream up to `[DONE]`. Reads only as far as the caller iterates.

    Raises UpstreamFailed if the stream ends before `[DONE]`, contains malformed data or an event larger than `limit`.
    """
    buffer = bytearray()
    async for chunk in read_chunks(response):
        searched = len(buffer)
        buffer += chunk
        start = 0
        while (end := buffer.find(b"\n", max(start, searched))) >= 0:
            line = bytes(buffer[start:end]).rstrip(b"\r")
            start = end + 1
            # Comments, event names and blank lines are skipped, because each event is one data line.
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            yield await read_fields(data, "event")
        del buffer[:start]
        if len(buffer) > limit:
            raise UpstreamFailed("The engine sent an event larger than this gateway accepts.")
    raise UpstreamFailed("The engine's stream ended without its last event.")


async def read_error(response: Incoming) -> bytes:
    """Read the first `MAX_ERROR_BYTES` of a response whose status is not 200. Raises UpstreamFailed."""
    body = bytearray()
    async for chunk in read_chunks(response):
        body += chunk
        if len(body) > MAX_ERROR_BYTES:
            break
    return bytes(body[:MAX_ERROR_BYTES])


async def read_chunks(response: Incoming) -> AsyncIterator[bytes]:
    """Yield the body as it arrives.

    Errors are caught around the reads only, because a failed write to a client is not the engine's fault.
    """
    parts = response.content.iter_any()
    while True:
        try:
            chunk = await anext(parts)
        except StopAsyncIteration:
            return
        except HTTP_ERRORS as error:
            raise _how_it_broke(error) from error
        yield chunk


def _how_it_broke(error: Exception) -> "EngineBroke":
    if isinstance(error, TimeoutError):
        return EngineBroke("The engine's answer stopped: nothing arrived within the time limit.")
    return EngineLost("The engine died during its answer, or the connection to it broke.")


class EngineBroke(UpstreamFailed):
    """The connection to the engine ended or paused too long in the middle of an answer."""


class EngineLost(EngineBroke):
    """The connection to the engine ended in the middle of an answer."""

    code = "engine_died"


async def read_fields(data: bytes | bytearray, subject: str, before_piece: BeforePiece = yield_once) -> Fields:
    """Return the fields of a JSON object; those of a large one are found in pieces. Raises UpstreamFailed."""
    if len(data) <= LARGE_BYTES:
        return decode_fields(data, subject)
    try:
        return await read_object(data, before_piece)
    except JSON_ERRORS as error:
        raise UpstreamFailed(f"The engine's {subject} is not valid JSON.") from error


def decode_fields(data: bytes | bytearray, subject: str) -> Fields:
    """Return the fields of a JSON object. Raises UpstreamFailed."""
    try:
        return _fields.decode(data)
    except msgspec.ValidationError as error:
        raise UpstreamFailed(f"The engine's {subject} is not a JSON object.") from error
    except JSON_ERRORS as error:
        raise UpstreamFailed(f"The engine's {subject} is not valid JSON.") from error


def slice_fields(body: bytearray, lengths: str) -> Fields:
    """Return the fields of a JSON object unread. lengths: the value of `FIELDS_HEADER`.

    Raises UpstreamFailed for lengths that do not leave exactly the names and punctuation of the body.
    """
    failure = UpstreamFailed("The engine's answer is not as long as its header says.")
    try:
        named = _lengths.decode(lengths)
    except ValueError as error:
        raise failure from error
    fields: Fields = {}
    view, end = memoryview(body), 0
    for name, length in named.items():
        before = (b"," if fields else b"{") + msgspec.json.encode(name) + b":"
        start = end + len(before)
        if view[end:start] != before:
            raise failure
        end = start + length
        fields[name] = Raw(view[start:end])
    if view[end:] != b"}":
        raise failure
    return fields


def object_parts(fields: Fields) -> list[bytes | memoryview]:
    """Return the parts of the fields' JSON object, in order. Values are not copied."""
    parts: list[bytes | memoryview] = []
    for name, raw in fields.items():
        parts += (b"," if parts else b"{") + msgspec.json.encode(name) + b":", memoryview(raw)
    return [*parts, b"}"] if parts else [b"{}"]


def decode_field(fields: Fields, name: str) -> Any:
    """Return the value of a small field, None if it is missing. Raises UpstreamFailed."""
    raw = fields.get(name)
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw)
    except JSON_ERRORS as error:
        raise UpstreamFailed(f"The engine's {name} is not valid JSON.") from error


def read_usage(fields: Fields) -> Usage | None:
    """Return the token counts; None for an answer or event without them. Raises UpstreamFailed."""
    usage = decode_field(fields, "usage")
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Usage.of(usage.get("prompt_tokens"), usage.get("completion_tokens"), cached)


def decode_progress(fields: Fields) -> ReportedProgress | None:
    """Return the progress; None for an answer without it, as other engines send. Raises UpstreamFailed."""
    raw = fields.get("loraplex")
    if raw is None:
        return None
    try:
        return _progress.decode(raw)
    except msgspec.ValidationError:
        return None
    except JSON_ERRORS as error:
        raise UpstreamFailed("The engine's loraplex is not valid JSON.") from error


def decode_choices(fields: Fields) -> list[Choice]:
    """Return the choices without their log-probabilities. Raises UpstreamFailed."""
    if isinstance(fields, LargeObject) and fields.elements:
        return [_choice(each) for each in fields.elements]
    raw = fields.get("choices")
    if raw is None:
        return []
    try:
        return _choices.decode(raw) or []
    except JSON_ERRORS as error:
        raise UpstreamFailed("The engine's choices are not a list of choices.") from error


def _choice(fields: Fields) -> Choice:
    """Return a choice of a large answer. If a field is larger than SMALL_BYTES, it is not decoded, and text is True."""
    choice = Choice()
    for name in Choice.__struct_fields__:
        if memoryview(fields.get(name, b"")).nbytes <= SMALL_BYTES:
            setattr(choice, name, decode_field(fields, name))
        else:
            choice.text = True
    return choice
