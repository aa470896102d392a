"""A measured request: an OpenAI completion sent over HTTP, and the time of each event of its stream.

Times are readings of `time.perf_counter`. Independent of plans, tenants' shares and reports.
"""

import asyncio
import re
import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from loraplex.bench.load import Api, PlannedRequest
from wire.escaping import escaped
from wire.http_errors import HTTP_ERRORS
from wire.sse import DONE, EventReader

PATHS: Mapping[Api, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
ERROR_LENGTH = 200


@dataclass(frozen=True, slots=True)
class Failure:
    """Cause of a missing or incomplete answer. kind: `http 429 code`, `timeout`, `connection`, `cut`, ..."""

    kind: str
    text: str


UNFINISHED = Failure("unfinished", "the run ended before the answer")


@dataclass(slots=True)
class Sample:
    """The measurement of a request.

    due: its planned time; in a closed loop, the time at which it was sent. times: an event's arrival each, for events
    that carry a part of the answer. Token counts are the server's; None if its answer had none.
    """

    planned: PlannedRequest
    due: float
    sent: float = 0.0
    ended: float | None = None
    times: "array[float]" = field(default_factory=lambda: array("d"))
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    error: Failure | None = None

    @property
    def first(self) -> float | None:
        return self.times[0] if self.times else None

    @property
    def output_tokens(self) -> int:
        """Return the answer's tokens: the server's count, or the events if it gave none."""
        return len(self.times) if self.completion_tokens is None else self.completion_tokens

    @property
    def input_tokens(self) -> int:
        """Return the prompt's tokens: the server's count, or the planned ones if it gave none."""
        return self.planned.input_tokens if self.prompt_tokens is None else self.prompt_tokens


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def carries_output(self) -> bool:
        """Return whether the event has a part of the answer: not only a role or the reason of the end."""
        if self.delta is not None:
            return bool(self.delta.content or self.delta.reasoning_content or self.delta.tool_calls)
        return bool(self.text) or (self.text is not None and self.finish_reason is None)


class Event(msgspec.Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(Event).decode


class Sender:
    """Sends requests to one server. url: the part before `/v1`. timeout: seconds for one request."""

    def __init__(self, session: aiohttp.ClientSession, url: str, api: Api, *, ignore_eos: bool, timeout: float) -> None:
        self._session = session
        self._url = url + PATHS[api]
        self._api = api
        self._ignore_eos = ignore_eos
        self._timeout = aiohttp.ClientTimeout(total=timeout, sock_connect=min(timeout, 30.0))

    async def send(self, sample: Sample, prompt: str, headers: Mapping[str, str]) -> None:
        """Send the request and fill the sample. Returns at the end of the answer or at the first failure."""
        sample.sent = time.perf_counter()
        try:
            async with self._session.post(
                self._url,
                json=self._body(sample.planned, prompt),
                headers=headers,
                timeout=self._timeout,
                allow_redirects=False,
            ) as response:
                if response.status != 200:
                    sample.error = _refusal(response.status, await response.content.read(8192))
                else:
                    await _read(response, sample)
        except asyncio.CancelledError:
            sample.error = UNFINISHED
            raise
        except TimeoutError:
            sample.error = Failure("timeout", f"no whole answer within {self._timeout.total:g} s")
        except aiohttp.ClientPayloadError as error:
            sample.error = Failure("cut", str(error))
        except HTTP_ERRORS as error:
            sample.error = Failure("connection", f"{type(error).__name__}: {error}")
        except (msgspec.DecodeError, ValueError) as error:
            sample.error = Failure("protocol", str(error))
        finally:
            sample.ended = time.perf_counter()
            if sample.error is not None:
                sample.error = _cleaned(sample.error, sample.planned.target.api_key)

    def _body(self, planned: PlannedRequest, prompt: str) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": planned.target.model,
            "max_tokens": planned.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._ignore_eos:
            body["ignore_eos"] = True
        if self._api == "chat":
            return body | {"messages": [{"role": "user", "content": prompt}]}
        return body | {"prompt": prompt}


async def _read(response: aiohttp.ClientResponse, sample: Sample) -> None:
    """Read a stream of events to its end. Events that arrive in one piece have one time."""
    reader = EventReader()
    ended = False
    async for piece in response.content.iter_any():
        now = time.perf_counter()
        for data in reader.feed(piece):
            if data == DONE:
                ended = True
                continue
            event = _decode(data)
            if event.error is not None:
                code = event.error.get("code") if isinstance(event.error, dict) else None
                sample.error = Failure(_kind("stream", code), str(event.error))
                return
            if event.usage is not None:
                sample.prompt_tokens = event.usage.prompt_tokens
                sample.completion_tokens = event.usage.completion_tokens
            for choice in event.choices:
                if choice.carries_output:
                    sample.times.append(now)
                ended = ended or choice.finish_reason is not None
    if not ended:
        sample.error = Failure("cut", "the stream ended without a finish_reason and without [DONE]")
    elif not sample.times:
        sample.error = Failure("no token", "the answer held no token")


def _cleaned(failure: Failure, key: str | None) -> Failure:
    """Return the failure in one line, without the API key and control characters that a server may have sent."""
    kind, text = (
        escaped(" ".join((part.replace(key, "***") if key else part).split())) for part in (failure.kind, failure.text)
    )
    return Failure(kind, text[:ERROR_LENGTH])


def _refusal(status: int, body: bytes) -> Failure:
    text = body.decode(errors="replace")
    try:
        code = msgspec.json.decode(body)["error"]["code"]
    except (msgspec.DecodeError, KeyError, TypeError):
        code = None
    return Failure(_kind(f"http {status}", code), text)


def _kind(kind: str, code: object) -> str:
    """Return the kind with the API's error code, if it has the form of one."""
    return f"{kind} {code}" if isinstance(code, str) and re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", code) else kind
