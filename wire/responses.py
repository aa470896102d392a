"""Response types of the OpenAI API. No torch, no HTTP.

UNSET fields are omitted; None is written as null, as the API does.
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
    """Token counts. cost, currency: only from a gateway; up to six decimals."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    cost: float | UnsetType = UNSET
    currency: str | UnsetType = UNSET


class GenerationProgress(Struct):
    """Token counts so far and the receipt. The gateway bills streams that end early by them.

    adapter_digest: the adapter whose pages the steps read: `sha256:<digest>`, `base` or `mixed`; null before the first
    step. ended_by_allowance: present only if the request ended because it reached the gateway's allowance.
    finish_reason: the last choice's, present only in a whole answer, so that the gateway need not read the choices.
    queue_ms: wait in the engine's queue before the first step, present only in a stream's first events and in a whole
    answer.
    """

    completion_tokens: int
    prompt_tokens: int
    cached_tokens: int
    adapter_digest: str | None = None
    ended_by_allowance: bool | UnsetType = UNSET
    finish_reason: str | UnsetType | None = UNSET
    queue_ms: int | UnsetType = UNSET


class CompletionLogprobs(Struct):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class PromptLogprob(Struct):
    """A candidate token at one position of the prompt, in vLLM's form; rank 1 is the most likely."""

    logprob: float
    rank: int
    decoded_token: str


# A list with an entry for each prompt token: log-probabilities by token id, of the token itself and of the likeliest
# tokens. The first entry is None, because no token precedes the first one.
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
    loraplex: GenerationProgress | UnsetType = UNSET


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
    """The called function; `arguments` is the JSON written by the model.

    In a stream it is one piece, and `name` is only in the first piece.
    """

    arguments: str
    name: str | UnsetType = UNSET


class CalledTool(Struct):
    """A tool call.

    In a stream, `index` identifies the call that this piece belongs to; the first piece has `id` and `type`.
    """

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
    loraplex: GenerationProgress | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ModelPrice(Struct):
    """Price per million tokens, as decimals in units of `currency`. cached: price of prompt tokens from a cache."""

    input: str
    cached: str
    output: str
    currency: str


class Model(Struct):
    """A model. context_length: the same as max_model_len, under OpenRouter's name. price: only from a gateway."""

    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "loraplex"
    root: str | None = None
    parent: str | None = None
    context_length: int | UnsetType = UNSET
    price: ModelPrice | UnsetType = UNSET


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


class TenantFairShare(Struct):
    """Snapshot of a tenant's fair-share account at one engine. counter: service divided by weight. share: its part of
    the service of the last minute. entitled: its weight's part of the weights of the active tenants.
    oldest_wait_seconds: the longest wait of its waiting requests.
    """

    tenant: str
    weight: float
    counter: float
    running: int
    waiting: int
    oldest_wait_seconds: float
    share: float
    entitled: float


class Preempted(Struct):
    """Number of a tenant's requests preempted for requests of the tenant `by` since the engine's start."""

    tenant: str
    by: str
    number: int


class StepSecond(Struct):
    """Sums of an engine's steps that ended within one second of its clock.

    at: Unix time of the second's start. seconds: time of the steps. longest: time of the longest step. prompt_tokens,
    decodes: computed rows. roofline: least time of these steps by the device's measured memory bandwidth and rate of
    matrix products; None if it is not measured.
    """

    at: int
    steps: int = 0
    seconds: float = 0.0
    longest: float = 0.0
    prompt_tokens: int = 0
    decodes: int = 0
    roofline: float | None = None


class EngineStateResponse(Struct):
    """Body of `GET /state`.

    `instance` changes with each start. `revision` increases with each change of `running`, `waiting`, `draining` or
    the adapters in device memory; of two states of one instance, the higher one is newer. `readings` increases with
    each reading from the core; a state with the same number repeats the last one. `adapters_resident` are digests, and
    `adapters_activated` those of them that are activated LoRAs. `max_adapter_bytes`: largest size of an adapter's
    tensors in the engine's dtype. `adapter_load_seconds`: recent average time of a load into host memory.
    """

    instance: str
    draining: bool
    revision: int
    readings: int
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
    # Totals of the gateways' finished requests since the usage log was created, as they are billed.
    ended_requests: int
    ended_prompt_tokens: int
    ended_completion_tokens: int
    # Whether this engine enforces the gateways' token allowances and reports whole answers while they run.
    keeps_allowances: bool = True
    # Whether the engine has the route `/probe`. Its release, and the digest of its base model's weights.
    probes: bool = True
    version: str | None = None
    base_digest: str | None = None
    adapters_activated: list[str] = []
    # The tenants with most waiting requests and service, at most 20.
    tenants: list[TenantFairShare] = []
    # Digests of adapters in host memory, at most the 512 most recently used ones. A line of the state stream
    # omits them if they have not changed since the line before.
    adapters_host: list[str] | UnsetType = UNSET
    # The pairs of tenants with most preemptions, at most 20.
    preempted: list[Preempted] = []
    # The last 5 seconds that have ended and had steps.
    recent_steps: list[StepSecond] = []


# Content type of a report: a whole (non-streamed) answer whose progress is sent while it runs.
REPORT_TYPE = "application/x-loraplex-report"
# Header of a whole answer to a gateway: a JSON object with the byte length of each field's value in the body, in the
# body's order. Between the values the body has only the fields' names and punctuation, without white space.
FIELDS_HEADER = "x-loraplex-fields"
# Remaining tokens per choice below which the engine reports a whole answer's counts at each step and the gateway
# reserves more tokens. A fast engine uses them in half a second.
ASK_TOKENS = 64


class AnswerHead(Struct):
    """The head of the answer after a report: status, headers, and byte length of the body that follows."""

    status: int
    length: int
    headers: dict[str, str]


class ReportLine(Struct):
    """A line of a report: the completion tokens so far, or the head of the answer, which ends the report."""

    completion_tokens: int
    answer: AnswerHead | None = None


class AllowanceRaised(Struct):
    """The result of raising an allowance. is_running: false if the request has ended or the engine does not have it."""

    is_running: bool


class FinishedRequest(Struct):
    """A request in the engine's usage log.

    finish_reason: null while the request runs; "killed" if the engine was killed, in which case the counts are the last
    ones written.
    """

    id: str
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class FinishedRequestList(Struct):
    data: list[FinishedRequest]
    object: str = "list"


class HealthStatus(Struct):
    status: str
    reason: str | None = None
