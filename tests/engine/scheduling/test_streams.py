"""Streams: a plan from arrays by seat equals the plan of the scheduler's loop in every respect."""

import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.answering.in_flight import InFlight
from engine.core.messages import Stepped, decode_event, encode
from engine.engine import Engine
from engine.scheduling.kv_cache import KVCache
from engine.scheduling.outputs import StepOutputs
from engine.scheduling.plan import Plan
from engine.scheduling.request import (
    NEVER,
    NOT_FINITE,
    Grammar,
    NewRequest,
    Request,
    RequestOutput,
    SamplingParams,
    Status,
)
from engine.scheduling.streams import StreamRows, Streams
from engine.scheduling.token_rules import AllowedTokens, BannedWords
from engine.speculative_config import SpeculativeConfig
from testing.tiny_engines import Make, regex_grammar
from testing.virtual_engine import HOST_S, VirtualClock

# By tenant. Powers of two, so that sums of charges are exact in any order.
WEIGHTS = {"a": [1.0], "b": [2.0, 4.0], "c": [0.5]}

Trace = list[tuple[Any, ...]]
real_sleep = time.sleep


class Front:
    """The front's side of an engine: its sequences, and their outputs as they arrive there."""

    failure = None

    def __init__(self) -> None:
        self.arrived: list[RequestOutput] = []
        self.num_plain = 0
        self.in_flight = InFlight(self, max_requests=10**6, on_step=lambda _, outputs: self.arrived.extend(outputs))

    def start(self, events: InFlight) -> None: ...

    def add(self, new_requests: list[NewRequest], rules: object) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def submit(self, new: NewRequest) -> None:
        self.in_flight.submit([new])

    def abandon(self, request_id: str) -> None:
        self.in_flight.released(request_id)

    def take(self, outputs: StepOutputs) -> list[RequestOutput]:
        """Return the outputs after their way to the front."""
        stepped = decode_event(encode(Stepped.of(0.0, outputs)))
        assert isinstance(stepped, Stepped)
        self.num_plain += len(stepped.plain_ids)
        self.arrived.clear()
        self.in_flight.stepped(0.0, stepped.outputs, zip(stepped.plain_ids, stepped.token_ids, strict=True))
        return list(self.arrived)


def new_request(number: int, chance: random.Random, digests: list[str], grammar: Grammar) -> NewRequest:
    """Return a request with any mix of the features that a step treats differently."""
    params: dict[str, Any] = {"max_tokens": chance.randrange(1, 60), "ignore_eos": True, "seed": number}
    params |= chance.choice(
        [
            {},
            {},
            {},
            {"temperature": 0.0},
            {"stop_token_ids": tuple(range(3, 380, 20))},
            {"stop_token_ids": tuple(range(3, 380, 20)), "min_tokens": 20},
            {"presence_penalty": 0.5},
            {"grammar": grammar},
            {"allowed": AllowedTokens([5, 6]), "bad_words": BannedWords([[5, 5, 5]])},
            {"logprobs": 2},
            {"prompt_logprobs": 1},
        ]
    )
    prompt = [3 + chance.randrange(300)] * chance.randrange(1, 60)
    tenant = chance.choice([*WEIGHTS])
    adapter = chance.choice([None, *digests])
    return NewRequest(
        str(number),
        prompt,
        SamplingParams(**params),
        adapter_digest=adapter,
        adapter_start=0 if adapter is None else chance.choice([0, 0, len(prompt), NEVER]),
        tenant_id=tenant,
        weight=chance.choice(WEIGHTS[tenant]),
        ttft_target=chance.choice([None, 0.1]),
    )


def load(engine: Engine, digests: list[str]) -> None:
    """Load the adapters onto the device before the test replaces the clocks: a load runs in real time."""
    for digest in digests:
        engine.add_request(NewRequest(digest, [1], SamplingParams(max_tokens=1), adapter_digest=digest))
        while engine.has_work():
            engine.step()
            real_sleep(0.001)


def describe(engine: Engine) -> tuple[Any, ...]:
    """Return everything that a step leaves behind."""
    scheduler, cache = engine.scheduler, engine.scheduler.cache
    accounts = scheduler.policy._tenants.accounts  # type: ignore[attr-defined]
    return (
        {tenant: (account.counter, account.recent) for tenant, account in accounts.items()},
        [
            (
                r.request_id,
                r.seat,
                r.blocks[:],
                r.token_ids[:],
                r.num_pending,
                r.num_computed,
                r.num_paid,
                r.planned_cost,
            )
            for r in scheduler.running
        ],
        [(r.num_registered_blocks, r.quantum_end, r.served_digest, r.has_news) for r in scheduler.running],
        [*cache._free],
        dict(cache._by_key),
        scheduler.num_decodes,
        scheduler.num_preemptions,
        (scheduler.targets.num_met, scheduler.targets.num_missed),
        engine.state().num_generated_tokens,
    )


def serve(engine: Engine, digests: list[str], seed: int, grammar: Grammar, counts: Counter[str]) -> Trace:
    """Serve random arrivals and aborts. Return each step's plan, outputs and what it leaves behind."""
    chance, trace, plans, front = random.Random(seed), Trace(), list[Plan](), Front()
    schedule = engine.scheduler.schedule

    def recorded(**options: Any) -> Plan:
        plans.append(schedule(**options))
        return plans[-1]

    engine.scheduler.schedule = recorded  # type: ignore[method-assign]

    def step() -> None:
        time.sleep(HOST_S)
        outputs = engine.step()
        expected = list(outputs)
        assert front.take(outputs) == expected
        plan = [(request.request_id, number) for request, number in plans[-1].items()]
        # `started_at` is a time of the real clock, so it differs between runs.
        found = sorted(output._replace(started_at=None) for output in expected)
        trace.append((plan, found, describe(engine)))

    for number in range(60):
        new = new_request(number, chance, digests, grammar)
        engine.add_request(new)
        front.submit(new)
        for _ in range(chance.choice([0, 1, 1, 25])):
            step()
        if chance.random() < 0.2:
            gone = str(chance.randrange(number + 1))
            engine.abort(gone)
            front.abandon(gone)
    while engine.has_work():
        step()
    assert not front.in_flight._last
    counts["plain tokens"] += front.num_plain
    return trace


def commit_together(requests: Sequence[Request], token_ids: Sequence[int], commit: Any) -> StepOutputs:
    """Commit a step's tokens, then make its outputs: the twin of `StepOutputs.commit`."""
    sampled = dict(zip(requests, token_ids, strict=True))
    moved = commit(sampled)
    plain = [request for request in moved if not request.has_news]
    whole = [r.output([sampled[r]] if sampled[r] != NOT_FINITE else []) for r in moved if r.has_news]
    return StepOutputs(whole, plain, [sampled[request] for request in plain])


def advance_each(plan: Plan, cache: KVCache) -> None:
    """Record the tokens of a launched step one request after the other: the twin of `Plan.advance`."""
    for request, num_tokens in plan.items():
        if request.status is Status.RUNNING:
            request.planned_cost = 0.0
            if not request.num_drafted:
                cache.advance(request, request.num_computed + num_tokens)


DRAFTS = {"speculative_config": SpeculativeConfig(method="ngram", num_speculative_tokens=3)}
OPTIONS: dict[str, dict[str, Any]] = {
    "asynchronous": {"async_scheduling": True},
    "synchronous": {"async_scheduling": False},
    "first come": {"async_scheduling": True, "scheduler": "fcfs"},
    "without prefix cache": {"async_scheduling": True, "enable_prefix_caching": False},
    "drafts": {"async_scheduling": False} | DRAFTS,
    "drafts, asynchronous": {"async_scheduling": True} | DRAFTS,
}


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_streams_are_planned_as_by_the_loop(
    short_model: Path, make_simulated: Make, options: dict[str, Any], seed: int
) -> None:
    """Over arrivals, ends, aborts, preemptions, drafts, grammars and penalties, whatever changes in a step."""
    grammar, counts, traces = regex_grammar(short_model), Counter[str](), []
    plan_streams = Streams.plan

    def counted(streams: Streams, most: int) -> tuple[StreamRows, list[Request]] | None:
        last, planned = streams._last if streams._is_launched else None, plan_streams(streams, most)
        if planned is None:
            counts["loop"] += 1
        elif last is not None and last.requests:
            counts["same" if planned[0].requests is last.requests else "changed"] += 1
        return planned

    for is_twin in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            clock = VirtualClock(1e7)  # later than the loads
            engine, digests = make_simulated(device="simulated:5,0.1", preempt_after=0.2, **options)
            load(engine, digests)
            for name, method in (("perf_counter", clock.now), ("monotonic", clock.now), ("sleep", clock.sleep)):
                patch.setattr(time, name, method)
            patch.setattr(engine.scheduler, "_clock", clock.now)
            # Admission expects no further blocks, so that they run out.
            patch.setattr("engine.scheduling.block_demand.BlockDemand.peak", lambda self, requests: 0)
            patch.setattr(Streams, "plan", (lambda *_: None) if is_twin else counted)
            if is_twin:
                patch.setattr(StepOutputs, "commit", commit_together)
                patch.setattr(Plan, "advance", advance_each)
            traces.append(serve(engine, digests, seed, grammar, counts))
    for number, (found, expected) in enumerate(zip(*traces, strict=True)):
        assert found == expected, f"step {number}"
    assert counts["same"] > 100
    assert counts["changed"] > 50
    assert counts["loop"], "blocks ran out"
    assert counts["plain tokens"] > 100
    assert traces[0][-1][2][6] > 0, "requests were preempted"


def test_a_plan_without_its_launch_is_planned_again(make_simulated: Make) -> None:
    """After a plan that no step has launched, the counts of all requests are read again."""
    engine, _ = make_simulated(async_scheduling=False)
    for number in range(3):
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        engine.add_request(NewRequest(str(number), [1, 2, 3], params))
    for _ in range(8):
        engine.step()
    first = engine.scheduler.schedule()
    assert first.streams is not None
    assert first.streams.changed == []
    again = engine.scheduler.schedule()
    assert again == first
    assert again.streams is not None
    assert again.streams.changed == [*first]
    assert again.streams.ends.tolist() == first.streams.ends.tolist()


def test_the_charge_of_a_token_is_returned_once_and_only_before_its_launch(make_simulated: Make) -> None:
    engine, _ = make_simulated(async_scheduling=False)
    for number in range(3):
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        engine.add_request(NewRequest(str(number), [1, 2, 3], params, tenant_id=str(number)))
    for _ in range(8):
        engine.step()
    scheduler = engine.scheduler
    first, *_, last = scheduler.running
    before = scheduler.policy.counter("0")
    scheduler.schedule()
    assert scheduler._streams.take_cost(first) == scheduler.policy.counter("0") - before > 0
    assert scheduler._streams.take_cost(first) == 0
    assert scheduler._streams.take_cost(last) > 0
    scheduler.advance(scheduler.schedule())
    assert scheduler._streams.take_cost(first) == 0


def test_a_request_that_ends_while_another_starts_is_no_stream(make_simulated: Make) -> None:
    """The number of running requests stays the same."""
    engine, _ = make_simulated(async_scheduling=True)

    def add(request_id: str) -> None:
        engine.add_request(NewRequest(request_id, [1, 2, 3], SamplingParams(max_tokens=30, ignore_eos=True)))

    for request_id in "abc":
        add(request_id)
    for _ in range(8):
        engine.step()
    add("d")
    engine.step()
    assert [request.request_id for request in engine.scheduler.running] == [*"abcd"]
    engine.abort("a")
    assert [request.request_id for request in engine.scheduler.schedule()] == [*"bcd"]
