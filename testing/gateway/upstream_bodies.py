"""Made-up contents of the engine double's answers: counts of tokens and log-probabilities."""

import math
from typing import Any, TypedDict

PROMPT_TOKENS = 11
CACHED_TOKENS = 3


class Counts(TypedDict):
    completion_tokens: int
    prompt_tokens: int
    cached_tokens: int


class Finished(Counts):
    """The cost of a request, as returned by `GET /finished`. finish_reason: None until it ends."""

    id: str
    finish_reason: str | None


def logprob(text: str) -> dict[str, Any]:
    """Return log-probabilities in which `text` has probability 0.5 and another token has 0.1."""
    tops = [{"token": text, "logprob": math.log(0.5)}, {"token": "other", "logprob": math.log(0.1)}]
    return {**tops[0], "top_logprobs": tops}


def counts(tokens: int) -> Counts:
    return {"completion_tokens": tokens, "prompt_tokens": PROMPT_TOKENS, "cached_tokens": CACHED_TOKENS}


def usage(tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": tokens,
        "total_tokens": PROMPT_TOKENS + tokens,
        "prompt_tokens_details": {"cached_tokens": CACHED_TOKENS},
    }
