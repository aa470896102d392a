"""The engine's span of a request: its phases, and the numbers of its request and answer."""

import time
from dataclasses import dataclass, field

from wire.error_codes import GENERATION_FAILED
from wire.responses import GenerationProgress
from wire.telemetry.spans import OPERATIONS, Span, Value


@dataclass(slots=True)
class Phases:
    """Start times of a request's phases, in seconds of time.time(). With several sequences, the earliest counts.

    queue: the request entered the engine. prefill: work on its prompt began. decode: its first token arrived.
    """

    queue: float = field(default_factory=time.time)
    prefill: float | None = None
    decode: float | None = None

    @property
    def queue_ms(self) -> int | None:
        """Return the wait before the work on the prompt began, None before the first token."""
        return None if self.prefill is None else max(0, round(1000 * (self.prefill - self.queue)))

    def first_token(self, prefill: float | None) -> None:
        """Record the first token of one sequence, now."""
        if self.decode is None:
            self.prefill, self.decode = prefill, time.time()
        elif prefill is not None and self.prefill is not None:
            self.prefill = min(self.prefill, prefill)


def describe_generation(
    span: Span, path: str, model: str, phases: Phases, done: GenerationProgress, reason: str
) -> None:
    """Set the span's attributes, named as in OpenTelemetry's conventions for generative AI; the `gen_ai.latency` ones,
    in seconds, are vLLM's.

    reason: the finish reason.
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
        span.fail(GENERATION_FAILED)
