"""Drafts for tests: engines whose every step has some, all sampling features at once, and answers to compare."""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import strategies as st

from engine.scheduling.proposer import PromptLookups, Proposal
from engine.scheduling.request import Grammar, NewRequest, Request, RequestOutput, SamplingParams
from engine.scheduling.step_times import StepTimes
from engine.scheduling.token_rules import AllowedTokens, BannedWords
from testing.engine import outputs_until_idle, whole_prompt_logprobs

if TYPE_CHECKING:
    from engine.engine import Engine

VOCAB = 380
Answers = dict[str, tuple[Any, ...]]


@contextmanager
def always_drafting() -> Iterator[pytest.MonkeyPatch]:
    """Make every draft pay."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepTimes, "may_draft", lambda *_: True)
        patch.setattr(StepTimes, "may_catch_up", lambda *_: True)
        patch.setattr(StepTimes, "pays", lambda *_: True)
        yield patch


@contextmanager
def guessing() -> Iterator[dict[str, list[int]]]:
    """Yield the true answers by request, to be filled. Every step drafts: a piece of the truth, then random tokens."""
    with always_drafting() as patch:
        truth: dict[str, list[int]] = {}
        rng = random.Random(0)

        found: dict[Request, list[int]] = {}

        def chances(lookups: PromptLookups, request: Request, most: int, *, may_catch_up: bool) -> list[float]:
            done, wanted = request.num_output_tokens, rng.randrange(7)
            drafts = truth[request.request_id][done : done + rng.randrange(wanted + 1)]
            drafts += [rng.randrange(VOCAB) for _ in range(wanted - len(drafts))]
            found[request] = drafts[: max(0, request.params.max_tokens - done - 1)]
            return [1.0] * len(found[request])

        def propose(lookups: PromptLookups, numbers: Mapping[Request, int]) -> dict[Request, Proposal]:
            return {request: Proposal(found[request][:number]) for request, number in numbers.items()}

        patch.setattr(PromptLookups, "chances", chances)
        patch.setattr(PromptLookups, "propose", propose)
        yield truth


def run(engine: "Engine", requests: list[NewRequest]) -> Answers:
    """Return everything that each request is answered, however it was split into steps."""
    said: dict[str, list[RequestOutput]] = {}
    for new in requests:
        engine.add_request(new)
    for output in outputs_until_idle(engine):
        said.setdefault(output.request_id, []).append(output)
    state = engine.state()
    assert state.num_free_blocks == state.num_blocks
    return {
        request_id: (
            [token for o in outputs for token in o.token_ids],
            *outputs[-1][2:6],
            [entry for o in outputs for entry in o.logprobs or []],
            whole_prompt_logprobs(outputs),
            *outputs[-1][8:10],
            outputs[-1].served_digest,
        )
        for request_id, outputs in sorted(said.items())
    }


def sampling(draw: Callable[[st.SearchStrategy[Any]], Any], grammar: Grammar) -> SamplingParams:
    """Draw any mix of the sampling features."""

    def maybe(strategy: st.SearchStrategy[Any], without: Any) -> Any:
        return draw(st.one_of(st.just(without), strategy))

    ids = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=60)
    rule = draw(st.sampled_from(["none", "none", "allowed", "grammar"]))
    return SamplingParams(
        max_tokens=draw(st.integers(1, 24)),
        temperature=draw(st.sampled_from([0.0, 0.0, 0.7, 2.0])),
        top_k=maybe(st.integers(1, 9), 0),
        top_p=maybe(st.floats(0.3, 0.99), 1.0),
        min_p=maybe(st.floats(0.01, 0.3), 0.0),
        presence_penalty=maybe(st.floats(-1, 1), 0.0),
        frequency_penalty=maybe(st.floats(-1, 1), 0.0),
        repetition_penalty=maybe(st.floats(1.05, 1.5), 1.0),
        logit_bias=maybe(st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-9, 9), max_size=5), {}),
        seed=maybe(st.integers(0, 2**40), None),
        min_tokens=maybe(st.integers(1, 9), 0),
        stop_token_ids=tuple(maybe(ids, ())),
        ignore_eos=draw(st.booleans()),
        logprobs=maybe(st.integers(0, 3), None),
        prompt_logprobs=maybe(st.integers(0, 2), None),
        grammar=grammar if rule == "grammar" else None,
        allowed=AllowedTokens(draw(ids)) if rule == "allowed" else None,
        bad_words=maybe(ids.map(lambda found: BannedWords([found[:1], found[-3:]])), None),
    )
