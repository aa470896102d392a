"""The parts that completions and chat answers share: choices, log-probabilities, chunks. No HTTP."""

import time
from abc import ABC, abstractmethod
from itertools import takewhile
from typing import Generic, TypeVar, cast

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from engine.answering.sequence import Delta, EncodedLogprobs
from engine.answering.tool_calls.parser import CallDelta, Parsed, ToolCallParser
from engine.scheduling.request import TokenLogprobs
from wire.chat import NamedTool
from wire.requests import ChatCompletionRequest, CompletionRequest, SamplingRequest
from wire.responses import (
    CalledFunction,
    CalledTool,
    ChatChoice,
    ChatCompletion,
    ChatLogprob,
    ChatLogprobs,
    ChatMessage,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    GenerationProgress,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
    Usage,
)
from wire.text.detokenizer import Stream
from wire.text.tokenizer import Tokenizer

# Maximum number of special tokens, such as <s>, that a tokenizer puts before a text. An echoed text omits them.
MAX_LEADING_SPECIALS = 2
# The text and ids of a prompt that is not echoed.
NO_ECHO: tuple[str, list[int]] = ("", [])

ChoiceT = TypeVar("ChoiceT", CompletionChoice, ChatChoice)


class Answer(ABC, Generic[ChoiceT]):
    """An answer, complete or in chunks, in one of the two API formats: completions or chat."""

    id_prefix: str

    def __init__(self, request_id: str, body: SamplingRequest, prompts: list[list[int]], tokenizer: Tokenizer) -> None:
        self._id = f"{self.id_prefix}-{request_id}"
        self._created = int(time.time())
        self._body = body
        self._prompts = prompts
        self._tokenizer = tokenizer

    @abstractmethod
    def opening(self, index: int) -> ChoiceT | None:
        """Return the chunk that opens a choice in a stream, before its first text; None if the format has none."""

    @abstractmethod
    def chunk(self, delta: Delta) -> ChoiceT:
        """Return the next chunk of a choice in a stream."""

    def is_silent(self, chunk: ChoiceT) -> bool:
        """Return whether a chunk is empty, so that it need not be sent."""
        return False

    @abstractmethod
    def whole(self, delta: Delta) -> ChoiceT:
        """Return a complete choice of an answer that is not streamed."""

    def encode(self, delta: Delta) -> None:
        """Encode the delta's log-probabilities of generated tokens, which takes 20 to 30 us for 20 likeliest tokens."""
        delta.encoded += [EncodedLogprobs(e.token_id, e.logprob, _encoded(self._entry(e))) for e in delta.logprobs]
        delta.logprobs = []

    @abstractmethod
    def _entry(self, entry: TokenLogprobs) -> Struct | dict[str, float]:
        """Return a token's log-probabilities in the form of the answer."""

    @abstractmethod
    def envelope(
        self,
        choices: list[ChoiceT],
        *,
        stream: bool,
        usage: Usage | UnsetType | None = UNSET,
        progress: GenerationProgress | UnsetType = UNSET,
    ) -> Completion | ChatCompletion:
        """Return the response body, or the stream event, that carries the choices."""

    def _name(self, token_id: int) -> str:
        if self._body.return_tokens_as_token_ids:
            return f"token_id:{token_id}"
        return self._text(token_id)

    def _text(self, token_id: int) -> str:
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    def _ids(self, token_ids: list[int]) -> list[int] | UnsetType:
        """Return the ids if the request has `return_token_ids`, else UNSET, which omits the field."""
        return token_ids if self._body.return_token_ids else UNSET

    def _of_prompt(self, delta: Delta) -> PromptLogprobs | UnsetType:
        if self._body.prompt_logprobs is None or delta.prompt_logprobs is None:
            return UNSET
        return [None if entry is None else self._at_place(entry) for entry in delta.prompt_logprobs]

    def _at_place(self, entry: TokenLogprobs) -> dict[str, PromptLogprob]:
        likeliest = list(zip(entry.top_ids, entry.top_logprobs, strict=True))[: self._body.prompt_logprobs]
        place = {entry.token_id: PromptLogprob(entry.logprob, entry.rank, self._text(entry.token_id))}
        for rank, (token_id, logprob) in enumerate(likeliest, 1):
            place.setdefault(token_id, PromptLogprob(logprob, rank, self._text(token_id)))
        by_id = {str(token_id): logprob for token_id, logprob in place.items()}
        return cast("dict[str, PromptLogprob]", _encoded(by_id))


class CompletionAnswer(Answer[CompletionChoice]):
    id_prefix = "cmpl"

    def __init__(
        self,
        request_id: str,
        body: CompletionRequest,
        prompts: list[list[int]],
        tokenizer: Tokenizer,
        echo: list[tuple[str, list[int]]],
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        """echo: per choice, the prompt's text and ids that precede it; empty without `echo`. shown_ids: special tokens
        that are written as text.
        """
        super().__init__(request_id, body, prompts, tokenizer)
        self._echo = dict(enumerate(echo))
        self._unopened = set(range(len(prompts) * (body.n or 1)))
        self._prompt_is_text = isinstance(body.prompts()[0], str)
        self._top_logprobs = body.logprobs
        self._shown_ids = shown_ids
        self._streams: dict[int, Stream] = {}
        self._offsets: dict[int, int] = {}

    def opening(self, index: int) -> None:
        return None

    def chunk(self, delta: Delta) -> CompletionChoice:
        prompt, prompt_ids = self._echo.pop(delta.index, NO_ECHO)
        logprobs = None
        if self._top_logprobs is not None:
            self.encode(delta)
            tokens: list[tuple[int, float | None, Raw | None]] = []
            offsets: list[int] = []
            if prompt_ids and delta.prompt_logprobs is not None:
                for token_id, entry in zip(prompt_ids, delta.prompt_logprobs, strict=True):
                    likeliest = None if entry is None else _encoded(self._entry(entry))
                    tokens.append((token_id, None if entry is None else entry.logprob, likeliest))
                offsets += self._place_prompt(delta.index, prompt, prompt_ids)
            if prompt_ids:
                self._offsets[delta.index] = len(prompt)
            tokens += delta.encoded
            if delta.index not in self._streams:
                before = self._prompts[delta.index // (self._body.n or 1)]
                self._streams[delta.index] = self._tokenizer.stream(self._shown_ids, before)
            offsets += self._place(delta.index, [entry.token_id for entry in delta.encoded], self._streams[delta.index])
            logprobs = self._logprobs(tokens, offsets) if tokens else None
        choice = CompletionChoice(
            delta.index,
            prompt + delta.text,
            logprobs,
            delta.finish_reason,
            delta.stop_reason,
            self._of_prompt(delta),
            token_ids=self._ids(delta.token_ids),
        )
        if delta.index in self._unopened:
            self._unopened.discard(delta.index)
            choice.prompt_token_ids = self._ids(self._prompts[delta.index // (self._body.n or 1)])
        return choice

    def whole(self, delta: Delta) -> CompletionChoice:
        return self.chunk(delta)

    def envelope(
        self,
        choices: list[CompletionChoice],
        *,
        stream: bool,
        usage: Usage | UnsetType | None = UNSET,
        progress: GenerationProgress | UnsetType = UNSET,
    ) -> Completion:
        return Completion(self._id, "text_completion", self._created, self._body.model, choices, usage, progress)

    def _place_prompt(self, index: int, prompt: str, prompt_ids: list[int]) -> list[int]:
        """Return the text offset of each prompt token, as `_place` does. A prompt given as text is echoed unchanged:
        with the special tokens written in it, and without those that the tokenizer put before it.
        """
        if not self._prompt_is_text:
            return self._place(index, prompt_ids, self._tokenizer.stream(self._shown_ids))
        special_ids = self._tokenizer.special_ids
        leading = [self._text(i) for i in takewhile(special_ids.__contains__, prompt_ids)]
        added = next((n for n in range(MAX_LEADING_SPECIALS + 1) if prompt.startswith("".join(leading[n:]))), 0)
        return [0] * added + self._place(index, prompt_ids[added:], self._tokenizer.stream(special_ids))

    def _place(self, index: int, token_ids: list[int], stream: Stream) -> list[int]:
        """Return the text offset of each token. A token that is part of a character gets that character's offset."""
        end = self._offsets.get(index, 0)
        offsets = []
        for token_id in token_ids:
            start, piece, name = end, stream.push((token_id,)), self._text(token_id)
            end += len(piece)
            # The piece may begin with text that was held back from earlier tokens.
            offsets.append(end - len(name) if piece.endswith(name) else start)
        self._offsets[index] = end
        return offsets

    def _logprobs(self, tokens: list[tuple[int, float | None, Raw | None]], offsets: list[int]) -> CompletionLogprobs:
        return CompletionLogprobs(
            text_offset=offsets,
            token_logprobs=[logprob for _, logprob, _ in tokens],
            tokens=[self._name(token_id) for token_id, _, _ in tokens],
            top_logprobs=[cast("dict[str, float] | None", likeliest) for _, _, likeliest in tokens],
        )

    def _entry(self, entry: TokenLogprobs) -> dict[str, float]:
        """Return the log-probabilities of the likeliest tokens and the chosen one. Among tokens with the same text,
        keep the chosen one, else the likeliest.
        """
        top = {self._name(entry.token_id): entry.logprob}
        likeliest = list(zip(entry.top_ids, entry.top_logprobs, strict=True))[: self._top_logprobs]
        for token_id, logprob in likeliest:
            top.setdefault(self._name(token_id), logprob)
        return top


class ChatAnswer(Answer[ChatChoice]):
    id_prefix = "chatcmpl"

    def __init__(
        self,
        request_id: str,
        body: ChatCompletionRequest,
        prompts: list[list[int]],
        tokenizer: Tokenizer,
        parsers: list[ToolCallParser] | None = None,
    ) -> None:
        """parsers: one for each choice of a request with tools."""
        super().__init__(request_id, body, prompts, tokenizer)
        self._parsers = parsers
        self._must_call = body.must_call
        self._is_named = isinstance(body.tool_choice, NamedTool)
        self._whole_prompt: PromptLogprobs | UnsetType = UNSET
        self._is_opened = False

    def opening(self, index: int) -> ChatChoice:
        return ChatChoice(index, delta=ChatMessage("assistant", None if self._must_call else ""))

    def chunk(self, delta: Delta) -> ChatChoice:
        # The delta has no content if the last chunk carries no text, or if all text so far may belong to a tool call.
        parsed, finish_reason = self._parse(delta)
        says = parsed.content or not (finish_reason or self._parsers)
        message = ChatMessage(content=parsed.content if says else UNSET)
        if parsed.calls:
            message.tool_calls = [_called(call, call.index) for call in parsed.calls]
        return self._choice(delta, finish_reason, delta=message)

    def is_silent(self, chunk: ChatChoice) -> bool:
        says = chunk.delta != ChatMessage() or chunk.logprobs is not None or chunk.token_ids
        return not says and chunk.finish_reason is None

    def whole(self, delta: Delta) -> ChatChoice:
        if self._whole_prompt is UNSET:
            self._whole_prompt = self._of_prompt(delta)
        parsed, finish_reason = self._parse(delta)
        message = ChatMessage("assistant", parsed.content)
        if parsed.calls:
            message.content = parsed.content or None
            message.tool_calls = [_called(call) for call in parsed.calls]
        return self._choice(delta, finish_reason, message=message)

    def _choice(self, gained: Delta, finish_reason: str | None, **said: ChatMessage) -> ChatChoice:
        return ChatChoice(
            gained.index,
            logprobs=self._logprobs(gained),
            finish_reason=finish_reason,
            stop_reason=gained.stop_reason,
            token_ids=self._ids(gained.token_ids),
            **said,
        )

    def _parse(self, delta: Delta) -> tuple[Parsed, str | None]:
        """Return the text's content and calls, and the finish reason, which is "tool_calls" after a call."""
        if self._parsers is None:
            return Parsed(delta.text), delta.finish_reason
        parser = self._parsers[delta.index]
        parsed = parser.push(delta.text)
        if delta.finish_reason is None:
            return parsed, None
        rest = parser.finish()
        parsed = Parsed(parsed.content + rest.content, parsed.calls + rest.calls)
        # OpenAI and vLLM finish with "stop" if the request named the function, because the model did not choose to
        # call.
        called = parser.has_calls and delta.finish_reason == "stop" and not self._is_named
        return parsed, "tool_calls" if called else delta.finish_reason

    def envelope(
        self,
        choices: list[ChatChoice],
        *,
        stream: bool,
        usage: Usage | UnsetType | None = UNSET,
        progress: GenerationProgress | UnsetType = UNSET,
    ) -> ChatCompletion:
        kind = "chat.completion.chunk" if stream else "chat.completion"
        answer = ChatCompletion(self._id, kind, self._created, self._body.model, choices, usage, progress)
        answer.prompt_logprobs = self._whole_prompt
        if not self._is_opened:
            self._is_opened = True
            answer.prompt_token_ids = self._ids(self._prompts[0])
        return answer

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        self.encode(delta)
        if not delta.encoded:
            return None
        return ChatLogprobs([cast("ChatLogprob", entry.json) for entry in delta.encoded])

    def _entry(self, entry: TokenLogprobs) -> ChatLogprob:
        top = [
            TopLogprob(self._name(token_id), logprob, list(self._tokenizer.token_bytes(token_id)))
            for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
        ]
        raw = list(self._tokenizer.token_bytes(entry.token_id))
        return ChatLogprob(self._name(entry.token_id), entry.logprob, raw, top)


def _encoded(value: object) -> Raw:
    """Encode a token's log-probabilities at once: JSON takes a fifth of the objects' memory, and no single call takes
    long.
    """
    return Raw(msgspec.json.encode(value))


def _called(call: CallDelta, index: int | UnsetType = UNSET) -> CalledTool:
    first = call.call_id is not None
    function = CalledFunction(call.arguments, call.name if call.name is not None else UNSET)
    return CalledTool(
        function, call.call_id if call.call_id is not None else UNSET, "function" if first else UNSET, index
    )
