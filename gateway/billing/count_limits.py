"""Limits of the token counts that an engine reports of a request: a foreign server may send any number."""

from typing import NamedTuple

from gateway.billing.inference_request import InferenceRequest
from gateway.fleet.calls.answer_text import most_tokens
from gateway.fleet.calls.answers import Fields, Usage

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

    def of_answer(self, answer: Fields) -> "CountLimits":
        """Return the limits for a whole answer without a usable count."""
        return self._replace(completion=min(self.completion, most_tokens(answer)))

    def checked(self, counts: Usage) -> Usage:
        """Return an engine's counts, with None for those that no request can have.

        These are a prompt or a completion without tokens, and a prompt that is too large, with its cached tokens. A
        completion and cached tokens that are too many are cut to their limits.
        """
        prompt, completion, cached = counts
        if prompt is not None and not 1 <= prompt <= self.prompt:
            prompt = cached = None
        return Usage(
            prompt,
            min(completion, self.completion) if completion else None,
            cached if cached is None or prompt is None else min(cached, prompt),
        )
