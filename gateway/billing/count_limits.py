"""Limits of the token counts that an engine reports of a request: a foreign server may send any number."""

from typing import NamedTuple

from gateway.billing.inference_request import InferenceRequest
from gateway.fleet.calls.answers import Usage

# Tokens by which a server's chat template may exceed the gateway's, for example by a system prompt of its own.
TEMPLATE_TOKENS = 1024


class CountLimits(NamedTuple):
    """Largest counts that a request can have. prompt: tokens of all prompts. completion: tokens of all choices."""

    prompt: int
    completion: int

    @classmethod
    def of(cls, asked: InferenceRequest, max_tokens: int) -> "CountLimits":
        """Return a request's limits. max_tokens: granted for a choice."""
        return cls(asked.prompt_tokens + TEMPLATE_TOKENS, max_tokens * asked.choices)

    def checked(self, counts: Usage) -> Usage:
        """Return an engine's counts, with None for a prompt that is too large. Others are cut to their limits."""
        prompt, completion, cached = counts
        return Usage(
            prompt if prompt is None or prompt <= self.prompt else None,
            None if completion is None else min(completion, self.completion),
            cached if cached is None or prompt is None else min(cached, prompt),
        )
