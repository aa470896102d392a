"""Response types of the OpenAI API. No torch, no HTTP.

Fields that are UNSET are left out; None is written as null, as the API does.
"""

from msgspec import UNSET, Struct, UnsetType


class ErrorDetail(Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(Struct):
    error: ErrorDetail


class PromptTokensDetails(Struct):
    cached_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Progress(Struct):
    """Tokens so far and the receipt. The gateway bills streams that end early by them.

    adapter_digest: the adapter whose pages the steps read: `sha256:<digest>`, `base` or `mixed`; null before the first
    step. ended_by_allowance: there where the request ended at the gateway's allowance, and not by itself.
    """

    completion_tokens: int
    prompt_tokens: int
    cached_tokens: int
    adapter_digest: str | None = None
    ended_by_allowance: bool | UnsetType = UNSET


class CompletionLogprobs(Struct):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(Struct):
    """vLLM's: one token that could have stood at a place of the prompt; rank 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


# Of each prompt token, by token id: itself and the likeliest; nothing predicts the first one.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    loraplex: Progress | UnsetType = UNSET


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[ChatLogprob]


class CalledFunction(Struct):
    """`arguments` is JSON as the model wrote it, in a stream a piece of it; `name` comes with the first piece."""

    arguments: str
    name: str | UnsetType = UNSET


class CalledTool(Struct):
    """`index` is a stream's: which call this is a piece of. The first piece brings `id` and `type`."""

    function: CalledFunction
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    index: int | UnsetType = UNSET


class ChatMessage(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[CalledTool] | UnsetType = UNSET


class ChatChoice(Struct):
    index: int
    message: ChatMessage | UnsetType = UNSET
    delta: ChatMessage | UnsetType = UNSET
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | UnsetType | None = UNSET
    loraplex: Progress | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Model(Struct):
    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "loraplex"
    root: str | None = None
    parent: str | None = None


class ModelList(Struct):
    data: list[Model]
    object: str = "list"


class TokenizeResponse(Struct):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeResponse(Struct):
    prompt: str


class Version(Struct):
    version: str


class AdapterLoaded(Struct):
    lora_name: str
    digest: str


class EngineStateResponse(Struct):
    """Body of `GET /state`. `instance` changes with each start. `generation` grows with each change of `running`,
    `waiting`, `draining` or the adapters in device memory: between two states of one instance the higher is the
    newer. `adapters_resident` are digests. `max_adapter_bytes`: largest size of an adapter's tensors in the engine's
    dtype. `adapter_load_seconds`: recent average of the time that a load into host memory takes.
    """

    instance: str
    draining: bool
    generation: int
    model: str
    max_model_len: int
    max_num_seqs: int
    max_lora_rank: int
    max_adapter_bytes: int
    running: int
    waiting: int
    kv_blocks_total: int
    kv_blocks_free: int
    adapters_resident: list[str]
    adapter_pages_total: int
    adapter_pages_free: int
    adapter_loads: int
    adapter_load_seconds: float
    adapter_evictions: int
    preemptions: int
    steps: int
    prompt_tokens: int
    generated_tokens: int
    prefix_hit_tokens: int
    prefix_query_tokens: int
    # Of the gateways' requests that ended, since the file of finished requests is kept: as they are billed.
    ended_requests: int
    ended_prompt_tokens: int
    ended_completion_tokens: int
    # This engine keeps gateways' allowances of tokens and reports of whole answers.
    keeps_allowances: bool = True


# The gateway's bound on a request's completion tokens, and the form of a whole answer that is reported while it runs.
ALLOWANCE_HEADER = "x-loraplex-allowance"
REPORT_TYPE = "application/x-loraplex-report"
# A whole answer is reported with each step, and the gateway asks its limits for more, while fewer tokens of each choice
# are left: half a second of a fast engine.
ASK_TOKENS = 64


class AnswerHead(Struct):
    """The answer after a report: its status, its headers and the bytes that follow the line."""

    status: int
    length: int
    headers: dict[str, str]


class ReportLine(Struct):
    """A line of a report: the completion tokens so far, or the head of the answer, which ends the report."""

    completion_tokens: int
    answer: AnswerHead | None = None


class AllowanceRaised(Struct):
    """is_running: false for a request that has ended or that this engine does not have."""

    is_running: bool


class FinishedRequest(Struct):
    """finish_reason: null while it runs; "killed" where its engine was, and the counts are the last it wrote down."""

    id: str
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class FinishedRequestList(Struct):
    data: list[FinishedRequest]
    object: str = "list"


class Health(Struct):
    status: str
    reason: str | None = None
