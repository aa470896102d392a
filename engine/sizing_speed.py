"""Estimated speed of an engine under a steady load.

On a CPU the steps of the load are measured (`engine.sizing_steps`). On a GPU the time of a step is its least time by
the roofline, divided by the share of the roofline's rate that engines reach.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from engine.model.config import ModelConfig
from engine.sizing_steps import Sizes
from engine.step_log import StepWork
from kernels.roofline import Roofline

# Share of the roofline that a step on a GPU reaches: the aim of `make gpu`; not measured yet.
REACHED_GPU = 0.85
# CPU: share of the bandwidth at which adapters' pages are read, and seconds of a step for scheduling and outputs.
PAGES_REACHED, HOST_SECONDS = 0.8, 0.3e-3


@dataclass(frozen=True, slots=True)
class ExpectedLoad:
    """A load to serve. adapters: number in use, all of one rank. prompt_tokens, output_tokens: tokens of each request.
    streams: requests at once; None: as many as fit.
    """

    adapters: int
    rank: int
    prompt_tokens: int
    output_tokens: int
    streams: int | None = None


@dataclass(frozen=True, slots=True)
class Throughput:
    """An engine's speed under a load.

    streams: requests at once. adapters: distinct ones in a step. bound_seconds: least time of a step by the roofline.
    first_token_seconds: time to first token of a request alone.
    """

    streams: int
    adapters: int
    bound_seconds: float
    step_seconds: float
    tokens_per_second: float
    first_token_seconds: float


@dataclass(frozen=True, slots=True)
class Step:
    """Size of a step. outputs: rows with logits. context: tokens whose keys and values are read. prompts: number of
    whole prompts, which may be a fraction. prompt_tokens: tokens of each; the last one's row is in `outputs`.
    """

    outputs: float
    context: float
    adapter_bytes: float = 0.0
    prompts: float = 0.0
    prompt_tokens: int = 0

    @property
    def rows(self) -> float:
        return self.outputs + self.prompts * (self.prompt_tokens - 1)

    @property
    def sizes(self) -> Sizes:
        """Return the step in whole numbers. A part of a prompt becomes a shorter prompt."""
        whole, rest = divmod(round(self.prompts * self.prompt_tokens), max(1, self.prompt_tokens))
        prompts = (self.prompt_tokens,) * whole + ((rest,) if rest else ())
        return Sizes(max(1, round(self.context / self.outputs)), max(0, round(self.outputs - self.prompts)), prompts)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Times of steps on a device. measured: function of a step's sizes without adapters; None on a GPU."""

    work: StepWork
    model: ModelConfig
    roofline: Roofline
    measured: Callable[[Sizes], float] | None

    def bound(self, step: Step) -> float:
        """Return the least time by the roofline."""
        work = self.work
        flops = 2 * (work.layer_elements * step.rows + work.head_elements * step.outputs) + self._attention_flops(step)
        num_bytes = work.weight_bytes + step.context * work.kv_bytes + step.adapter_bytes
        return self.roofline.seconds(num_bytes, flops)

    def seconds(self, step: Step) -> float:
        """Return the expected time."""
        if self.measured is None:
            return self.bound(step) / REACHED_GPU
        read = step.adapter_bytes / (PAGES_REACHED * self.roofline.bandwidth)
        return self.measured(step.sizes) + read + HOST_SECONDS

    def _attention_flops(self, step: Step) -> float:
        """Return the operations of the prompts' causal attention; a decode's are bound by its read."""
        model = self.model
        pairs = step.prompts * step.prompt_tokens**2 / 2
        return 4 * pairs * model.num_layers * model.num_heads * model.head_dim


def steady_throughput(
    time: StepTime, load: ExpectedLoad, streams: int, adapters: int, adapter_bytes: float, stretch: float
) -> Throughput:
    """Return the speed of streams that each ask their next request when one ends.

    Each request takes a step for each output token, the first of which comes with the last chunk of its prompt, and a
    step for each earlier chunk. Chunks lengthen a step of other streams to `stretch` times its duration at most
    (`engine.scheduling.pacing`), unless prompts arrive faster. While there are steps without prompts, the mean over
    both kinds counts, because a step's time is not linear in its rows.
    """
    held = streams * (load.prompt_tokens + load.output_tokens / 2)
    rate = streams / load.output_tokens  # prompts that begin in a step
    plain = Step(streams, held, adapter_bytes)
    whole = Step(streams, held, adapter_bytes, max(1.0, rate), load.prompt_tokens)
    unmixed = time.seconds(plain)
    added = time.seconds(whole) - unmixed
    paced = (stretch - 1) * unmixed / added if streams > 1 and added > 0 else 1.0  # as a share of `whole`
    mixed = replace(whole, prompts=min(1.0, max(paced, rate / whole.prompts)) * whole.prompts)
    share = min(1.0, rate / mixed.prompts)
    bound = share * time.bound(mixed) + (1 - share) * time.bound(plain)
    seconds = share * time.seconds(mixed) + (1 - share) * unmixed
    alone = Step(1, 0, adapter_bytes / max(1, adapters), 1, load.prompt_tokens)
    num_steps = load.output_tokens + max(0.0, 1 / mixed.prompts - 1)
    tokens_per_second = streams * load.output_tokens / num_steps / seconds
    return Throughput(streams, adapters, bound, seconds, tokens_per_second, time.seconds(alone))
