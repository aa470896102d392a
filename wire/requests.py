"""Request types of the OpenAI API, checked field by field; wire/responses.py has the response types.

`decode` turns a body into a request struct whose fields are all in range, or raises `BadRequest` naming the field.
Unknown fields are ignored. Known fields of the API that are not served are refused when they ask for something.
"""

from typing import Annotated, Any

from msgspec import Meta, Struct

from wire.chat import (
    MAX_TOOLS,
    Conversation,
    Message,
    Tool,
    ToolChoice,
    check_messages,
    check_template_fields,
    check_tools,
    conversation_of,
)
from wire.deadlines import MAX_PRIORITY
from wire.decoding import decode as decode
from wire.decoding import refuse
from wire.errors import BadRequest
from wire.structured import KINDS, GrammarSpec, read_spec

MAX_CHOICES = 16
MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 256
MAX_BIASED_TOKENS = 1024
MAX_BAD_WORDS = 1024
# Each character is encoded three times; without this limit a request costs the engine some 100 ms of CPU time.
MAX_BAD_WORD_CHARS = 16_384
MAX_ALLOWED_TOKENS = 1 << 18
MAX_TOP_LOGPROBS = 20
MAX_PROMPTS = 2048

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Count = Annotated[int, Meta(ge=0, le=2**31 - 1)]
PositiveCount = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
BadWord = Annotated[str, Meta(min_length=1, max_length=256)]
NotServed = Annotated[Any, Meta(description="A field of the API that is not served: refused if it asks for something.")]


class StreamOptions(Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingRequest(Struct, kw_only=True):
    """The fields common to completions and chat. None means not given."""

    model: str
    max_tokens: PositiveCount | None = None
    min_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Fraction | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_BIASED_TOKENS)] | None
    ) = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED_TOKENS)] | None = None
    bad_words: Annotated[list[BadWord], Meta(max_length=MAX_BAD_WORDS)] | None = None
    prompt_logprobs: TopLogprobs | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=1024)] | None = None
    # Both order the request among its tenant's own. A lower priority goes first; the target is in seconds.
    priority: Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    ttft_target: Annotated[float, Meta(gt=0, le=3600)] | None = None
    user: Annotated[str | None, Meta(description="Always gets the same version of an alias with weights.")] = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    # Fields of vLLM. They are refused, because ignoring them would change the answer.
    ec_transfer_params: NotServed = None
    guided_whitespace_pattern: NotServed = None
    kv_transfer_params: NotServed = None
    length_penalty: NotServed = None
    logits_processors: NotServed = None
    logprob_token_ids: NotServed = None
    repetition_detection: NotServed = None
    thinking_token_budget: NotServed = None
    truncate_prompt_tokens: NotServed = None
    use_beam_search: NotServed = None
    vllm_xargs: NotServed = None
    watermarking: NotServed = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Return whether every event of a stream reports the request's total usage so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return () if self.stop is None else (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def max_new_tokens(self) -> int | None:
        """Return the requested limit, or None if the request has none."""
        return self.max_tokens

    @property
    def max_new_tokens_field(self) -> str:
        return "max_tokens"

    @property
    def num_logprobs(self) -> int | None:
        """Return the number of most likely tokens to report beside the chosen one; None for no log-probabilities."""
        raise NotImplementedError

    @property
    def must_call(self) -> bool:
        """Return whether the answer must be a tool call."""
        return False

    def check(self) -> None:
        """Raise BadRequest for the first field out of range."""
        refuse(self, "logits_processors", "vllm_xargs", allowed=([], {}))
        refuse(self, "use_beam_search", "watermarking", allowed=(False,))
        refuse(self, "length_penalty", allowed=(1,))
        refuse(self, "thinking_token_budget", allowed=(-1,))
        refuse(self, "guided_whitespace_pattern", "logprob_token_ids", "repetition_detection", "truncate_prompt_tokens")
        refuse(self, "ec_transfer_params", "kv_transfer_params")
        if (self.grammar_spec() is not None or self.must_call) and self.allowed_token_ids is not None:
            # Both constraints together may leave no allowed token.
            raise BadRequest(
                "allowed_token_ids", "allowed_token_ids: cannot be combined with a grammar or a required call."
            )
        chars = sum(map(len, self.bad_words or ()))
        if chars > MAX_BAD_WORD_CHARS:
            raise BadRequest("bad_words", f"bad_words: expected at most {MAX_BAD_WORD_CHARS} characters, got {chars}.")
        limit = self.max_new_tokens
        if limit is not None and (self.min_tokens or 0) > limit:
            raise BadRequest("min_tokens", f"min_tokens: expected at most {self.max_new_tokens_field} ({limit}).")
        for key in self.logit_bias or ():
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                raise BadRequest("logit_bias", f"logit_bias: expected numbers by token id, got the key {key[:40]!r}.")
        if self.prompt_logprobs is not None and self.stream:
            raise BadRequest("prompt_logprobs", "prompt_logprobs: is not available in a stream.")
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options", "stream_options: expected only with stream true.")

    def grammar_spec(self) -> GrammarSpec | None:
        """Return the grammar that the answer must follow, or None. Raises BadRequest."""
        guided = {kind: getattr(self, f"guided_{kind}") for kind in KINDS}
        return read_spec(self.response_format, self.structured_outputs, guided)

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Return the number of most likely tokens to compute per prompt position; None for no prompt
        log-probabilities.
        """
        return self.prompt_logprobs


class CompletionRequest(SamplingRequest, kw_only=True):
    """A completion request. With `echo`, max_tokens may be 0: the answer is the prompt and its log-probabilities."""

    prompt: str | list[str | TokenId | list[TokenId]]
    max_tokens: Count | None = None
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None
    suffix: NotServed = None
    prompt_embeds: NotServed = None

    def check(self) -> None:
        SamplingRequest.check(self)
        refuse(self, "suffix", allowed=("",))
        refuse(self, "prompt_embeds", allowed=([],))
        if self.max_tokens == 0 and not self.echo:
            raise BadRequest("max_tokens", "max_tokens: expected at least 1 without echo, got 0.")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise BadRequest("best_of", "best_of: expected the value of n.", "unsupported_parameter")
        self.prompts()

    def prompts(self) -> list[str] | list[list[int]]:
        """Return the prompts as a list. Raises BadRequest if `prompt` is empty or mixes forms."""
        given = self.prompt
        if isinstance(given, str):
            given = [given]
        if not given:
            raise BadRequest("prompt", "prompt: expected at least one character or token.")
        if len(given) > MAX_PROMPTS and not isinstance(given[0], int):
            raise BadRequest("prompt", f"prompt: expected at most {MAX_PROMPTS} prompts, got {len(given)}.")
        kind = type(given[0])
        if any(type(item) is not kind for item in given):
            raise BadRequest(
                "prompt", "prompt: expected a string, a list of strings, token ids, or lists of token ids."
            )
        prompts: Any = [given] if kind is int else given
        if not all(prompts):
            raise BadRequest("prompt", "prompt: expected at least one character or token.")
        return prompts

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        echoed = self.logprobs if self.echo else None
        return max((n for n in (echoed, self.prompt_logprobs) if n is not None), default=None)


class ChatCompletionRequest(SamplingRequest, kw_only=True):
    messages: list[Message]
    max_completion_tokens: PositiveCount | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    functions: NotServed = None
    function_call: NotServed = None
    audio: NotServed = None
    modalities: NotServed = None
    prediction: NotServed = None
    web_search_options: NotServed = None
    reasoning_effort: NotServed = None
    store: NotServed = None
    add_special_tokens: NotServed = None
    chat_template: NotServed = None
    documents: NotServed = None
    echo: NotServed = None

    def check(self) -> None:
        SamplingRequest.check(self)
        check_tools(self.tools or [], self.tool_choice)
        if self.must_call and self.grammar_spec() is not None:
            raise BadRequest("tool_choice", "tool_choice: a required call cannot be combined with another grammar.")
        refuse(self, "functions", allowed=([],))
        refuse(self, "function_call", allowed=("none", "auto"))
        refuse(self, "audio", "prediction", "web_search_options", "reasoning_effort")
        refuse(self, "modalities", allowed=(["text"],))
        refuse(self, "store", "add_special_tokens", "echo", allowed=(False,))
        refuse(self, "chat_template")
        refuse(self, "documents", allowed=([],))
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("top_logprobs", "top_logprobs: expected only with logprobs true.")
        check_messages(self.messages)
        check_template_fields(self)

    @property
    def must_call(self) -> bool:
        return self.tool_choice not in (None, "none", "auto")

    def template_input(self) -> Conversation:
        """Return the conversation to render, without tools if the model may not call any."""
        return conversation_of(self, None if self.tool_choice == "none" else self.tools)

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def max_new_tokens_field(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(Struct, kw_only=True):
    """A prompt or a conversation to tokenize, in vLLM's form."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    return_token_strs: bool | None = None
    chat_template: NotServed = None

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise BadRequest("prompt", "Expected exactly one of prompt and messages.")
        refuse(self, "chat_template")
        if self.messages is not None:
            check_messages(self.messages)
            check_template_fields(self)
        check_tools(self.tools or [], None)

    def template_input(self) -> Conversation:
        return conversation_of(self, self.tools)


class DetokenizeRequest(Struct, kw_only=True):
    tokens: list[TokenId]
    model: str | None = None

    def check(self) -> None:
        pass


class LoadAdapterRequest(Struct):
    lora_name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/@-]{0,127}$(?!\n)")]
    lora_path: Annotated[str, Meta(min_length=1)]
    load_inplace: bool | None = None

    def check(self) -> None:
        pass


class UnloadAdapterRequest(Struct):
    lora_name: str

    def check(self) -> None:
        pass


class AllowanceRequest(Struct):
    """The new allowance of completion tokens of a running request; `id` is the gateway's request id."""

    id: str
    tokens: int

    def check(self) -> None:
        if self.tokens < 0:
            raise BadRequest("tokens", f"tokens: expected 0 or more, got {self.tokens}.")
