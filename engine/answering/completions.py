"""The routes /v1/completions and /v1/chat/completions: prompt to tokens, tokens to the engine, deltas to the client."""

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from aiohttp import web

from engine.answering.activation import adapter_start
from engine.answering.answers import ChatAnswer, CompletionAnswer
from engine.answering.caller import Caller
from engine.answering.in_flight import InFlight
from engine.answering.model_names import ModelRegistry, Served
from engine.answering.report import Report
from engine.answering.request_threads import LONG, RequestThreads
from engine.answering.running import Asked, Run
from engine.answering.sampling import sampling_params
from engine.answering.sequence_group import SequenceGroup
from engine.answering.token_rules import token_rules
from engine.answering.tool_calls.format import ToolFormat
from engine.answering.usage_log import UsageLog
from engine.metrics.metrics import Metrics
from engine.sampling_defaults import SamplingDefaults
from engine.scheduling.request import NewRequest
from engine.state import EngineFacts
from wire.context import context_exceeded, prompt_too_long
from wire.decoding import decode, is_quick
from wire.errors import BadRequest
from wire.http_body import read_body
from wire.requests import ChatCompletionRequest, CompletionRequest, SamplingRequest
from wire.telemetry.spans import NO_SPAN, SPAN
from wire.text.tokenizer import TextTooLong, Tokenizer

# Limit of log-probabilities in one answer. Each takes about 60 bytes of JSON, and as many again during encoding: 128
# MiB in all.
MAX_LOGPROB_ENTRIES = 1 << 20


@dataclass(frozen=True, slots=True)
class GenerationRoutes:
    """The two generating routes. Each parses the body, queues the sequences, then sends a complete answer or a stream
    of chunks.
    """

    tokenizer: Tokenizer
    facts: EngineFacts
    in_flight: InFlight
    models: ModelRegistry
    metrics: Metrics
    tool_format: ToolFormat | None
    usage_log: UsageLog
    defaults: SamplingDefaults
    threads: RequestThreads

    async def completions(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        raw = await read_body(request)
        with self._naming("prompt"):
            read = partial(self._read_completion, raw)
            body, prompts, echo = await self.threads.run(caller, read, is_long=not is_quick(raw))
        request_id = uuid.uuid4().hex
        shown_ids = self._shown_ids(body)
        answer = CompletionAnswer(request_id, body, prompts, self.tokenizer, echo, shown_ids)
        asked = Asked(request_id, body, prompts, "prompt", 16, answer, body.grammar_spec(), shown_ids)
        return await self._answer(request, caller, asked)

    async def chat(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        raw = await read_body(request)
        with self._naming("messages"):
            body, prompts = await self.threads.run(caller, partial(self._read_chat, raw), is_long=not is_quick(raw))
        request_id = uuid.uuid4().hex
        parsers, shown_ids, spec = None, self._shown_ids(body), body.grammar_spec()
        if body.tools and body.tool_choice != "none":
            form = self.tool_format
            if form is None:
                raise BadRequest(
                    "tools", "tools: the format of this model's tool calls is unknown; set --tool-call-parser."
                )
            parallel = body.parallel_tool_calls is not False
            names = [tool.function.name for tool in body.tools]
            parsers = [form.parser(names, parallel) for _ in range(body.n or 1)]
            shown_ids |= self.tokenizer.special_ids & {self.tokenizer.token_id(marker) for marker in form.markers}
            if body.must_call:
                make = partial(form.grammar, body.tools or [], body.tool_choice, parallel)
                spec = await self.threads.run(caller, make, is_long=len(raw) >= LONG)
        answer = ChatAnswer(request_id, body, prompts, self.tokenizer, parsers)
        asked = Asked(request_id, body, prompts, "messages", None, answer, spec, shown_ids)
        return await self._answer(request, caller, asked)

    def _read_completion(self, raw: bytes) -> tuple[CompletionRequest, list[list[int]], list[tuple[str, list[int]]]]:
        """Return the body, its prompts' ids, and per choice the prompt's text and ids for `echo` (empty without
        `echo`).
        """
        body = decode(CompletionRequest, raw)
        given, limit = body.prompts(), self.facts.max_model_len
        encode = partial(self.tokenizer.encode, add_special_tokens=body.add_special_tokens is not False, limit=limit)
        prompts = [encode(p) if isinstance(p, str) else p for p in given]
        if not body.echo:
            return body, prompts, []
        hidden = body.skip_special_tokens is not False
        texts = [p if isinstance(p, str) else self.tokenizer.decode(p, skip_special_tokens=hidden) for p in given]
        return body, prompts, [pair for pair in zip(texts, prompts, strict=True) for _ in range(body.n or 1)]

    def _read_chat(self, raw: bytes) -> tuple[ChatCompletionRequest, list[list[int]]]:
        body = decode(ChatCompletionRequest, raw)
        return body, [self.tokenizer.encode_chat(*body.template_input(), limit=self.facts.max_model_len)]

    @contextmanager
    def _naming(self, prompt_field: str) -> Iterator[None]:
        try:
            yield
        except TextTooLong as exc:
            raise prompt_too_long(prompt_field, self.facts.max_model_len, exc.at_least) from None

    def _shown_ids(self, body: SamplingRequest) -> frozenset[int]:
        """Return the special tokens that are written as text."""
        return self.tokenizer.special_ids if body.skip_special_tokens is False else frozenset()

    async def _answer(self, request: web.Request, caller: Caller, asked: Asked) -> web.StreamResponse:
        body, prompts, prompt_field = asked.body, asked.prompts, asked.prompt_field
        limits = [self._max_tokens(body, len(prompt), asked.default_max_tokens, prompt_field) for prompt in prompts]
        sequences = (body.n or 1) * len(prompts)
        self._check_logprobs(body, prompts)
        most = self.in_flight.max_requests(caller.tenant_id)
        if sequences > most:
            flags = f"{'half of ' if caller.tenant_id else ''}--max-num-seqs and --max-waiting together"
            raise BadRequest(prompt_field, f"{prompt_field} and n: expected at most {most} sequences, {flags}.")
        # The request holds its places while it waits for an adapter or a grammar, and until its answer is sent.
        with self.in_flight.place(sequences, caller.tenant_id):
            async with self.models.using(body.model, caller.tenant_id, caller.weight) as adapter:
                rules = await token_rules(body, asked.spec, self.tokenizer, lambda work: self.threads.run(caller, work))
                group = self.in_flight.submit(await self._sequences(caller, asked, limits, adapter), rules)
                return await self._run(request, caller, asked, group)

    async def _sequences(self, caller: Caller, asked: Asked, limits: list[int], adapter: Served) -> list[NewRequest]:
        """Return the sequences for the engine: each prompt `n` times. limits: `max_tokens` of each prompt."""
        body = asked.body
        salt = body.cache_salt or ""

        def hash_prompts() -> list[tuple[int, list[bytes]]]:
            hashed = partial(
                self.facts.prefix_keys, adapter_digest=adapter.digest, tenant_id=caller.tenant_id, cache_salt=salt
            )
            starts = [adapter_start(prompt, adapter.invocation) for prompt in asked.prompts]
            return [(at, hashed(prompt, adapter_start=at)) for prompt, at in zip(asked.prompts, starts, strict=True)]

        keys = await self.threads.run(caller, hash_prompts, is_long=sum(map(len, asked.prompts)) >= LONG)
        return [
            NewRequest(
                f"{asked.request_id}-{prompt_index * (body.n or 1) + i}",
                prompt,
                # A request with `max_tokens` 0 generates one token, because the prompt's log-probabilities arrive with
                # it.
                sampling_params(body, max(limit, 1), i, self.defaults),
                adapter_digest=adapter.digest,
                tenant_id=caller.tenant_id,
                weight=caller.weight,
                # The tenant's priority shifts all of its requests alike, so their order depends on the request's.
                priority=caller.priority + (body.priority or 0),
                ttft_target=body.ttft_target or caller.ttft_target,
                arrived_at=caller.arrived_at,
                cache_salt=salt,
                prefix_keys=prompt_keys,
                adapter_start=start,
            )
            for prompt_index, (prompt, limit, (start, prompt_keys)) in enumerate(
                zip(asked.prompts, limits, keys, strict=True)
            )
            for i in range(body.n or 1)
        ]

    async def _run(
        self, request: web.Request, caller: Caller, asked: Asked, group: SequenceGroup
    ) -> web.StreamResponse:
        with group:
            run = Run(asked, group, self.tokenizer, self.facts.eos_token_ids, self.metrics, caller, self.threads)
            if caller.request_id is not None:
                run.keep_counts(self.usage_log.open(caller.request_id, run.prompt_tokens), caller.allowance)
            try:
                if asked.body.stream:
                    # Each token resumes the frames of this task only, not those of the handlers around it.
                    return await asyncio.create_task(run.stream(request, asked.answer))
                return await run.whole(request, asked.answer, Report(request, group))
            finally:
                run.count_left()
                run.describe(request.get(SPAN, NO_SPAN), request.path)

    def _check_logprobs(self, body: SamplingRequest, prompts: list[list[int]]) -> None:
        """Limit the memory of an answer: each token of each choice has its own log-probability and those of the
        likeliest tokens. Raises BadRequest.
        """
        of_prompt, of_answer = body.num_prompt_logprobs, body.num_logprobs
        choices, prompt_tokens = body.n or 1, sum(map(len, prompts))
        entries = 0 if of_prompt is None else choices * prompt_tokens * (of_prompt + 1)
        if of_answer is not None:
            entries += choices * len(prompts) * (body.max_new_tokens or 0) * (of_answer + 1)
        if entries > MAX_LOGPROB_ENTRIES:
            field = "logprobs" if of_prompt is None else "prompt_logprobs"
            raise BadRequest(
                field,
                f"{field}: expected at most {MAX_LOGPROB_ENTRIES} log-probabilities in one answer, which are tokens "
                f"times choices times the likeliest of each; got {entries}.",
            )

    def _max_tokens(self, body: SamplingRequest, prompt: int, default: int | None, prompt_field: str) -> int:
        context = self.facts.max_model_len
        room = context - prompt
        if not prompt:
            raise BadRequest(prompt_field, f"{prompt_field}: expected at least one token.")
        asked = body.max_new_tokens
        if room < (asked or 1):
            field = prompt_field if room < 1 else body.max_new_tokens_field
            raise context_exceeded(field, context, prompt, asked or 1, prompt_field)
        limit = min(default or room, room) if asked is None else asked
        if (body.min_tokens or 0) > limit:
            raise BadRequest("min_tokens", f"min_tokens: expected at most {limit}, the token limit of this answer.")
        return limit
