"""Charge of a request by its ending. `charge` has the table."""

import math
from enum import Enum

import msgspec

from gateway.errors import (
    AdapterMismatch,
    BadRequest,
    Forbidden,
    InvalidKey,
    NoEngine,
    Overloaded,
    RateLimited,
    Unavailable,
)
from gateway.fleet.calls.call import EngineRefused
from gateway.records.money.prices import Price
from wire.requests import CompletionRequest, SamplingRequest

# Number of log-probabilities at a position that cost one token of the token rates.
LOGPROBS_PER_TOKEN = 5
# Estimated bytes of JSON for one log-probability, and for one token's text and ids. Measured on Llama's vocabulary: 61
# bytes for a prompt's log-probability, 78 for a chat's. A whole answer that still exceeds the limit is cut off.
LOGPROB_BYTES = 80
TOKEN_BYTES = 8


class Ending(Enum):
    """Ending of an admitted request. Its value is the word of the access log."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    REVOKED = "revoked"
    SHORTENED = "shortened"
    LIMITED = "limited"
    BROKEN = "broken"
    NOT_BEGUN = "not_begun"
    REFUSED = "refused"
    OVERLOADED = "overloaded"
    UNABLE = "unable"
    NO_ENGINE = "unserved"
    MISMATCHED = "mismatched"

    @property
    def status(self) -> str:
        """Return the status for the usage row."""
        own = {
            Ending.FINISHED: "ok",
            Ending.SHORTENED: "ok",
            Ending.LIMITED: "limited",
            Ending.CANCELLED: "cancelled",
            Ending.REVOKED: "revoked",
            Ending.REFUSED: "refused",
        }
        return own.get(self, "error")

    @property
    def asks_engine(self) -> bool:
        """Return whether the engine may have done work that is unknown to this gateway."""
        return self in (*CUT, Ending.NOT_BEGUN)

    @property
    def is_unanswered(self) -> bool:
        """Return whether no engine answered the request. An engine that died with it is then asked for its counts."""
        return self in (Ending.NOT_BEGUN, *UNANSWERED)


# Endings of an answer that began and was not completed.
CUT = (Ending.CANCELLED, Ending.REVOKED, Ending.SHORTENED, Ending.LIMITED, Ending.BROKEN)

# Endings of a request that no engine worked on, except an engine that died with it.
UNANSWERED = (Ending.REFUSED, Ending.OVERLOADED, Ending.UNABLE, Ending.NO_ENGINE)


class TokenRateWeights(msgspec.Struct, frozen=True):
    """Cost of a prompt token and of a generated token, in tokens of the token rates.

    A log-probability costs a fifth of a token: `completion = 1 + ceil(logprobs / 5)` and, if log-probabilities of the
    prompt are requested, `prompt = 1 + n * max(1, ceil(prompt_logprobs / 5))`.
    """

    prompt: int = 1
    completion: int = 1

    def tokens(self, prompt: int, completion: int) -> int:
        return prompt * self.prompt + completion * self.completion

    def price(self, price: Price) -> Price:
        """Return the price of a token of the rates, at which reserved rate tokens cost as much as the real tokens."""
        return msgspec.structs.replace(
            price,
            input=-(-price.input // self.prompt),
            cached=-(-price.cached // self.prompt),
            output=-(-price.output // self.completion),
        )


class Used(msgspec.Struct, frozen=True):
    """Tokens of a request by the engine's count."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0


class Charge(msgspec.Struct, frozen=True):
    """Cost of a request in request rates, in token rates, and in `billed` tokens, which are those of its usage row.

    is_free: whether the billed tokens cost no money. is_recorded: whether there is a usage row.
    """

    requests: int
    rate_tokens: int
    billed: Used
    is_free: bool = False
    is_recorded: bool = True

    @property
    def surcharge(self) -> int:
        """Return the tokens of the rates beyond the billed ones."""
        return self.rate_tokens - self.billed.prompt - self.billed.completion


def charge(ending: Ending, asked_prompt: int, received: Used, final: Used | None, weights: TokenRateWeights) -> Charge:
    """Return the charge of a request by its ending.

    asked_prompt: the prompt's tokens as admitted. received: the counts of the answer as far as it was received, with
    the whole prompt once it was sent to an engine, and with the estimate of `estimates.py` if there is one. final: the
    count of the engine that was asked afterwards, None if none was asked or it has no count of the request; if no
    engine served the request, the count of an engine that died with it. If the table has two counts, the first known
    one applies.

    | ending     | when                                               | request | token rates     | usage row | money  |
    |------------|----------------------------------------------------|---------|-----------------|-----------|--------|
    | FINISHED   | the answer was completed                           | 1       | received        | as rates  | billed |
    | CANCELLED  | the client left, or read too slowly                | 1       | final, received | as rates  | billed |
    | REVOKED    | its key was revoked or its tenant suspended        | 1       | final, received | as rates  | billed |
    | SHORTENED  | no room in a token rate: ended as a short answer   | 1       | final, received | as rates  | billed |
    | LIMITED    | no room in a token rate: ended by an error         | 1       | final, received | as rates  | billed |
    | BROKEN     | the answer broke off, grew too large, or timed out | 1       | final, received | as rates  | billed |
    | NOT_BEGUN  | engines failed before the first byte               | 1       | final, none     | as rates  | none   |
    | REFUSED    | the request or its adapter is bad: 4xx             | 1       | the prompt      | no tokens | none   |
    | OVERLOADED | engines or their queue were full: 429, 503         | 1       | none            | no tokens | none   |
    | UNABLE     | an engine refused the gateway: 401, 404            | 0       | none            | no tokens | none   |
    | NO_ENGINE  | no engine was available                            | 0       | none            | no row    | none   |
    | MISMATCHED | an engine served another adapter                   | 0       | none            | no tokens | none   |

    A client pays no money if no answer began because engines failed. That work counts against its token rates, so that
    making engines fail does not yield free work. A BROKEN answer costs all that its engine generated, which can be a
    few tokens more than the client received. If an engine dies with the request before an answer and another engine
    serves it, only the other engine's count applies. If none serves it (REFUSED, OVERLOADED, UNABLE, NO_ENGINE) and the
    dead engine has counts of it, request and rates count as for BROKEN. So each request that an engine has recorded has
    a usage row, possibly without tokens. A REFUSED request costs the token rates at least its prompt. The last engine
    is first asked for its count of a NOT_BEGUN request. A request whose adapter's files no engine can read is
    OVERLOADED. Requests that the gateway itself refuses are refused before admission and cost nothing.
    """
    was_lost = ending in UNANSWERED and final is not None
    if ending is Ending.FINISHED or ending in CUT:
        used = final or received
    elif ending is Ending.NOT_BEGUN or was_lost:
        used = final or Used()
    else:
        used = Used()
    rate_tokens = weights.tokens(used.prompt, used.completion)
    if ending is Ending.REFUSED:
        # The engine may have compiled a grammar or loaded an adapter before it refused the request.
        rate_tokens = max(rate_tokens, weights.tokens(asked_prompt, 0))
    counts = was_lost or ending not in (Ending.UNABLE, Ending.NO_ENGINE, Ending.MISMATCHED)
    is_recorded = was_lost or ending is not Ending.NO_ENGINE
    return Charge(int(counts), rate_tokens, used, is_free=ending.is_unanswered, is_recorded=is_recorded)


def ending_after(error: Exception) -> Ending:
    """Return the ending of a request whose stream was ended by an error."""
    if isinstance(error, InvalidKey | Forbidden):
        return Ending.REVOKED
    if isinstance(error, RateLimited):
        return Ending.LIMITED
    return Ending.MISMATCHED if isinstance(error, AdapterMismatch) else Ending.BROKEN


def ending_of(refusal: EngineRefused) -> Ending:
    """Return the ending of a request that no engine began to answer."""
    error, status = refusal.error, refusal.status
    if isinstance(error, NoEngine):
        return Ending.NO_ENGINE
    if isinstance(error, Overloaded | Unavailable):
        return Ending.OVERLOADED
    if isinstance(error, BadRequest):
        return Ending.REFUSED
    return Ending.UNABLE if status is not None and 400 <= status < 500 else Ending.NOT_BEGUN


def weights_of(request: SamplingRequest) -> TokenRateWeights:
    """Return the weights of the request's tokens in the token rates."""
    of_prompt, of_completion = request.num_prompt_logprobs, request.num_logprobs
    prompt = 1
    if of_prompt is not None:
        # Even without alternatives, the logits of every position are computed and the prefix cache is not used.
        prompt += (request.n or 1) * max(1, math.ceil(of_prompt / LOGPROBS_PER_TOKEN))
    return TokenRateWeights(prompt, 1 + math.ceil((of_completion or 0) / LOGPROBS_PER_TOKEN))


def check_answer_size(request: SamplingRequest, prompt: int, completion: int, limit: int) -> None:
    """Raise BadRequest for a request whose answer could exceed `limit` bytes; the error names the field.

    Only the prompt's part of a stream counts, because it is a single event. prompt: tokens of all prompts. completion:
    the maximum tokens of all choices.
    """
    n, of_prompt, of_completion = request.n or 1, request.num_prompt_logprobs, request.num_logprobs
    text = n * prompt * TOKEN_BYTES if isinstance(request, CompletionRequest) and request.echo else 0
    prompt_part = text if of_prompt is None else text + n * prompt * (of_prompt + 1) * LOGPROB_BYTES
    each = TOKEN_BYTES if of_completion is None else TOKEN_BYTES + (of_completion + 1) * LOGPROB_BYTES
    completion_part = 0 if request.stream else completion * each
    if (size := prompt_part + completion_part) <= limit:
        return
    if prompt_part > completion_part:
        field = "prompt_logprobs" if request.prompt_logprobs is not None else "echo"
    elif of_completion:
        field = "logprobs" if isinstance(request, CompletionRequest) else "top_logprobs"
    elif of_completion is not None:
        field = "logprobs"
    else:
        field = "n" if n > 1 else request.max_new_tokens_field
    raise BadRequest(
        f"{field}: expected an answer of at most {limit} bytes; tokens, choices and log-probabilities together could "
        f"make this one {size} bytes.",
        param=field,
        code="answer_too_large",
    )
