"""A running request: turns the engine's outputs into deltas, and the deltas into an answer or a stream."""

import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from msgspec import UNSET

from engine.answering.answers import Answer
from engine.answering.caller import Caller
from engine.answering.errors import ApiError, as_api_error, error_body
from engine.answering.fields import encode_fields
from engine.answering.model_names import load_error
from engine.answering.report import PIECE_BYTES, Report, write
from engine.answering.request_span import Phases, describe_generation
from engine.answering.request_threads import RequestThreads
from engine.answering.sequence import Delta, Sequence, SharedPrompt
from engine.answering.sequence_group import SequenceGroup
from engine.answering.text import OutputText
from engine.answering.usage_log import UsageSlot
from engine.metrics.metrics import Metrics
from engine.scheduling.request import MIXED_SERVED, RequestOutput
from wire.error_codes import ADAPTER_REFUSED, GENERATION_FAILED
from wire.errors import BadRequest
from wire.headers import RECEIPT_HEADER
from wire.requests import SamplingRequest
from wire.responses import FIELDS_HEADER, AnswerHead, GenerationProgress, PromptTokensDetails, Usage
from wire.structured import GrammarSpec
from wire.telemetry.spans import Span
from wire.text.tokenizer import Tokenizer

# More log-probabilities are encoded on a thread: 1,000 take 1 to 2 ms.
INLINE_LOGPROBS = 1000

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Asked:
    """A parsed request. shown_ids: special tokens that are written, because the tool-call parser needs them."""

    request_id: str
    body: SamplingRequest
    prompts: list[list[int]]
    prompt_field: str
    default_max_tokens: int | None
    answer: Answer[Any]
    spec: GrammarSpec | None
    shown_ids: frozenset[int] = frozenset()


class Run:
    """A running request: turns the engine's outputs into deltas, and the deltas into an answer."""

    def __init__(
        self,
        asked: Asked,
        group: SequenceGroup,
        tokenizer: Tokenizer,
        end_ids: frozenset[int],
        metrics: Metrics,
        caller: Caller,
        threads: RequestThreads,
    ) -> None:
        body, prompts = asked.body, asked.prompts
        self._group = group
        self._metrics = metrics
        self._body = body
        self._caller, self._threads = caller, threads
        self._internal = caller.internal
        self._wants_tokens = bool(body.return_token_ids)
        self._has_logprobs = body.num_logprobs is not None or body.num_prompt_logprobs is not None
        self._continuous_usage = body.continuous_usage
        self._no_usage = None if body.include_usage else UNSET
        self._choices = body.n or 1
        self.prompt_tokens = sum(len(prompt) for prompt in prompts)
        self._slot: UsageSlot | None = None
        self._phases, self._queue_is_reported = Phases(), False
        self._reason = "abort"
        self._by_allowance = False
        include_stop = bool(body.include_stop_str_in_output)
        stop_ids = frozenset(body.stop_token_ids or ())
        self._sequences = [
            Sequence(
                index,
                OutputText(
                    tokenizer,
                    body.stop_strings,
                    include_stop=include_stop,
                    min_tokens=body.min_tokens or 0,
                    shown_ids=asked.shown_ids,
                    after=prompts[index // self._choices],
                ),
                include_stop=include_stop,
                end_ids=end_ids,
                stop_ids=stop_ids,
                is_empty=body.max_new_tokens == 0,
            )
            for index in range(len(prompts) * self._choices)
        ]

    def keep_counts(self, slot: UsageSlot, allowance: int | None) -> None:
        """Update the request's counts while it runs. At its end, record all generated tokens, even if the client left.

        allowance: see `SequenceGroup`.
        """
        self._slot = slot
        self._group.allowance, slot.allow = allowance, self._group.allow
        self._group.on_gone = self._end_slot

    def count_left(self) -> None:
        """Count the sequences that were aborted before their end, mostly because the client left."""
        if not self._group.failed and (left := sum(not sequence.finished for sequence in self._sequences)):
            self._metrics.finished.labels("abort").inc(left)

    def describe(self, span: Span, path: str) -> None:
        """Add the request's outcome to its trace."""
        if span.is_recording:
            describe_generation(span, path, self._body.model, self._phases, self._progress(), self._reason)

    def _end_slot(self) -> None:
        assert self._slot is not None
        done = self._progress()
        generated = self._group.num_generated
        completion = sum(s.num_tokens if s.finished else generated[s.index] for s in self._sequences)
        reason = "error" if self._group.failed else "abort"
        if self._reason == "error" or all(sequence.finished for sequence in self._sequences):
            reason = self._reason
        # A request that fails before its first token costs nothing.
        prompt = 0 if reason == "error" and not completion else done.prompt_tokens
        self._slot.count(prompt, completion, done.cached_tokens)
        self._slot.end(reason)

    async def whole(self, request: web.Request, answer: Answer[Any], report: Report) -> web.StreamResponse:
        try:
            body, lengths = await self._whole_body(answer, report)
        except Exception as exc:
            if not report.is_open:
                raise
            error = as_api_error(exc, request)
            return await report.end(AnswerHead(error.status, 0, dict(error.headers or {})), error_body(error))
        fields = {FIELDS_HEADER: msgspec.json.encode(lengths).decode()} if self._internal else {}
        head = AnswerHead(200, 0, self._receipt() | fields)
        if report.is_open:
            return await report.end(head, body)
        if len(body) <= PIECE_BYTES:
            return web.Response(body=body, content_type="application/json", headers=head.headers)
        response = web.StreamResponse(headers={"Content-Type": "application/json"} | head.headers)
        response.content_length = len(body)
        try:
            await response.prepare(request)
            await write(request, response, body, internal=self._internal)
            await response.write_eof()
        except ConnectionError:
            return response
        return response

    async def _whole_body(self, answer: Answer[Any], report: Report) -> tuple[bytearray, dict[str, int]]:
        """Generate the answer. Return its JSON, and the byte lengths of its fields."""
        total = [Delta(sequence.index) for sequence in self._sequences]
        async for deltas in self._deltas():
            # Encoded as they come: answers that end in the same step would hold the event loop one after the other.
            if self._has_logprobs:
                await self._run_encoding(_num_logprobs(deltas), partial(_encode, answer, deltas))
            for delta in deltas:
                total[delta.index].add(delta)
            await report.update()
        usage, progress = self._usage(), self._progress_if_internal()

        def encode() -> tuple[bytearray, dict[str, int]]:
            choices = []
            for _ in self._sequences:
                # Encode choice by choice, so that the objects of a choice are freed before the next one's are made.
                choice = answer.whole(total.pop(0))
                choices.append(msgspec.Raw(msgspec.json.encode(choice)))
                if progress is not UNSET:
                    progress.finish_reason = choice.finish_reason
            return encode_fields(answer.envelope(choices, stream=False, usage=usage, progress=progress))

        return await self._run_encoding(_num_logprobs(total), encode)

    async def stream(self, request: web.Request, answer: Answer[Any]) -> web.StreamResponse:
        # Wait for the first output before the headers are sent, so that a refusal until then is a plain error response.
        news = self._deltas()
        deltas = await anext(news)
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"} | self._receipt()
        )
        try:
            await response.prepare(request)
            opened: set[int] = set()
            while deltas:
                # Large chunks are made on a thread: with `echo`, the first one has the whole prompt.
                size = _num_logprobs(deltas) if self._has_logprobs else 0
                if payload := await self._run_encoding(size, partial(self._chunks, answer, deltas, opened)):
                    await write(request, response, payload, internal=self._internal)
                try:
                    deltas = await anext(news, [])
                except Exception as exc:  # noqa: BLE001 - the status is sent, so the error goes into the stream
                    error = _event(error_body(as_api_error(exc, request)))
                    await write(request, response, error + b"data: [DONE]\n\n", internal=self._internal)
                    return response
            end = b"data: [DONE]\n\n"
            if self._body.include_usage:
                usage = answer.envelope([], stream=True, usage=self._usage(), progress=self._progress_if_internal())
                end = _event(msgspec.json.encode(usage)) + end
            await write(request, response, end, internal=self._internal)
            await response.write_eof()
        except ConnectionError:
            # The client left before the handler was cancelled; returning aborts the sequences.
            return response
        finally:
            await news.aclose()
        return response

    def _chunks(self, answer: Answer[Any], deltas: list[Delta], opened: set[int]) -> bytes:
        usage = self._usage() if self._continuous_usage else self._no_usage
        progress = self._progress_if_internal()
        payload = []
        for delta in deltas:
            choices = []
            if delta.index not in opened:
                opened.add(delta.index)
                if (opening := answer.opening(delta.index)) is not None:
                    choices.append(opening)
            has_news = delta.text or delta.logprobs or delta.prompt_logprobs or (self._wants_tokens and delta.token_ids)
            if (has_news or delta.finish_reason) and not answer.is_silent(chunk := answer.chunk(delta)):
                choices.append(chunk)
            for choice in choices:
                event = answer.envelope([choice], stream=True, usage=usage, progress=progress)
                payload.append(_event(msgspec.json.encode(event)))
        if self._internal and not payload:
            # Reports the progress even if all text is held back, because the gateway counts every token.
            payload.append(_event(msgspec.json.encode(answer.envelope([], stream=True, progress=progress))))
        return b"".join(payload)

    async def _deltas(self) -> AsyncGenerator[list[Delta], None]:
        """Yield lists of deltas, one list for all outputs that have arrived, until all sequences have ended."""
        last: dict[int, float] = {}
        shared = SharedPrompt(self._choices) if self._body.num_prompt_logprobs is not None else None
        left = len(self._sequences)
        while left:
            outputs: dict[int, list[RequestOutput]] = {}
            for index, output in await self._group.news():
                outputs.setdefault(index, []).append(output)
            now = time.monotonic()
            deltas = []
            for index, news in outputs.items():
                sequence = self._sequences[index]
                if sequence.finished:
                    continue
                delta = sequence.take(news)
                self._reason = delta.finish_reason or self._reason
                if delta.finish_reason is not None:
                    self._metrics.finished.labels(delta.finish_reason).inc()
                if delta.fault is not None:
                    raise load_error(self._body.model, delta.fault.error())
                if delta.error_param is not None:
                    code = ADAPTER_REFUSED if delta.error_param == "model" else None
                    raise BadRequest(delta.error_param, delta.error or "", code)
                if delta.error is not None:
                    raise ApiError(500, delta.error, kind="server_error", code=GENERATION_FAILED)
                if index in last:
                    self._metrics.inter_token_latency.observe(now - last[index])
                else:
                    self._metrics.time_to_first_token.observe(now - self._caller.received)
                    self._phases.first_token(news[0].started_at)
                last[index] = now
                if sequence.finished:
                    left -= 1
                    if delta.finish_reason == "length" and index in self._group.ended_by_allowance:
                        self._by_allowance = True
                    self._group.stop(index)
                deltas.append(delta)
            if deltas:
                if self._slot is not None:
                    done = self._progress()
                    self._slot.count(done.prompt_tokens, done.completion_tokens, done.cached_tokens)
                if ready := deltas if shared is None else shared.share(deltas):
                    yield ready

    async def _run_encoding(self, num_logprobs: int, work: Callable[[], T]) -> T:
        """Encode a part of the answer, on a thread if it has many log-probabilities."""
        return await self._threads.run(self._caller, work, is_long=num_logprobs > INLINE_LOGPROBS)

    def _progress(self) -> GenerationProgress:
        if len(self._sequences) == 1:
            [only] = self._sequences
            cached = only.num_cached_tokens if only.num_prompt_tokens else 0
            ended = self._by_allowance or UNSET
            return GenerationProgress(only.num_tokens, self.prompt_tokens, cached, only.served_digest, ended)
        # Counts the cached tokens of a prompt once for all its choices: the fewest, because later choices find the
        # prompt in the cache.
        cached = 0
        for start in range(0, len(self._sequences), self._choices):
            group = self._sequences[start : start + self._choices]
            cached += min((s.num_cached_tokens for s in group if s.num_prompt_tokens), default=0)
        completion = sum(s.num_tokens for s in self._sequences)
        return GenerationProgress(completion, self.prompt_tokens, cached, self._served(), self._by_allowance or UNSET)

    def _served(self) -> str | None:
        """Return the receipt of all sequences; None if no sequence had a step."""
        served = {s.served_digest for s in self._sequences if s.served_digest is not None}
        return MIXED_SERVED if len(served) > 1 else next(iter(served), None)

    def _receipt(self) -> dict[str, str]:
        """Return the header with the receipt of the steps so far; a stream's header covers its first steps."""
        served = self._served()
        return {} if served is None else {RECEIPT_HEADER: served}

    def _progress_if_internal(self) -> GenerationProgress | msgspec.UnsetType:
        if not self._internal:
            return UNSET
        progress = self._progress()
        if not self._queue_is_reported and (milliseconds := self._phases.queue_ms) is not None:
            progress.queue_ms, self._queue_is_reported = milliseconds, True
        return progress

    def _usage(self) -> Usage:
        done = self._progress()
        return Usage(
            done.prompt_tokens,
            done.completion_tokens,
            done.prompt_tokens + done.completion_tokens,
            PromptTokensDetails(done.cached_tokens),
        )


def _encode(answer: Answer[Any], deltas: list[Delta]) -> None:
    for delta in deltas:
        answer.encode(delta)


def _num_logprobs(deltas: list[Delta]) -> int:
    """Return the number of log-probabilities that are to be encoded; those of an encoded token count once."""
    count = 0
    for delta in deltas:
        entries = [*delta.logprobs, *(delta.prompt_logprobs or ())]
        count += len(delta.encoded) + sum(1 + len(entry.top_ids) for entry in entries if entry is not None)
    return count


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
