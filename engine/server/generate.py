"""/v1/completions and /v1/chat/completions: prompt to tokens, tokens to the engine, deltas to the client."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from msgspec import UNSET

from engine.http_body import read_body
from engine.protocol import (
    BadRequest,
    ChatCompletionRequest,
    CompletionRequest,
    SamplingRequest,
    decode,
    prompt_too_long,
)
from engine.responses import Progress, PromptTokensDetails, Usage
from engine.sampling_defaults import SamplingDefaults
from engine.scheduling.request import RequestOutput
from engine.server.answers import Answer, ChatAnswer, CompletionAnswer
from engine.server.caller import Caller
from engine.server.errors import ApiError, as_api_error, error_body
from engine.server.finished import FinishedRequests, Tally
from engine.server.generation import Generation, Submission
from engine.server.grammars import Grammars
from engine.server.loop import EngineLoop
from engine.server.metrics import Metrics
from engine.server.models import ModelRegistry
from engine.server.sequence import Delta, Sequence
from engine.server.text import OutputText
from engine.server.token_rules import token_rules
from engine.server.tool_calls import ToolCallParser, ToolFormat
from engine.server.tracing import Phases, describe_generation
from engine.structured.spec import GrammarSpec
from engine.tokenizer import TextTooLong, Tokenizer
from engine.tracing import NO_SPAN, SPAN, Span

T = TypeVar("T")

# A longer body is read and tokenized in a thread; a shorter one takes less time than the way there and back.
OFFLOAD_BYTES = 8192


@dataclass(frozen=True, slots=True)
class GenerationRoutes:
    """The two generating routes. Both are: read, queue, then one answer or a stream of chunks."""

    tokenizer: Tokenizer
    loop: EngineLoop
    models: ModelRegistry
    grammars: Grammars
    metrics: Metrics
    max_model_len: int
    eos_token_ids: frozenset[int]
    tool_format: ToolFormat | None
    finished: FinishedRequests
    defaults: SamplingDefaults

    async def completions(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        raw = await read_body(request)
        with self._naming("prompt"):
            body, prompts, echo = await offload(len(raw), lambda: self._read_completion(raw))
        request_id = uuid.uuid4().hex
        shown_ids = self._shown_ids(body)
        answer = CompletionAnswer(request_id, body, prompts, self.tokenizer, echo, shown_ids)
        asked = _Asked(request_id, body, prompts, "prompt", 16, answer, body.grammar_spec(), shown_ids)
        return await self._answer(request, caller, asked)

    async def chat(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        raw = await read_body(request)
        with self._naming("messages"):
            body, prompts = await offload(len(raw), lambda: self._read_chat(raw))
        request_id = uuid.uuid4().hex
        parsers, shown_ids, spec = None, self._shown_ids(body), body.grammar_spec()
        if body.tools and body.tool_choice != "none":
            form = self.tool_format
            if form is None:
                raise BadRequest("tools", "tools: how this model writes its calls is not known; see --tool-call-parser")
            parallel = body.parallel_tool_calls is not False
            names = [tool.function.name for tool in body.tools]
            parsers = [ToolCallParser(form, names, parallel) for _ in range(body.n or 1)]
            shown_ids |= self.tokenizer.special_ids & {self.tokenizer.token_id(marker) for marker in form.markers}
            if body.must_call:
                spec = await offload(len(raw), lambda: form.grammar(body.tools or [], body.tool_choice, parallel))
        answer = ChatAnswer(request_id, body, prompts, self.tokenizer, parsers)
        asked = _Asked(request_id, body, prompts, "messages", None, answer, spec, shown_ids)
        return await self._answer(request, caller, asked)

    def _read_completion(self, raw: bytes) -> tuple[CompletionRequest, list[list[int]], list[tuple[str, list[int]]]]:
        """The body, its prompts' ids, and what `echo` puts before each choice."""
        body = decode(CompletionRequest, raw)
        given = body.prompts()
        encode = partial(
            self.tokenizer.encode, add_special_tokens=body.add_special_tokens is not False, limit=self.max_model_len
        )
        prompts = [encode(p) if isinstance(p, str) else p for p in given]
        if not body.echo:
            return body, prompts, []
        hidden = body.skip_special_tokens is not False
        texts = [p if isinstance(p, str) else self.tokenizer.decode(p, skip_special_tokens=hidden) for p in given]
        return body, prompts, [pair for pair in zip(texts, prompts, strict=True) for _ in range(body.n or 1)]

    def _read_chat(self, raw: bytes) -> tuple[ChatCompletionRequest, list[list[int]]]:
        body = decode(ChatCompletionRequest, raw)
        return body, [self.tokenizer.encode_chat(*body.template_input(), limit=self.max_model_len)]

    @contextmanager
    def _naming(self, prompt_field: str) -> Iterator[None]:
        try:
            yield
        except TextTooLong as exc:
            raise prompt_too_long(prompt_field, self.max_model_len, exc.at_least) from None

    def _shown_ids(self, body: SamplingRequest) -> frozenset[int]:
        """Special tokens that are written."""
        return self.tokenizer.special_ids if body.skip_special_tokens is False else frozenset()

    async def _answer(self, request: web.Request, caller: Caller, asked: "_Asked") -> web.StreamResponse:
        body, prompts, prompt_field = asked.body, asked.prompts, asked.prompt_field
        limits = [self._max_tokens(body, len(prompt), asked.default_max_tokens, prompt_field) for prompt in prompts]
        sequences = (body.n or 1) * len(prompts)
        if sequences > self.loop.max_requests:
            limit_and_flags = f"{self.loop.max_requests} sequences, --max-num-seqs and --max-waiting together"
            raise BadRequest(prompt_field, f"{prompt_field} and n ask for more than {limit_and_flags}")
        # A request that waits for its adapter or its grammar takes its place in the queue already.
        with self.loop.place(sequences) as place:
            async with self.models.using(body.model, caller.tenant) as adapter:
                submissions = await self._submissions(caller, asked, limits, adapter)
                generation = self.loop.submit(asked.request_id, submissions, place)
                return await self._generate(request, caller, asked, generation)

    async def _submissions(
        self, caller: Caller, asked: "_Asked", limits: list[int], adapter: str | None
    ) -> list[Submission]:
        body = asked.body
        grammar = None if asked.spec is None else await self.grammars.get(asked.spec, caller.tenant)
        allowed, bad_words = await token_rules(body, self.tokenizer)
        return [
            Submission(
                # Who wants the prompt alone has a token made all the same: with it come the prompt's log-probabilities.
                prompt,
                body.sampling_params(max(limit, 1), i, grammar, self.defaults, allowed, bad_words),
                adapter,
                caller.tenant,
                caller.weight,
                caller.priority,
                body.cache_salt or "",
            )
            for prompt, limit in zip(asked.prompts, limits, strict=True)
            for i in range(body.n or 1)
        ]

    async def _generate(
        self, request: web.Request, caller: Caller, asked: "_Asked", submitted: Generation
    ) -> web.StreamResponse:
        with submitted as generation:
            run = _Run(self, asked, generation, caller.internal)
            if caller.request_id is not None:
                run.keep_tally(self.finished.open(caller.request_id, run.prompt_tokens))
            try:
                if asked.body.stream:
                    return await run.stream(request, asked.answer)
                return await run.whole(asked.answer)
            finally:
                run.count_left()
                run.describe(request.get(SPAN, NO_SPAN), request.path)

    def _max_tokens(self, body: SamplingRequest, prompt: int, default: int | None, prompt_field: str) -> int:
        room = self.max_model_len - prompt
        if not prompt:
            raise BadRequest(prompt_field, f"{prompt_field} must not be empty")
        asked = body.max_new_tokens
        if room < (asked or 1):
            # OpenAI's words, by which clients know that they must shorten the prompt.
            needed = prompt + (asked or 1)
            raise BadRequest(
                prompt_field if room < 1 else body.max_new_tokens_field,
                f"This model's maximum context length is {self.max_model_len} tokens. However, you requested {needed} "
                f"tokens ({prompt} in the {prompt_field}, {asked or 1} in the completion). Please reduce the length of "
                f"the {prompt_field} or of the completion.",
                "context_length_exceeded",
            )
        limit = min(default or room, room) if asked is None else asked
        if (body.min_tokens or 0) > limit:
            raise BadRequest("min_tokens", f"min_tokens must be at most {limit}, the most this answer may have")
        return limit


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request that has been read. shown_ids: special tokens that are written, for its answer is parsed by them."""

    request_id: str
    body: SamplingRequest
    prompts: list[list[int]]
    prompt_field: str
    default_max_tokens: int | None
    answer: Answer[Any]
    spec: GrammarSpec | None
    shown_ids: frozenset[int] = frozenset()


class _Run:
    """One request on its way: the engine's news become deltas, the deltas an answer."""

    def __init__(
        self,
        routes: GenerationRoutes,
        asked: _Asked,
        generation: Generation,
        internal: bool,
    ) -> None:
        body, prompts = asked.body, asked.prompts
        self._generation = generation
        self._metrics = routes.metrics
        self._body = body
        self._internal = internal
        self._choices = body.n or 1
        self.prompt_tokens = sum(len(prompt) for prompt in prompts)
        self._tally: Tally | None = None
        self._phases = Phases()
        self._reason = "abort"
        include_stop = bool(body.include_stop_str_in_output)
        stop_ids = frozenset(body.stop_token_ids or ())
        self._sequences = [
            Sequence(
                index,
                OutputText(
                    routes.tokenizer,
                    body.stop_strings,
                    include_stop=include_stop,
                    min_tokens=body.min_tokens or 0,
                    shown_ids=asked.shown_ids,
                    after=prompts[index // self._choices],
                ),
                include_stop=include_stop,
                end_ids=routes.eos_token_ids,
                stop_ids=stop_ids,
                is_empty=body.max_new_tokens == 0,
            )
            for index in range(len(prompts) * self._choices)
        ]

    def keep_tally(self, tally: Tally) -> None:
        """Counts there as it goes on, and what was generated in the end, whoever still wanted it."""
        self._tally = tally
        self._generation.on_gone = self._end_tally

    def count_left(self) -> None:
        """Sequences that were wanted no more before their end: mostly the client has gone."""
        if not self._generation.failed and (left := sum(not sequence.finished for sequence in self._sequences)):
            self._metrics.finished.labels("abort").inc(left)

    def describe(self, span: Span, path: str) -> None:
        """Of a request that is traced, how it went."""
        if span.is_recording:
            describe_generation(span, path, self._body.model, self._phases, self._progress(), self._reason)

    def _end_tally(self) -> None:
        assert self._tally is not None
        done = self._progress()
        generated = self._generation.num_generated
        completion = sum(s.num_tokens if s.finished else generated[s.index] for s in self._sequences)
        reason = "error" if self._generation.failed else "abort"
        if self._reason == "error" or all(sequence.finished for sequence in self._sequences):
            reason = self._reason
        # What was refused before its first token has cost nothing.
        prompt = 0 if reason == "error" and not completion else done.prompt_tokens
        self._tally.count(prompt, completion, done.cached_tokens)
        self._tally.end(reason)

    async def whole(self, answer: Answer[Any]) -> web.Response:
        total = [Delta(sequence.index) for sequence in self._sequences]
        async for deltas in self._deltas():
            for delta in deltas:
                total[delta.index].add(delta)
        body = answer.envelope([answer.whole(delta) for delta in total], stream=False, usage=self._usage())
        return web.Response(body=msgspec.json.encode(body), content_type="application/json")

    async def stream(self, request: web.Request, answer: Answer[Any]) -> web.StreamResponse:
        # The first news comes before the headers: what is refused until then is a plain error with its status.
        news = self._deltas()
        deltas = await anext(news)
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )
        try:
            await response.prepare(request)
            opened: set[int] = set()
            while deltas:
                if payload := self._chunks(answer, deltas, opened):
                    await response.write(payload)
                try:
                    deltas = await anext(news, [])
                except Exception as exc:  # noqa: BLE001 - the status is sent; the error goes into the stream
                    await response.write(_event(error_body(as_api_error(exc, request))) + b"data: [DONE]\n\n")
                    return response
            end = b"data: [DONE]\n\n"
            if self._body.include_usage:
                usage = answer.envelope([], stream=True, usage=self._usage(), progress=self._progress_if_internal())
                end = _event(msgspec.json.encode(usage)) + end
            await response.write(end)
            await response.write_eof()
        except ConnectionError:
            # The client went away before the handler was cancelled; leaving aborts what runs.
            return response
        finally:
            await news.aclose()
        return response

    def _chunks(self, answer: Answer[Any], deltas: list[Delta], opened: set[int]) -> bytes:
        usage = self._usage() if self._body.continuous_usage else None if self._body.include_usage else UNSET
        wants_tokens = bool(self._body.return_token_ids)
        progress = self._progress_if_internal()
        payload = []
        for delta in deltas:
            choices = []
            if delta.index not in opened:
                opened.add(delta.index)
                if (opening := answer.opening(delta.index)) is not None:
                    choices.append(opening)
            told = delta.text or delta.logprobs or delta.prompt_logprobs or (wants_tokens and delta.token_ids)
            if (told or delta.finish_reason) and not answer.is_silent(chunk := answer.chunk(delta)):
                choices.append(chunk)
            for choice in choices:
                event = answer.envelope([choice], stream=True, usage=usage, progress=progress)
                payload.append(_event(msgspec.json.encode(event)))
        if self._internal and not payload:
            # The gateway wants to know of every token, also of one whose text is held back.
            payload.append(_event(msgspec.json.encode(answer.envelope([], stream=True, progress=progress))))
        return b"".join(payload)

    async def _deltas(self) -> AsyncGenerator[list[Delta], None]:
        """What the sequences gained, one list for all news that had come; ends when all have ended."""
        arrived = time.perf_counter()
        last: dict[int, float] = {}
        left = len(self._sequences)
        while left:
            outputs: dict[int, list[RequestOutput]] = {}
            for index, output in await self._generation.news():
                outputs.setdefault(index, []).append(output)
            now = time.perf_counter()
            deltas = []
            for index, news in outputs.items():
                sequence = self._sequences[index]
                if sequence.finished:
                    continue
                delta = sequence.take(news)
                self._reason = delta.finish_reason or self._reason
                if delta.finish_reason is not None:
                    self._metrics.finished.labels(delta.finish_reason).inc()
                if delta.error_param is not None:
                    code = "adapter_refused" if delta.error_param == "model" else None
                    raise BadRequest(delta.error_param, delta.error or "", code)
                if delta.error is not None:
                    raise ApiError(500, delta.error, kind="server_error", code="generation_failed")
                if index in last:
                    self._metrics.inter_token_latency.observe(now - last[index])
                else:
                    self._metrics.time_to_first_token.observe(now - arrived)
                    self._phases.first_token(news[0].started_at)
                last[index] = now
                if sequence.finished:
                    left -= 1
                    self._generation.stop(index)
                deltas.append(delta)
            if deltas:
                if self._tally is not None:
                    done = self._progress()
                    self._tally.count(done.prompt_tokens, done.completion_tokens, done.cached_tokens)
                yield deltas

    def _progress(self) -> Progress:
        # A prompt counts once for all of its choices; what the first one computed, the others found in the cache.
        cached = 0
        for start in range(0, len(self._sequences), self._choices):
            group = self._sequences[start : start + self._choices]
            cached += min((s.num_cached_tokens for s in group if s.num_prompt_tokens), default=0)
        return Progress(sum(s.num_tokens for s in self._sequences), self.prompt_tokens, cached)

    def _progress_if_internal(self) -> Progress | msgspec.UnsetType:
        return self._progress() if self._internal else UNSET

    def _usage(self) -> Usage:
        done = self._progress()
        return Usage(
            done.prompt_tokens,
            done.completion_tokens,
            done.prompt_tokens + done.completion_tokens,
            PromptTokensDetails(done.cached_tokens),
        )


async def offload(size: int, work: Callable[[], T]) -> T:
    """Runs the work here if the body is small, else in a thread."""
    return work() if size < OFFLOAD_BYTES else await asyncio.to_thread(work)


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
