"""Steps that run before an engine serves: they measure its memory, and compile what would stall a request.

Their tokens and keys mean nothing. No request is known yet, so they may write any block and seat.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from engine.execution.runner import RunnerLimits, StepRunner
from engine.scheduling.plan import Plan
from engine.scheduling.request import NewRequest, Request, SamplingParams
from engine.scheduling.token_rules import AllowedTokens
from kernels.platform import Platform

# Captures after which the memory of the others is known: the first has the shared pool.
MEASURED_CAPTURES = 4
GREEDY = SamplingParams(temperature=0)
# Parameters whose samplings launch different kernels.
SAMPLINGS = (
    GREEDY,
    SamplingParams(temperature=1, top_k=8, top_p=0.9, min_p=0.01),
    SamplingParams(
        repetition_penalty=1.1, presence_penalty=0.1, logit_bias={0: 1.0}, min_tokens=2, stop_token_ids=(1,)
    ),
    SamplingParams(allowed=AllowedTokens([0, 1])),
    SamplingParams(temperature=0, logprobs=20),
    SamplingParams(temperature=0, prompt_logprobs=20),
)


@dataclass(frozen=True, slots=True)
class Shape:
    """A step. prompts: tokens of each prompt chunk. decodes: number of requests with a single token. adapters: slots in
    turn over the requests; -1 is the base model. params: in turn over the requests. drafts: number of drafts of each
    decode.
    """

    prompts: tuple[int, ...]
    decodes: int
    adapters: tuple[int, ...] = (-1,)
    params: tuple[SamplingParams, ...] = (GREEDY,)
    drafts: int = 0

    @property
    def longest(self) -> int:
        """Return the tokens of the longest request: a prompt, or a decode's prompt, newest token and drafts."""
        return max((*self.prompts, 2 + self.drafts))


def run_step(runner: StepRunner, shape: Shape, block_size: int) -> None:
    """Run a step to its end. All requests write the same blocks, as many as the longest needs."""
    plan = Plan()
    for seat, count in enumerate((*shape.prompts, *[0] * shape.decodes)):
        prompt = [0] * max(1, count)
        params = shape.params[seat % len(shape.params)]
        request = Request(NewRequest(str(seat), prompt, params), stop_ids=frozenset(params.stop_token_ids))
        request.start(0)
        if not count:  # a decode: its last token is an output
            request.token_ids.append(0)
            request.num_computed = 1
            request.drafts = [0] * shape.drafts
        request.seat = seat
        request.adapter_slot = shape.adapters[seat % len(shape.adapters)]
        request.blocks = list(range(-(-(request.num_tokens + len(request.drafts)) // block_size)))
        plan[request] = request.num_to_compute + len(request.drafts)
    launched = runner.forward(plan)
    runner.sample(launched).wait()
    if shape.drafts:
        runner.sample_after_drafts(launched, list(plan), 1).wait()


class Measured(NamedTuple):
    """Bytes of a step's activations, of the seats' tables, and of all CUDA graphs."""

    activations: int
    seats: int
    graphs: int

    def with_draft(self, draft: "Measured") -> "Measured":
        """Return the bytes together with a draft model's. Only one of the models computes at a time."""
        activations = max(self.activations, draft.activations)
        return Measured(activations, self.seats + draft.seats, self.graphs + draft.graphs)


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Steps that measure and warm up an engine with these sizes.

    num_slots: number of slots of adapters. most_prompt_logits: rows of logits that a step computes for prompt_logprobs.
    most_drafts: maximum drafts of a request in a step; 0 without speculation.
    """

    limits: RunnerLimits
    most_tokens: int
    num_slots: int
    most_prompt_logits: int
    most_drafts: int = 0

    def largest_shapes(self) -> Iterator[Shape]:
        """Yield the steps that need the most memory: one long prompt, many prompts, a prompt's log-probabilities, or
        drafts of plain requests beside another, for which sampling copies the logits.
        """
        seats, longest = self.limits.max_num_seqs, max(1, self.limits.max_model_len - 1)
        prompt = min(self.most_tokens - (seats - 1), longest)
        yield Shape((prompt,), seats - 1, self._slots, (SAMPLINGS[1],))
        yield Shape((min(self.most_tokens // seats, longest),) * seats, 0, self._slots, (SAMPLINGS[4],))
        yield Shape((min(self.most_prompt_logits, self.most_tokens, longest),), 0, self._slots, (SAMPLINGS[5],))
        most_rows, drafts = self._most_draft_rows
        if drafts:
            decodes = min(seats, most_rows // (1 + drafts))
            yield Shape((), decodes, self._slots, (SAMPLINGS[4], *[GREEDY] * (decodes - 1)), drafts)

    def all_shapes(self) -> list[Shape]:
        """Return a step of each kind that compiles code of its own: by tokens, requests, adapters and sampling."""
        seats, longest = self.limits.max_num_seqs, min(self.most_tokens, max(1, self.limits.max_model_len - 1))
        mixes = dict.fromkeys(((-1,), self._slots[:1], self._slots, (*self._slots, -1)))
        shapes = []
        for tokens in _sizes(longest):
            beside = min(seats - 1, tokens // 2)
            for adapters in mixes:
                if tokens <= seats:
                    shapes.append(Shape((), tokens, adapters))
                if tokens > 1:
                    shapes.append(Shape((tokens,), 0, adapters))
                if beside:
                    shapes.append(Shape((tokens - beside,), beside, adapters))
        shapes += self._draft_shapes(list(mixes))
        for params in SAMPLINGS[1:]:
            shapes += [Shape((), count, params=(params,)) for count in _sizes(seats)]
            shapes.append(Shape((min(64, self.most_prompt_logits, longest),), 0, params=(params,)))
        return shapes

    def _draft_shapes(self, mixes: Sequence[tuple[int, ...]]) -> Iterator[Shape]:
        """Yield decodes with drafts, in graphs and without: the fewest and the most drafts of a request."""
        most_rows, most_drafts = self._most_draft_rows
        for drafts in {1, most_drafts} if most_drafts else ():
            for decodes in _sizes(min(self.limits.max_num_seqs, most_rows // (1 + drafts))):
                for adapters in mixes:
                    yield Shape((), decodes, adapters, drafts=drafts)

    def run(self, runner: StepRunner, progress: Callable[[int, int], None]) -> None:
        """Run all shapes. progress: called with the number of steps done and of all."""
        shapes = self.all_shapes()
        for done, shape in enumerate(shapes, 1):
            run_step(runner, shape, self.limits.block_size)
            progress(done, len(shapes))

    def measure(
        self,
        make_runner: Callable[[RunnerLimits, Callable[[int, int], None]], StepRunner],
        platform: Platform,
        progress: Callable[[int, int], None],
    ) -> Measured:
        """Return the bytes that a runner needs beside its KV cache. progress: as in `run`.

        The steps run on a KV cache of few blocks. Only the first graphs are captured; each other graph is assumed to
        take as many bytes as the largest captured one.
        """
        shapes, size = list(self.largest_shapes()), self.limits.block_size
        longest = max(shape.longest for shape in shapes)
        few = replace(self.limits, num_blocks=-(-(longest + 1) // size))
        runner = make_runner(replace(few, graph_sizes=(), graph_tokens=()), lambda *_: None)
        platform.release_memory()
        peak = platform.watch_peak()
        for shape in shapes:
            run_step(runner, shape, size)
        activations, seats = peak(), runner.seat_bytes
        if self._has_steps_without_graph:
            self.run(runner, progress)
        runner.close()
        del runner
        graphs = _measure_graphs(partial(make_runner, few), peak) if few.graph_sizes else 0
        gc.collect()  # graphs and their closures refer to each other
        platform.release_memory()
        return Measured(activations, seats, graphs)

    @property
    def _has_steps_without_graph(self) -> bool:
        """Return whether some steps have more rows of logits than any graph, so that they run beside the graphs."""
        return bool(self.limits.graph_sizes) and self.most_prompt_logits > self.limits.max_num_seqs

    @property
    def _most_draft_rows(self) -> tuple[int, int]:
        """Return the most rows of logits of a step with drafts, and the most drafts of a request in it."""
        most_rows = min(max(self.limits.max_num_seqs, self.most_prompt_logits), self.most_tokens)
        return most_rows, max(0, min(self.most_drafts, self.limits.max_model_len - 3, most_rows - 1))

    @property
    def _slots(self) -> tuple[int, ...]:
        """Return two slots, or fewer; the pages of an empty slot are not read. Without slots: the base model."""
        return tuple(range(min(2, self.num_slots))) or (-1,)


class _Enough(Exception):
    """The remaining captures need not be measured."""


def _measure_graphs(capture: Callable[[Callable[[int, int], None]], StepRunner], peak: Callable[[], int]) -> int:
    risen, total = [peak()], 0

    def captured(done: int, num_graphs: int) -> None:
        nonlocal total
        risen.append(peak())
        total = num_graphs
        if done == MEASURED_CAPTURES:
            raise _Enough

    with suppress(_Enough):
        capture(captured).close()
    later = [after - before for before, after in pairwise(risen[1:])]
    return risen[-1] - risen[0] + max(later, default=0) * (total + 1 - len(risen))


def _sizes(most: int) -> Sequence[int]:
    """Return 1, 2, 3, powers of two and their halves between, up to `most`."""
    found = {1, 2, 3, most}
    size = 4
    while size < most:
        found |= {size, size + size // 2}
        size *= 2
    return sorted(n for n in found if n <= most)
