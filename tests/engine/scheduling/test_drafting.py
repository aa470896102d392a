"""Drafts: the places that prompt lookup finds, the number that pays, blocks of rejected drafts, the configuration."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduling.cost import DRAFT, step_cost
from engine.scheduling.draft_acceptance import DraftAcceptance
from engine.scheduling.drafter import Drafter
from engine.scheduling.kv_cache import KVCache
from engine.scheduling.plan import StepLimits
from engine.scheduling.prompt_lookup import PromptLookup
from engine.scheduling.proposer import PromptLookups
from engine.scheduling.request import NOT_FINITE, NewRequest, Request, SamplingParams
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step_times import FIRST_CREDIT, STEPS_UNTIL_PLAIN, TRIALS, StepTimes
from engine.speculative_config import SpeculativeConfig
from testing.device_pools import EveryAdapter, Worker, pool_of
from wire.errors import ConfigError


def lookup(min_match: int = 2, max_match: int = 4) -> PromptLookup:
    return PromptLookup(min_match, max_match, DraftAcceptance(0.5, 0.8))


def proposed(text: list[int], number: int = 3, **bounds: int) -> list[int]:
    found = lookup(**bounds)
    found.follow(text)
    return found.propose(number)


def test_the_tokens_after_the_longest_equal_end_are_proposed() -> None:
    assert proposed([1, 2, 3, 4, 5, 9, 2, 3]) == [4, 5, 9]
    assert proposed([1, 2, 3, 4, 7, 2, 3, 5, 1, 2, 3]) == [4, 7, 2], "three equal tokens, not the later two"
    assert proposed([2, 3, 4, 2, 3, 5, 2, 3]) == [5, 2, 3], "the last of equals"
    assert proposed([1, 2, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1], "beyond its end the text repeats itself"
    assert proposed([1, 2, 3, 9, 3]) == []
    assert proposed([1, 2, 3, 9, 3], min_match=1) == [9, 3, 9]
    assert proposed([5]) == []


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 3), st.integers(0, 3), st.randoms())
def test_a_text_that_grows_in_pieces_gives_true_occurrences(
    text: list[int], least: int, more: int, rng: random.Random
) -> None:
    found, end = lookup(least, least + more), 0
    while end < len(text):
        end += rng.randrange(1, 4)
        seen = text[:end]
        found.follow(seen)
        drafts = found.propose(4)
        places = [i for i in range(least, len(seen)) if seen[i - least : i] == seen[len(seen) - least :]]
        assert bool(drafts) == bool(places)
        extended = seen + drafts
        assert not drafts or any(extended[i : i + 4] == drafts for i in places)


def test_rates_follow_predictions_that_no_step_computed() -> None:
    found = lookup()
    text = list(range(50)) * 2
    found.follow(text[:52])
    for end in range(53, 90):
        assert found.propose(1) == [text[end - 1]]
        found.follow(text[:end])
    assert found.rates.after_success > 0.99
    assert found.chances(2) == [found.rates.after_success, found.rates.after_success**2]
    assert found.follow([*text[:89], 7]) == [(False, False)]
    assert found.rates.after_success < 0.9


def test_a_draft_is_planned_if_it_brings_more_than_it_costs() -> None:
    times = StepTimes()
    assert not times.may_draft(1), "the plain time is measured first"
    times.observe(0.010, 1, 0, 1, False)
    for _ in range(50):
        times.observe(0.010 + 4 * 0.002, 1, 4, 4, False)
    assert times.pays(0.3, 1, 0, 1.0)
    assert not times.pays(0.2, 1, 0, 1.0)
    assert not times.pays(0.3, 1, 4, 3.5), "the step is longer and brings more already"
    for _ in range(STEPS_UNTIL_PLAIN):
        times.observe(0.018, 1, 4, 2, False)
    assert not times.may_draft(1), "the plain time is measured anew"
    times.observe(0.010, 1, 0, 1, False)
    assert times.may_draft(1)
    assert not times.may_draft(2), "each number of decodes has times of its own"


def test_drafts_that_never_pay_are_tried_again_some_day() -> None:
    times = StepTimes()
    times.observe(0.010, 8, 0, 8, False)
    for _ in range(50):
        times.observe(0.010 + 0.030, 8, 2, 9, False)
    steps = 0
    while not times.pays(1.0, 8, 0, 8.0):
        times.forget(8)
        steps += 1
    assert 50 < steps < 1000


@dataclass
class Served:
    """Times in plain steps. whole, plain: time of all steps, and of their tokens without drafts. caught_up: time that
    catching up added. saved: time that steps with drafts saved, where they did.
    """

    whole: float = 0.0
    plain: float = 0.0
    caught_up: float = 0.0
    saved: float = 0.0


def serve(streams: int, answers: int, behind: int, slower: float, draft_cost: float, accepted: float) -> Served:
    """Serve batches of answers of 150 tokens whose requests draft one token and expect it to be right.

    behind: steps in which a proposer catches up with a batch, each longer by `slower` plain steps. draft_cost: time of
    a draft in plain steps. accepted: share of the drafts.
    """
    times, rng, served = StepTimes(), random.Random(0), Served()
    for _ in range(answers):
        tokens, left = 0, behind
        while tokens < 150 * streams:
            seconds, num_drafts, new = 1.0, 0, streams
            may_draft = times.may_draft(streams) and times.pays(0.99, streams, 0, streams)
            is_catching_up = may_draft and left > 0 and times.may_catch_up(streams)
            if is_catching_up:
                left -= 1
                seconds += slower
                served.caught_up += slower
            elif may_draft and not left:
                num_drafts = streams
                seconds += draft_cost * streams
                new += sum(rng.random() < accepted for _ in range(streams))
                served.saved += max(0.0, new / streams - seconds)
            elif times.may_draft(streams) and not may_draft:
                times.forget(streams)
            times.observe(0.01 * seconds, streams, num_drafts, new, is_catching_up)
            served.whole += seconds
            tokens += new
        served.plain += tokens / streams
    return served


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    streams=st.integers(1, 16),
    behind=st.integers(0, 60),
    slower=st.floats(0, 15),
    each=st.floats(0, 2),
    accepted=st.floats(0, 1),
)
def test_catching_up_costs_what_drafts_saved_and_a_percent(
    streams: int, behind: int, slower: float, each: float, accepted: float
) -> None:
    """Drafts may turn out to be dear or wrong after a batch is caught up with for them."""
    served = serve(streams, 20, behind, slower, each / streams, accepted)
    assert served.caught_up <= FIRST_CREDIT / streams + TRIALS * served.plain + served.saved + slower


def test_drafts_that_pay_go_on_although_requests_are_caught_up_with_for_them() -> None:
    served = serve(streams=8, answers=20, behind=5, slower=0.4, draft_cost=0.02, accepted=0.8)
    assert served.whole < served.plain / 1.45
    served = serve(streams=1, answers=20, behind=5, slower=1.5, draft_cost=0.4, accepted=0.9)
    assert served.whole < served.plain / 1.15


def test_long_prompts_are_caught_up_with_from_what_drafts_saved() -> None:
    """The first batch takes most of the initial credit, and the drafts of each save more than the next one takes."""
    served = serve(streams=1, answers=20, behind=30, slower=0.8, draft_cost=0.1, accepted=0.95)
    assert served.caught_up > 19 * 30 * 0.8
    assert served.whole < served.plain / 1.2


def test_debt_for_one_request_keeps_no_other_from_drafts() -> None:
    times = StepTimes()
    times.observe(0.01, 8, 0, 8, False)
    for _ in range(10):
        times.observe(0.05, 8, 0, 8, True)
    assert not times.may_catch_up(8)
    assert times.may_draft(8)
    assert times.pays(0.99, 8, 0, 8.0)


def test_a_stall_of_the_machine_is_no_measure_of_steps() -> None:
    times = StepTimes()
    for _ in range(20):
        times.observe(0.010, 1, 0, 1, False)
    times.observe(1.0, 1, 0, 1, False)
    for _ in range(10):
        times.observe(0.015, 1, 1, 1, False)
    assert not times.pays(0.2, 1, 0, 1.0), "a draft costs half a step"


Made = tuple[Scheduler, Drafter, Request]


def make(prompt: list[int], **params: Any) -> Made:
    """Return a scheduler with one request that decodes, of whose steps all drafts pay."""
    cache = KVCache(8, 4)
    scheduler = Scheduler(cache, pool_of(EveryAdapter(), 1, Worker()), StepLimits(4, 32))
    drafter = Drafter(PromptLookups(1, 2), 6, cache, scheduler.policy, 32)
    scheduler.drafter = drafter
    drafter._times.observe(1.0, 1, 0, 1, False)
    drafter._times.observe(1.0, 1, 1, 2, False)
    request = Request(NewRequest("r", prompt, SamplingParams(**{"max_tokens": 20, **params}), tenant_id="t"))
    scheduler.add(request)
    plan = scheduler.schedule()
    assert plan == {request: len(prompt)}, "prompts have no drafts"
    scheduler.advance(plan)
    scheduler.commit({request: prompt[0]})
    return scheduler, drafter, request


def test_accepted_drafts_are_tokens_and_rejected_ones_leave_nothing() -> None:
    scheduler, drafter, request = make([1, 2, 3, 4, 5, 6, 7])
    before, free = scheduler.policy.counter("t"), scheduler.cache.num_free
    plan = scheduler.schedule()
    assert plan == {request: 7}
    assert request.drafts == [2, 3, 4, 5, 6, 7]
    assert scheduler.cache.num_free == free - 2
    assert scheduler.policy.counter("t") == before + step_cost(request, 1) + 6 * DRAFT
    scheduler.advance(plan)
    computed = []
    for token in (2, 3, 9):
        assert scheduler.commit({request: token}) == [request]
        computed.append(request.num_computed)
        drafter.confirm([request])
    assert computed == [8, 9, 10]
    assert drafter.end_step() == 6
    assert request.token_ids[7:] == [1, 2, 3, 9]
    assert scheduler.cache.num_free == free - 1
    assert request.num_registered_blocks == 2, "full blocks of committed tokens only"
    assert [(c.drafted, c.accepted) for c in drafter.counts()] == [(6, 2)]
    spent = scheduler.policy.counter("t") - before
    assert 3 * 2 + 4 * DRAFT < spent < 3 * 2.1 + 4 * DRAFT, "three tokens, and four drafts at their cost"
    assert request.is_decoding


@pytest.mark.parametrize(
    ("params", "token", "left"),
    [({"max_tokens": 3}, 2, 1), ({"max_tokens": 20, "keep_logits": True}, 2, 0), ({"max_tokens": 2}, 2, 0)],
)
def test_drafts_end_with_the_answer(params: dict[str, Any], token: int, left: int) -> None:
    scheduler, _, request = make([1, 2, 3], **params)
    assert scheduler.schedule() == {request: 1 + left}


def test_a_token_that_a_draft_may_have_made_nan_is_computed_again_without() -> None:
    scheduler, drafter, request = make([1, 2, 3, 4])
    scheduler.advance(scheduler.schedule())
    assert scheduler.commit({request: NOT_FINITE}) == []
    assert drafter.confirm([]) == []
    drafter.end_step()
    assert request.is_decoding
    assert scheduler.schedule() == {request: 1}
    scheduler.commit({request: NOT_FINITE})
    assert request.finish_reason == "error"


def test_nothing_gives_way_to_a_draft() -> None:
    scheduler, _, request = make([*range(13), 0, 1])
    others = [Request(NewRequest(f"o{i}", [7] * 7, SamplingParams(), tenant_id="t")) for i in range(2)]
    for other in others:
        assert scheduler.cache.grow(other, 8)
    assert scheduler.cache.num_free == 0
    plan = scheduler.schedule()
    assert plan == {request: 1}, "the request's own last block is full"
    assert not scheduler.num_preemptions
    scheduler.advance(plan)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("ngram", "a JSON object"),
        ("[]", "a JSON object"),
        ("[" * 100_000, "a JSON object"),
        (
            '{"method": null, "num_speculative_tokens": 3}',
            "method: expected ngram (prompt lookup) or draft_model, got null",
        ),
        ('{"method": "ngram", "num_speculative_tokens": "3"}', 'expected a whole number from 1 to 32, got "3"'),
        (
            '{"method": "ngram", "num_speculative_tokens": 3, "num_speculative_tokens": 4}',
            "num_speculative_tokens: given twice",
        ),
        ('{"method": "ngram"}', "num_speculative_tokens: expected a value"),
        ('{"num_speculative_tokens": 3}', "method: expected a value"),
        ('{"method": "eagle", "num_speculative_tokens": 3}', "method: expected ngram"),
        ('{"method": "ngram", "num_speculative_tokens": 3, "model": "m"}', "model: unknown"),
        ('{"method": "draft_model", "num_speculative_tokens": 3}', "model: expected a model folder"),
        ('{"method": "draft_model", "num_speculative_tokens": 3, "model": 5}', "model: expected a model folder"),
        (
            '{"method": "draft_model", "num_speculative_tokens": 3, "model": "m", "prompt_lookup_min": 2}',
            "prompt_lookup_min: unknown; known are method, num_speculative_tokens, model",
        ),
        ('{"method": "ngram", "num_speculative_tokens": 0}', "num_speculative_tokens: expected a whole number"),
        ('{"method": "ngram", "num_speculative_tokens": true}', "expected a whole number from 1 to 32, got true"),
        ('{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 0}', "prompt_lookup_max: expected"),
        (
            '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 5, "prompt_lookup_max": 3}',
            "prompt_lookup_min: expected at most prompt_lookup_max",
        ),
    ],
)
def test_a_bad_configuration_names_its_field(text: str, names: str) -> None:
    with pytest.raises(ConfigError, match="speculative_config: ") as raised:
        SpeculativeConfig.parse(text)
    assert names in raised.value.message


def test_a_configuration_is_vllms() -> None:
    parsed = SpeculativeConfig.parse('{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}')
    assert parsed == SpeculativeConfig("ngram", 3, prompt_lookup_max=4, prompt_lookup_min=4)
    draft = SpeculativeConfig.parse('{"method": "draft_model", "model": "m", "num_speculative_tokens": 3}')
    assert draft == SpeculativeConfig("draft_model", 3, model="m")
