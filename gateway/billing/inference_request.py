"""A checked inference request with the sizes by which it is admitted and charged."""

from typing import Any

import msgspec

from gateway.billing.charges import TokenRateWeights
from gateway.fleet.engines.own_requests import NamedBody


class InferenceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request and its size.

    body: the client's fields, and the fields that the gateway sets. named: the same, for the quarantine. prompt_tokens:
    sum over all prompts. max_tokens: the most tokens that may be generated for one choice. choices: sum over all
    prompts. weights: the factors of the request's tokens in the token rates. has_default_length: whether max_tokens is
    the default, not the client's.
    """

    body: dict[str, Any]
    named: NamedBody
    stream: bool
    include_usage: bool
    prompt_tokens: int
    max_tokens: int
    choices: int
    max_tokens_field: str
    weights: TokenRateWeights = TokenRateWeights()
    has_default_length: bool = False

    def limited(self, max_tokens: int) -> dict[str, Any]:
        """Return the body with at most `max_tokens` generated tokens for a choice."""
        if max_tokens >= self.max_tokens:
            return self.body
        body = {**self.body, self.max_tokens_field: max_tokens}
        if body.get("min_tokens"):
            body["min_tokens"] = min(body["min_tokens"], max_tokens)
        return body
