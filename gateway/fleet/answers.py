"""Reading an engine's answers: one level deep, so that a large answer costs no objects, and never more than a limit."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from aiohttp import ClientError, ClientResponse
from msgspec import Raw

from gateway.errors import BadRequest, UpstreamFailed

# An engine's error is short; a longer body is no error of ours.
MAX_ERROR_BYTES = 2**16
# Decoding a larger answer is split into steps; other requests run between them. 1 MiB takes about 2 ms a step.
LARGE_BYTES = 2**20

# The body of a whole answer is there when its status is; a pause of this length is an engine that hangs.
BODY_SECONDS = 60.0

Fields = dict[str, Raw]
"""An answer's or an event's fields by name, each as its JSON text."""

_fields = msgspec.json.Decoder(Fields)


class AnswerTooLarge(BadRequest):
    """The engine's answer is larger than the gateway holds; what was generated is billed."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"The answer is larger than {limit} bytes, the most this gateway takes. "
            "Ask for fewer log-probabilities, choices or tokens.",
            code="answer_too_large",
        )


class Choice(msgspec.Struct):
    """The part of a choice that the gateway reads."""

    finish_reason: Any = None
    text: Any = None
    delta: Any = None


_choices = msgspec.json.Decoder(list[Choice] | None)


async def read_answer(
    response: ClientResponse, limit: int, reserve: Callable[[int], Awaitable[None]], seconds: float = BODY_SECONDS
) -> Fields:
    """Read a whole JSON answer. reserve: awaited with its size before more than its beginning is read.

    Raises AnswerTooLarge, UpstreamFailed.
    """
    size = response.content_length
    if size is not None and size > limit:
        raise AnswerTooLarge(limit)
    await reserve(limit if size is None else size)
    body = bytearray()
    chunks = read_chunks(response, seconds)
    async for chunk in chunks:
        body += chunk
        if len(body) > limit:
            raise AnswerTooLarge(limit)
    await breathe(len(body))
    return decode_fields(body, "answer")


async def breathe(size: int) -> None:
    """Let other tasks run before a step of work on a large answer."""
    if size > LARGE_BYTES:
        await asyncio.sleep(0)


async def read_events(response: ClientResponse, limit: int) -> AsyncIterator[Fields]:
    """Yield the JSON objects of a server-sent event stream up to `[DONE]`. Reads no further than it is asked for.

    Raises UpstreamFailed if the stream ends before `[DONE]`, holds something else or an event larger than `limit`.
    """
    buffer = bytearray()
    async for chunk in read_chunks(response):
        searched = len(buffer)
        buffer += chunk
        start = 0
        while (end := buffer.find(b"\n", max(start, searched))) >= 0:
            line = bytes(buffer[start:end]).rstrip(b"\r")
            start = end + 1
            # Comments, event names and blank lines carry nothing here: each of our events is one data line.
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            yield decode_fields(data, "event")
        del buffer[:start]
        if len(buffer) > limit:
            raise UpstreamFailed("The engine sent an event larger than this gateway accepts.")
    raise UpstreamFailed("The engine's stream ended before its end.")


async def read_error(response: ClientResponse) -> bytes:
    """Read the body of an answer that is not of status 200: its first `MAX_ERROR_BYTES`. Raises UpstreamFailed."""
    body = bytearray()
    async for chunk in read_chunks(response):
        body += chunk
        if len(body) > MAX_ERROR_BYTES:
            break
    return bytes(body[:MAX_ERROR_BYTES])


async def read_chunks(response: ClientResponse, seconds: float | None = None) -> AsyncIterator[bytes]:
    """Yield the body as it arrives. seconds: the longest silence, beside the session's own limit.

    Only reading is guarded here: a failure while a client is written to is not the engine's fault.
    """
    parts = response.content.iter_any()
    while True:
        try:
            if seconds is None:
                chunk = await anext(parts)
            else:
                async with asyncio.timeout(seconds):
                    chunk = await anext(parts)
        except StopAsyncIteration:
            return
        except (ClientError, OSError, TimeoutError) as error:
            raise EngineBroke(f"The engine's answer broke off ({type(error).__name__}).") from error
        yield chunk


class EngineBroke(UpstreamFailed):
    """The connection to the engine ended, or fell silent, in the middle of an answer."""


def decode_fields(data: bytes | bytearray, what: str) -> Fields:
    """Return the fields of a JSON object. Raises UpstreamFailed."""
    try:
        return _fields.decode(data)
    except msgspec.ValidationError as error:
        raise UpstreamFailed(f"The engine's {what} is not a JSON object.") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UpstreamFailed(f"The engine's {what} is not valid JSON.") from error


def decode_field(fields: Fields, name: str) -> Any:
    """Return a small field's value, None if it is not there. Raises UpstreamFailed."""
    raw = fields.get(name)
    if raw is None:
        return None
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UpstreamFailed(f"The engine's {name} is not valid JSON.") from error


def decode_choices(fields: Fields) -> list[Choice]:
    """Return the choices without their log-probabilities. Raises UpstreamFailed."""
    raw = fields.get("choices")
    if raw is None:
        return []
    try:
        return _choices.decode(raw) or []
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UpstreamFailed("The engine's choices are not a list of choices.") from error
