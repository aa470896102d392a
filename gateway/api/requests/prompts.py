"""Checks of a request's body, and its token count by its base model's own tokenizer and chat template."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from gateway.api.requests.memory import BodyShare, weigh
from gateway.api.requests.sizes import AnyRequest, check_raw_sizes, check_sizes
from gateway.billing.charges import check_answer_size, weights_of
from gateway.billing.inference_request import InferenceRequest
from gateway.errors import BadRequest
from gateway.fleet.engines.own_requests import NamedBody
from gateway.fleet.engines.traits import OwnFields
from gateway.fleet.kinds.fields import check_fields
from gateway.fleet.tokenizers import Tokenizers
from gateway.records.bases.base import Base
from gateway.records.tenants.tenants import Tenant
from wire.context import answer_too_long, context_exceeded, prompt_too_long
from wire.decoding import decode, is_quick
from wire.requests import ChatCompletionRequest, CompletionRequest
from wire.text.tokenizer import TextTooLong, Tokenizer

# OpenAI's default for /v1/completions.
COMPLETION_MAX_TOKENS = 16
# Larger bodies are parsed on a thread, because the event loop may be blocked for 1 ms at most.
INLINE_BYTES = 8192
# The values of larger bodies are counted on a thread: a pass over 8 MiB takes 1 to 14 ms, and there are eight of them.
COUNTED_INLINE_BYTES = 2**18
# Part of a body that is counted at once, in 0.1 to 0.5 ms with the interpreter lock, and the pause after it.
COUNTED_BYTES, COUNT_PAUSE_SECONDS = 2**16, 0.0005

# Limits of a body's values, each of which takes some hundred bytes of memory: 8 MiB of `[],` took 193 MiB and seconds
# of the event loop. Brackets, commas and colons within texts count as well; a prompt that fits the context stays below.
MAX_CONTAINERS = 10_000
MAX_VALUES = 200_000
MAX_MEMBERS = 50_000


# Returns the number of tokens of each prompt.
CountTokens = Callable[[], list[int]]


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """An inference route. name: as in the ledger and the metrics. path: the same here and on the engines."""

    name: str
    path: str
    kind: type[ChatCompletionRequest] | type[CompletionRequest]


CHAT = Endpoint(name="chat.completions", path="/v1/chat/completions", kind=ChatCompletionRequest)
COMPLETIONS = Endpoint(name="completions", path="/v1/completions", kind=CompletionRequest)


class PromptReader:
    """Parser and token counter of request bodies.

    own_fields: the further fields of the foreign servers that are listed (gateway/fleet/kinds/fields.py); None without
    such servers.

    Raises the protocol's BadRequest naming the field, ChatTemplateError, or BadRequest for a prompt that is too long.
    """

    def __init__(
        self,
        tokenizers: Tokenizers,
        default_max_tokens: int,
        *,
        max_answer_bytes: int = 2**23,
        max_event_bytes: int = 2**20,
        own_fields: Sequence[type[OwnFields]] | None = None,
    ) -> None:
        self._max_answer_bytes = max_answer_bytes
        self._max_event_bytes = max_event_bytes
        self._own_fields = own_fields
        self._tokenizers = tokenizers
        self._default_max_tokens = default_max_tokens

    async def parse(self, raw: bytes, endpoint: Endpoint, share: BodyShare) -> AnyRequest:
        """Return the checked body. Unknown fields are refused if foreign servers are listed, else ignored."""
        if len(raw) <= INLINE_BYTES:
            return share.run_here(partial(self._parse, raw, endpoint))
        size = partial(_decoded_bytes, raw)
        share.decode(len(raw), size() if len(raw) <= COUNTED_INLINE_BYTES else await share.run(size))
        return await share.run(partial(self._parse, raw, endpoint))

    def _parse(self, raw: bytes, endpoint: Endpoint) -> AnyRequest:
        prompt_bytes = check_raw_sizes(raw, endpoint.kind)
        if self._own_fields is not None:
            raw = check_fields(raw, endpoint.kind, self._own_fields)
        request = decode(endpoint.kind, raw)
        check_sizes(request, prompt_bytes)
        return request

    async def counts_here(self, base: Base) -> bool:
        """Return whether this process counts the base's prompts, and no engine."""
        return await self._tokenizers.of(base) is not None

    async def counter(
        self, request: AnyRequest, raw: bytes, share: BodyShare, base: Base, tenant: Tenant
    ) -> CountTokens:
        """Return the function that counts the tokens of each prompt, after an engine has counted them if need be.

        Raises NoEngine if engines count the base's prompts and none is available.
        """
        _check_max_tokens(request, base.context_length)
        tokenizer = await self._tokenizers.of(base)
        if tokenizer is not None:
            return partial(_lengths, tokenizer, request, base.context_length)
        try:
            counted = await share.wait(partial(self._tokenizers.count, base, request, raw, tenant))
        except TextTooLong as error:
            raise prompt_too_long(_prompt_field(request), base.context_length, error.at_least) from None
        return lambda: counted

    async def measure(
        self, request: AnyRequest, raw: bytes, share: BodyShare, base: Base, count: CountTokens
    ) -> InferenceRequest:
        """Return a parsed body with its token counts, which are checked against the base model's context.

        count: the function that `counter` returned.
        """
        work = partial(self._measure, request, raw, base.context_length, count)
        return share.run_here(work) if is_quick(raw) else await share.run(work)

    def _measure(self, request: AnyRequest, raw: bytes, limit: int, count: CountTokens) -> InferenceRequest:
        """Return the checked body. limit: the context length."""
        is_chat, field = isinstance(request, ChatCompletionRequest), _prompt_field(request)
        try:
            lengths = count()
        except TextTooLong as error:
            raise prompt_too_long(field, limit, error.at_least) from None
        longest, prompt_tokens = max(lengths), sum(lengths)
        max_tokens = request.max_new_tokens
        if max_tokens is None:
            default = self._default_max_tokens if is_chat else COMPLETION_MAX_TOKENS
            max_tokens = max(1, min(default, limit - longest))
        if longest + max_tokens > limit:
            raise context_exceeded(field, limit, longest, max_tokens, field)
        choices = len(lengths) * (request.n or 1)
        most = self._max_event_bytes if request.stream else self._max_answer_bytes
        check_answer_size(request, prompt_tokens, choices * max_tokens, most)
        body = self._fields(request, raw)
        if request.max_new_tokens is None:
            # Sent explicitly, so that the engine stops at the reservation's limit.
            body["max_tokens"] = max_tokens
        elif request.max_new_tokens_field != "max_tokens":
            # Servers differ in which of the two fields they prefer, and the reservation counts one.
            body.pop("max_tokens", None)
        if request.stream:
            body["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
        return InferenceRequest(
            body=body,
            named=NamedBody(body),
            stream=bool(request.stream),
            include_usage=request.include_usage,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            choices=choices,
            max_tokens_field=request.max_new_tokens_field,
            weights=weights_of(request),
            has_default_length=request.max_new_tokens is None,
        )

    def _fields(self, request: AnyRequest, raw: bytes) -> dict[str, Any]:
        """Return the body's fields. Fields that the protocol does not define stay encoded as they were sent."""
        if self._own_fields is not None:
            return dict(msgspec.json.decode(raw, type=dict[str, Any]))
        known = request.__struct_fields__
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        return {name: msgspec.json.decode(field) if name in known else field for name, field in fields.items()}


def _prompt_field(request: AnyRequest) -> str:
    return "messages" if isinstance(request, ChatCompletionRequest) else "prompt"


def _check_max_tokens(request: AnyRequest, limit: int) -> None:
    """Refuse an answer that is longer than the context before the prompt's tokens are counted, which takes 10 ms.

    Raises BadRequest.
    """
    if (request.max_new_tokens or 0) > limit:
        raise answer_too_long(request.max_new_tokens_field, limit, request.max_new_tokens or 0)


def _lengths(tokenizer: Tokenizer, request: AnyRequest, limit: int) -> list[int]:
    """Return the number of tokens of each prompt."""
    if isinstance(request, ChatCompletionRequest):
        return [len(tokenizer.encode_chat(*request.template_input(), limit=limit))]
    encode = partial(tokenizer.encode, add_special_tokens=request.add_special_tokens is not False, limit=limit)
    return [len(encode(p) if isinstance(p, str) else p) for p in request.prompts()]


def _decoded_bytes(raw: bytes) -> int:
    """Return the memory that a decoded body takes, in bytes. Raises BadRequest for a body with too many values."""
    containers = values = members = 0
    is_narrow = True
    for start in range(0, len(raw), COUNTED_BYTES):
        end = start + COUNTED_BYTES
        containers += _count(raw, b"[", start, end) + _count(raw, b"{", start, end)
        values += _count(raw, b",", start, end)
        members += _count(raw, b":", start, end)
        is_narrow = is_narrow and raw.find(b"\\u", start, end + 1) < 0 and raw[start:end].isascii()
        if containers > MAX_CONTAINERS or values > MAX_VALUES or members > MAX_MEMBERS:
            raise BadRequest(
                f"The body has too many values: expected at most {MAX_CONTAINERS} lists and objects, "
                f"{MAX_VALUES} values, and {MAX_MEMBERS} fields of objects."
            )
        if len(raw) > COUNTED_INLINE_BYTES:
            # Other threads, first of all the event loop's, get the interpreter lock between two parts.
            time.sleep(COUNT_PAUSE_SECONDS)
    return weigh(len(raw), containers, values, is_narrow=is_narrow)


def _count(raw: bytes, character: bytes, start: int, end: int) -> int:
    # `find` is ten times faster than `count`, and most parts of a large text have none of the characters.
    return raw.count(character, start, end) if raw.find(character, start, end) >= 0 else 0
