"""What the engine's span of a request says: where its time went, and what was asked and answered in numbers."""

import time
from dataclasses import dataclass, field

from wire.responses import Progress
from wire.telemetry.spans import OPERATIONS, Span, Value


@dataclass(slots=True)
class Phases:
    """When the parts of a request began, on the clock of time.time(); of several sequences, the first of them.

    queue: it was given to the engine. prefill: its prompt was first worked on. decode: its first token was there.
    """

    queue: float = field(default_factory=time.time)
    prefill: float | None = None
    decode: float | None = None

    def first_token(self, prefill: float | None) -> None:
        """Of one sequence, now."""
        if self.decode is None:
            self.prefill, self.decode = prefill, time.time()
        elif prefill is not None and self.prefill is not None:
            self.prefill = min(self.prefill, prefill)


def describe_generation(span: Span, path: str, model: str, phases: Phases, done: Progress, reason: str) -> None:
    """In OpenTelemetry's words for generative AI; the `gen_ai.latency` ones, in seconds, are vLLM's.

    reason: why it ended.
    """
    now = time.time()
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": OPERATIONS[path],
        "gen_ai.provider.name": "loraplex",
        "gen_ai.request.model": model,
        "gen_ai.usage.input_tokens": done.prompt_tokens,
        "gen_ai.usage.output_tokens": done.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": done.cached_tokens,
        "gen_ai.response.finish_reasons": [reason],
        "gen_ai.latency.e2e": now - phases.queue,
    }
    span.event("queue", phases.queue)
    if phases.prefill is not None and phases.decode is not None:
        span.event("prefill", phases.prefill)
        span.event("decode", phases.decode)
        attributes["gen_ai.latency.time_in_queue"] = phases.prefill - phases.queue
        attributes["gen_ai.latency.time_in_model_prefill"] = phases.decode - phases.prefill
        attributes["gen_ai.latency.time_in_model_decode"] = now - phases.decode
    span.set(attributes)
    if reason == "error":
        span.fail("generation_failed")
