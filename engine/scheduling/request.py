"""A request in the engine: its parameters, its progress, and the named transitions between its states. No torch."""

import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from engine.errors import Fault
from engine.scheduling.logit_edits import LogitEdits
from engine.scheduling.prompt_lookup import PromptLookup
from engine.scheduling.token_rules import AllowedTokens, BannedWords
from wire.context import context_exceeded
from wire.deadlines import deadline
from wire.errors import BadRequest

if TYPE_CHECKING:
    from torch import Tensor

    from engine.structured.compiler import Matcher

FinishReason = Literal["stop", "length", "abort", "error"]

BASE_SERVED = "base"
MIXED_SERVED = "mixed"
"""Values of `Request.served_digest` without an adapter's name: only the base model's weights; several adapters'."""

# Tokens that a request computes after each admission before it may give way for fairness.
QUANTUM = 16

NEVER = sys.maxsize
"""`NewRequest.adapter_start` of an activated LoRA that the prompt does not invoke: all tokens use the base model."""

NOT_FINITE = -1
"""Value in place of a sampled token for a row with NaN or infinity."""


class Grammar(Protocol):
    """A compiled grammar: `engine.structured.compiler.Grammar`."""

    def matcher(self) -> "Matcher":
        """Return the state of a new sequence."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Rules for the choice of the next tokens. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off.

    allowed: the only tokens that may be sampled; cannot be combined with a grammar.
    keep_logits: whether the output has the newest token's logits, for probes of adapters.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    allowed: AllowedTokens | None = None
    bad_words: BannedWords | None = None
    keep_logits: bool = False

    @property
    def penalises(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def edits_logits(self) -> bool:
        return bool(self.logit_bias or self.min_tokens or self.bad_words)


class TokenLogprobs(NamedTuple):
    """The chosen token's log-probability and rank (1 = likeliest), and the ids and log-probabilities of the likeliest
    tokens.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class RequestOutput(NamedTuple):
    """The result of one step for one request. `token_ids` holds the new tokens only.

    prompt_logprobs: new entries; the first one of a prompt is None. After a preemption, all are sent again.
    error_param: the request's parameter that caused `error`, None if none did. fault: the error of the adapter's load.
    started_at: start of the work on the prompt (time.time()). served_digest: see `Request`. logits: `[vocab]` in fp32.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: str | None = None
    error_param: str | None = None
    started_at: float | None = None
    served_digest: str | None = None
    logits: bytes | None = None
    fault: Fault | None = None


class Status(Enum):
    """State of a request. A preempted request is waiting again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class NewRequest:
    """Sequence to generate, as it enters the engine.

    adapter_digest: digest of the adapter, None for the base model.
    adapter_start: position of the first token that uses the adapter; above 0 only for an activated LoRA.
    weight: the tenant's share of the engine, relative to others.
    priority: order among the requests of one tenant; lower numbers go first, as in the gateway.
    ttft_target: wanted time to first token in seconds; orders the requests of one tenant. None: no target.
    cache_salt: separates the prefix cache further, within the tenant.
    prefix_keys: keys of the prompt's blocks, shared by its choices; if empty, the engine's thread computes them.
    arrived_at: its arrival (`wire/deadlines.py`), in seconds of time.monotonic(); inf: when it enters the scheduler.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    adapter_digest: str | None = None
    tenant_id: str = ""
    weight: float = 1.0
    priority: int = 0
    ttft_target: float | None = None
    cache_salt: str = ""
    prefix_keys: Sequence[bytes] = ()
    adapter_start: int = 0
    arrived_at: float = math.inf

    def check(self, max_model_len: int, vocab_size: int) -> None:
        """Raise BadRequest, naming the parameter, if the request could never run."""
        prompt, params = self.prompt_token_ids, self.params
        if not prompt:
            raise BadRequest("prompt", "prompt: expected at least one token.")
        if params.max_tokens < 1:
            raise BadRequest("max_tokens", f"max_tokens: expected at least 1, got {params.max_tokens}.")
        if len(prompt) + params.max_tokens > max_model_len:
            field = "prompt" if len(prompt) >= max_model_len else "max_tokens"
            raise context_exceeded(field, max_model_len, len(prompt), params.max_tokens, "prompt")
        if self.weight <= 0:
            raise BadRequest("weight", f"weight: expected a number above 0, got {self.weight}.")
        if self.ttft_target is not None and self.ttft_target <= 0:
            raise BadRequest("ttft_target", f"ttft_target: expected seconds above 0, got {self.ttft_target}.")
        for field_name, ids in (
            ("prompt", (min(prompt), max(prompt))),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias),
            ("allowed_token_ids", () if params.allowed is None else (params.allowed.largest,)),
            ("bad_words", () if params.bad_words is None else (params.bad_words.largest,)),
        ):
            if any(not 0 <= i < vocab_size for i in ids):
                raise BadRequest.of(field_name, f"expected token ids from 0 to {vocab_size - 1}.")


class Request:
    """Sequence in the engine: `token_ids` is the prompt, then the output. `blocks` hold the keys and values of the
    first `num_computed` tokens.

    num_pending: 1 while an in-flight step samples a token that the host has not read. It counts as a token already.
    seat: row of the request in the runner's tables while it runs, else -1.
    served_digest: the adapter whose pages this request's steps read, "sha256:<digest>", "base" or "mixed"; None before
        the first step. The planner records it from the device pool's slots, never from `adapter_digest`, so it is
        a receipt.
    is_plain: whether a step needs only its token: no mask, penalties or edits of logits, no log-probabilities.
    has_news: whether its next output may differ from its last one in more than the token. True unless it is plain and
        nothing else has changed since its last output.
    order_key: key that orders its tenant's waiting requests.
    arrived_at: see `NewRequest`; its target counts from then.
    queued_at: time at which it last began to wait here; what its tenant may take from others counts from then.
    planned_cost: cost of its part of the planned step, returned if the step is not executed (`Streams.take_cost`).
    num_paid: number of its first tokens that had been computed, and so paid for, at a preemption.
    num_kept: number of tokens computed at its last preemption, whose blocks may still be cached; 0 once it runs again.
    drafts: proposed tokens after the newest, computed by the in-flight step and not confirmed by a sampled token yet.
    num_drafted: number of drafts of the step at its launch.
    can_draft: whether a step may have drafts.
    lookup: source of the drafts.
    """

    __slots__ = (
        "adapter_digest", "adapter_slot", "adapter_start", "arrival_number", "arrived_at", "block_hashes", "blocks",
        "cache_salt", "can_draft", "drafts", "edits", "edits_logits", "error", "error_param", "fault", "finish_reason",
        "has_news", "is_plain", "logits", "logprobs", "lookup", "mask", "matcher", "max_num_tokens",
        "num_adapter_pages", "num_cached_tokens", "num_computed", "num_drafted", "num_kept", "num_paid", "num_pending",
        "num_preemptions", "num_prompt_tokens", "num_registered_blocks", "order_key", "params", "planned_cost",
        "prefix_hit", "priority", "prompt_logprobs", "quantum_end", "queued_at", "request_id", "seat", "seed",
        "served_digest", "started_at", "status", "stop_ids", "tenant_id", "token_ids", "ttft_target", "weight",
    )  # fmt: skip

    def __init__(
        self,
        new: NewRequest,
        *,
        arrival_number: int = 0,
        seed: int = 0,
        stop_ids: frozenset[int] = frozenset(),
    ) -> None:
        """arrival_number: number of requests before this one. stop_ids: tokens that end the output."""
        self.request_id = new.request_id
        self.params = new.params
        self.adapter_digest = new.adapter_digest
        self.adapter_start = new.adapter_start
        self.tenant_id = new.tenant_id
        self.weight = new.weight
        self.priority = new.priority
        self.ttft_target = new.ttft_target
        self.cache_salt = new.cache_salt
        self.arrival_number = arrival_number
        self.seed = seed
        self.stop_ids = stop_ids
        self.token_ids = list(new.prompt_token_ids)
        self.num_prompt_tokens = len(new.prompt_token_ids)
        self.num_pending = self.num_drafted = 0
        self.num_computed = self.num_cached_tokens = self.num_preemptions = 0
        self.blocks: list[int] = []
        self.block_hashes = list(new.prefix_keys)
        self.num_registered_blocks = 0
        # The cache's count of evictions at the last lookup while the request waited, and the cached blocks found then.
        self.prefix_hit: tuple[int, list[int]] = (0, [])
        self.adapter_slot = -1
        self.num_adapter_pages = 0
        self.seat = -1
        self.order_key: tuple[int, float, int] = (1, 0.0, arrival_number)
        self.arrived_at, self.queued_at, self.planned_cost = new.arrived_at, 0.0, 0.0
        self.num_paid = self.num_kept = self.quantum_end = 0
        # An output has the newest token's logits only, so a request that keeps them has one token a step.
        self.can_draft = not new.params.keep_logits
        self.drafts: list[int] = []
        self.lookup: PromptLookup | None = None
        self.edits: LogitEdits | None = None
        self.served_digest: str | None = None
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.error_param: str | None = None
        self.fault: Fault | None = None
        self.started_at: float | None = None
        # The matcher's state depends on the output tokens only, so a preemption does not change it.
        self.matcher: Matcher | None = None if new.params.grammar is None else new.params.grammar.matcher()
        # The mask of the tokens that may come next; None allows all.
        self.mask: Matcher | AllowedTokens | None = new.params.allowed if self.matcher is None else self.matcher
        self.edits_logits = new.params.edits_logits
        keeps = new.params.logprobs is not None or new.params.keep_logits
        self.is_plain = self.mask is None and not (self.edits_logits or new.params.penalises or keeps)
        self.has_news = True
        self.max_num_tokens = self.num_prompt_tokens + new.params.max_tokens
        self.logits: Tensor | None = None
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs | None] = []

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending - self.num_prompt_tokens

    @property
    def num_to_compute(self) -> int:
        """Return the number of tokens whose keys and values are missing; 1 for a decode."""
        return len(self.token_ids) + self.num_pending - self.num_computed

    @property
    def is_decoding(self) -> bool:
        num_tokens = len(self.token_ids) + self.num_pending
        return num_tokens > self.num_prompt_tokens and num_tokens - self.num_computed == 1

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Return whether the prompt's log-probabilities are still to be computed. A preempted request does not return
        them twice.
        """
        return self.params.prompt_logprobs is not None and not self.num_output_tokens

    @property
    def due(self) -> float:
        """Return the time that orders the request within its tenant."""
        return deadline(self.arrived_at, self.ttft_target, self.priority)

    @property
    def had_quantum(self) -> bool:
        """Return whether the request may be preempted for fairness: since its admission it has computed `QUANTUM` new
        tokens, and as many as it had to compute again. So preemption for fairness at most doubles the work.
        """
        return self.num_computed >= self.quantum_end

    def start(self, num_cached_tokens: int) -> None:
        """Change from WAITING to RUNNING, with the first `num_cached_tokens` tokens already in the cache."""
        self.status = Status.RUNNING
        self.num_computed = num_cached_tokens
        num_again = max(0, self.num_paid - num_cached_tokens)
        self.quantum_end = num_cached_tokens + num_again + max(QUANTUM, num_again)
        if not self.num_preemptions:
            self.num_cached_tokens = num_cached_tokens
            self.started_at = time.time()

    def record_served(self, served: str) -> None:
        """Record the adapter whose pages a step reads for this request. A second adapter makes the receipt `mixed`."""
        if self.served_digest != served:
            self.served_digest = served if self.served_digest is None else MIXED_SERVED
            self.has_news = True

    def preempt(self) -> None:
        """Change from RUNNING to WAITING. The generated tokens stay, and are computed again as part of the prompt."""
        self.status = Status.WAITING
        self.num_paid = max(self.num_paid, self.num_computed)
        self.num_computed = 0
        self.num_preemptions += 1

    def append(self, token_id: int) -> None:
        """Append the sampled token. Finish on a stop token, at the grammar's end, at the token limit or on
        `NOT_FINITE`.
        """
        self.num_pending = 0
        if self.error is not None:  # the sampler failed on this request, so the token is void
            self.logprobs.clear()
            self.finish("error", self.error)
            return
        if token_id == NOT_FINITE:
            self._fail_not_finite()
            return
        self.token_ids.append(token_id)
        if self.matcher is not None and not self.matcher.advance(token_id):
            self.error_param = self.matcher.param
            self.finish("error", f"{self.matcher.param} is too complex: {self.matcher.error}")
        elif (token_id in self.stop_ids or self.matcher is not None) and self._is_stop(token_id):
            self.finish("stop")
        elif len(self.token_ids) >= self.max_num_tokens:
            self.finish("length")

    def _fail_not_finite(self) -> None:
        """Finish with an error. If the request has an adapter, the error names the parameter `model`, because the
        adapter is the cause.
        """
        self.logprobs.clear()
        if self.adapter_digest is None:
            self.finish("error", "the model computed NaN or infinity as the score of every token")
            return
        self.error_param = "model"
        self.finish("error", "the adapter's weights are too large: they give NaN or infinity for this prompt")

    def _is_stop(self, token_id: int) -> bool:
        if self.matcher is not None and self.matcher.ended:
            return True
        return token_id in self.stop_ids and self.num_output_tokens >= self.params.min_tokens

    def finish(self, reason: FinishReason, error: str | None = None) -> None:
        self.status = Status.FINISHED
        self.finish_reason = reason
        self.has_news = True
        self.error = error

    def output(self, token_ids: list[int]) -> RequestOutput:
        """Return this step's output. Each log-probability is returned once."""
        out = RequestOutput(
            self.request_id,
            token_ids,
            self.finish_reason,
            self.num_prompt_tokens,
            self.num_cached_tokens,
            len(self.token_ids) + self.num_pending - self.num_prompt_tokens,
            self.logprobs if self.params.logprobs is not None else None,
            self.prompt_logprobs or None,
            self.error,
            self.error_param,
            self.started_at,
            self.served_digest,
            None if self.logits is None else self.logits.float().numpy().tobytes(),
            self.fault,
        )
        if self.logprobs or self.prompt_logprobs:
            self.logprobs, self.prompt_logprobs = [], []
        self.has_news = not (self.is_plain and token_ids)  # without a token, more of the prompt follows
        return out
