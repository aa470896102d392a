"""The next step's work: long requests do not delay other tenants, and nothing is lost without blocks or adapters."""

import math
from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from adapters.manifest import LM_HEAD, NO_LAYER, AdapterError
from adapters.tiers.adapter_reader import HostAdapter, LoraModule
from adapters.tiers.device_pool import Residency
from engine.errors import Fault
from engine.scheduling.block_demand import BlockDemand
from engine.scheduling.cost import SCORED
from engine.scheduling.kv_cache import KVCache
from engine.scheduling.pacing import Pacer
from engine.scheduling.plan import Plan, StepLimits
from engine.scheduling.request import NewRequest, Request, SamplingParams, Status
from engine.scheduling.scheduler import Scheduler
from testing.device_pools import EveryAdapter, Worker, pool_of


@dataclass
class AlwaysThere:
    """Adapter pool that always has room; tests/adapters/tiers/test_device_pool.py tests the real pool."""

    pinned: list[str] = field(default_factory=list)
    overdue: tuple[()] = ()
    page_bytes: int = 1

    def take_loaded_bytes(self) -> dict[str, int]:
        return {}

    def poll(self) -> None: ...

    def resident_among(self, digests: Set[str | None]) -> list[str]:
        return [digest for digest in digests if digest is not None]


class NoBlockDemand(BlockDemand):
    """Demand as if running requests never grew, so that they run out of blocks."""

    def peak(self, requests: Iterable[Request]) -> int:
        return 0


def make(num_blocks: int = 64, block_size: int = 16, **options: Any) -> Scheduler:
    parts = {name: options.pop(name) for name in ("pacer", "policy", "block_demand", "clock") if name in options}
    limits = StepLimits(**{"max_num_seqs": 8, "max_num_batched_tokens": 64, **options})
    return Scheduler(KVCache(num_blocks, block_size), AlwaysThere(), limits, **parts)  # type: ignore[arg-type]


_arrivals = iter(range(1_000_000))


def ask(scheduler: Scheduler, tenant_id: str, prompt: int, max_tokens: int = 4, start: int = 0) -> Request:
    n = next(_arrivals)
    tokens = [start + n * 1000 + i for i in range(prompt)]
    request = Request(
        NewRequest(f"{tenant_id}-{n}", tokens, SamplingParams(max_tokens=max_tokens), tenant_id=tenant_id),
        arrival_number=n,
    )
    scheduler.add(request)
    return request


def step(scheduler: Scheduler) -> dict[Request, int]:
    plan = scheduler.schedule()
    assert all(r.status is Status.RUNNING for r in plan), "who was preempted computes nothing: its blocks are others'"
    ready = {r: 1 for r, n in plan.items() if r.num_computed + n == r.num_tokens}
    scheduler.advance(plan)
    scheduler.commit(ready)
    return plan


def test_one_tenants_long_prompt_delays_anothers_short_one_by_a_step_or_two() -> None:
    scheduler = make(num_blocks=1024)
    long = ask(scheduler, "a", 8000)
    for _ in range(5):
        assert step(scheduler) == {long: 64}
    short = ask(scheduler, "b", 10)
    steps = 0
    while not short.num_output_tokens:
        step(scheduler)
        steps += 1
    assert steps <= 2
    assert long.num_to_compute > 7000


def test_two_long_prompts_of_two_tenants_advance_together() -> None:
    scheduler = make(num_blocks=1024)
    first, second = ask(scheduler, "a", 4000), ask(scheduler, "b", 4000)
    for _ in range(20):
        step(scheduler)
    assert abs(first.num_computed - second.num_computed) <= 64
    assert first.num_computed + second.num_computed == 20 * 64


def test_streams_come_before_prompts_and_the_budget_holds() -> None:
    scheduler = make()
    streams = [ask(scheduler, "a", 5, max_tokens=50) for _ in range(4)]
    step(scheduler)
    ask(scheduler, "b", 300)
    plan = step(scheduler)
    assert all(plan[s] == 1 for s in streams)
    assert sum(plan.values()) == 64


def test_a_prompt_is_admitted_only_when_all_of_it_fits_and_then_never_preempted_for_a_prompt() -> None:
    scheduler = make(num_blocks=20)
    big = ask(scheduler, "a", 200)
    step(scheduler)
    other, small = ask(scheduler, "b", 200), ask(scheduler, "c", 10)
    for _ in range(4):
        step(scheduler)
    assert other.status is Status.WAITING
    assert small.status is Status.WAITING, "what fits does not pass over what waits for room"
    assert big.num_output_tokens
    while scheduler.requests:
        step(scheduler)
    assert other.num_output_tokens == 4
    assert scheduler.num_preemptions == 0
    assert scheduler.cache.num_free == 20


def test_when_blocks_run_out_the_tenant_furthest_ahead_gives_way_and_nothing_is_lost() -> None:
    scheduler = make(num_blocks=12, max_num_seqs=4, block_demand=NoBlockDemand(16))
    requests = [ask(scheduler, t, 30, max_tokens=60) for t in "caaba"]
    steps = 0
    while not scheduler.num_preemptions:
        step(scheduler)
    assert [r.num_preemptions for r in requests] == [0, 0, 1, 0, 0], "the later one of the tenant that had most"
    preempted, waiting = requests[2], requests[4]
    while waiting.status is Status.WAITING:
        assert waiting.num_computed == 0
        step(scheduler)
    assert preempted.status is not Status.WAITING, "it comes before those that have not begun"
    while scheduler.requests:
        step(scheduler)
        steps += 1
        assert steps < 2000
    assert all(r.num_output_tokens == 60 for r in requests)
    assert scheduler.cache.num_free == 12


def test_an_aborted_request_frees_its_blocks_and_its_seat_at_once() -> None:
    scheduler = make(max_num_seqs=1)
    running, left, waiting = ask(scheduler, "a", 50), ask(scheduler, "a", 50), ask(scheduler, "a", 50)
    step(scheduler)
    scheduler.abort(left.request_id)
    assert scheduler.num_waiting == 1
    assert step(scheduler).keys() == {running}
    scheduler.abort(running.request_id)
    assert scheduler.cache.num_free == 64
    assert waiting in step(scheduler)
    scheduler.abort(waiting.request_id)
    assert scheduler.abort(waiting.request_id) is None
    assert not scheduler.requests
    assert scheduler.num_waiting == 0


def test_without_chunks_a_prompt_longer_than_the_budget_is_a_steps_only_one_beside_the_streams() -> None:
    scheduler = make(enable_chunked_prefill=False)
    stream = ask(scheduler, "a", 5, max_tokens=50)
    step(scheduler)
    short, long, next_long = ask(scheduler, "b", 20), ask(scheduler, "b", 150), ask(scheduler, "b", 100)
    assert step(scheduler) == {stream: 1, short: 20}
    assert step(scheduler) == {stream: 1, short: 1, long: 150}
    assert step(scheduler) == {stream: 1, short: 1, long: 1, next_long: 100}


def test_a_step_planned_ahead_counts_the_token_in_flight_and_stops_at_max_tokens() -> None:
    scheduler = make()
    request = ask(scheduler, "a", 15, max_tokens=3)
    plan = scheduler.schedule()
    scheduler.advance(plan)
    request.num_pending = 1  # sampled on the device, not read yet
    ahead = scheduler.schedule()
    assert ahead == {request: 1}
    assert len(request.blocks) == 1
    assert scheduler.commit({request: 7}) == [request]
    scheduler.advance(ahead)
    request.num_pending = 1
    assert scheduler.schedule() == {request: 1}
    assert len(request.blocks) == 2
    scheduler.commit({request: 7})
    scheduler.advance(Plan({request: 1}))
    request.num_pending = 1
    assert scheduler.schedule() == {}, "the last token is in flight"
    scheduler.commit({request: 7})
    assert request.finish_reason == "length"
    assert scheduler.commit({request: 7}) == [], "what ended is dropped"
    assert scheduler.cache.num_free == 64


def test_one_preempted_with_its_token_in_flight_waits_for_it() -> None:
    scheduler = make(num_blocks=4, max_num_batched_tokens=256, block_demand=NoBlockDemand(16))
    first, second = ask(scheduler, "a", 31, max_tokens=9), ask(scheduler, "b", 31, max_tokens=9)
    for _ in range(2):
        plan = scheduler.schedule()
        scheduler.advance(plan)
        for request in plan:
            request.num_pending = 1
        running = list(plan)
        if len(running) == 2 and first.num_output_tokens < 2:
            scheduler.commit(dict.fromkeys(running, 5))
    ahead = scheduler.schedule()
    [preempted] = {first, second} - ahead.keys()
    assert preempted.status is Status.WAITING
    scheduler.abort((first if preempted is second else second).request_id)
    assert scheduler.schedule() == {}, "there is room, but its prompt is not known yet"
    scheduler.commit({preempted: 6})
    assert preempted.token_ids[-1] == 6
    assert scheduler.schedule() == {preempted: preempted.num_tokens - preempted.num_computed}


def test_one_preempted_with_its_last_token_in_flight_ends_with_it() -> None:
    scheduler = make(num_blocks=4, max_num_batched_tokens=256, block_demand=NoBlockDemand(16))
    stays, ends = ask(scheduler, "a", 31, max_tokens=9), ask(scheduler, "b", 31, max_tokens=2)
    step(scheduler)
    plan = scheduler.schedule()
    scheduler.advance(plan)
    stays.num_pending = ends.num_pending = 1
    assert scheduler.schedule() == {stays: 1}
    assert ends.status is Status.WAITING
    scheduler.commit({stays: 5, ends: 6})
    assert (ends.status, ends.token_ids[-1]) == (Status.FINISHED, 6)
    assert scheduler.num_waiting == 0
    assert ends.request_id not in scheduler.requests


def test_streams_wait_longer_for_prompts_of_their_own_tenant_only() -> None:
    pacer = Pacer(1.5)
    scheduler = make(num_blocks=1024, max_num_batched_tokens=4096, pacer=pacer)
    stream = ask(scheduler, "a", 16, max_tokens=1000)
    step(scheduler)
    for _ in range(50):  # 10 ms a step and 0.1 ms a prompt token: 50 tokens beside the stream
        pacer.observe(0.010, 1, 0)
        pacer.observe(0.010 + 0.0050, 1, 50)
    for _ in range(3):
        ask(scheduler, "b", 1000)
    pacer.observe(0.010, 1, 0)
    of_another = scheduler.schedule()
    assert of_another.pop(stream) == 1
    assert abs(sum(of_another.values()) - 50) <= 2
    for _ in range(2):
        ask(scheduler, "a", 1000)
    of_its_own = scheduler.schedule()
    assert of_its_own.pop(stream) == 1
    assert sum(of_its_own.values()) >= 900


def test_prompts_end_one_after_the_other() -> None:
    """Prompts end one after the other. In parallel all would end last: the same work, but no earlier first token."""
    scheduler = make()
    prompts = [ask(scheduler, "a", 40, max_tokens=1) for _ in range(3)]
    for prompt in prompts:
        assert step(scheduler) == {prompt: 40}
    short = [ask(scheduler, "a", 8, max_tokens=1) for _ in range(5)]
    assert step(scheduler) == dict.fromkeys(short[:3], 8), "a few rows alone would pay for the weights' reading"
    assert step(scheduler) == dict.fromkeys(short[3:], 8)


def test_a_prompt_is_cut_into_even_shares() -> None:
    """A prompt is cut into even chunks. Otherwise token 65 would take its own step or wait for the next prompt's 63."""
    scheduler = make()
    prompt, following = ask(scheduler, "a", 130, max_tokens=1), ask(scheduler, "a", 30, max_tokens=1)
    assert [step(scheduler) for _ in range(4)] == [{prompt: 44}, {prompt: 43}, {prompt: 43}, {following: 30}]


def test_prompts_with_logprobs_share_a_bound_of_logits_and_still_end() -> None:
    """A prompt token with logprobs has a row as wide as the vocabulary, so one step holds a bounded number."""
    scheduler = make(num_blocks=64, max_prompt_logits=10)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    asked = [Request(NewRequest(str(i), list(range(25)), params, tenant_id=str(i)), arrival_number=i) for i in range(3)]
    for request in asked:
        scheduler.add(request)
    plain = ask(scheduler, "plain", 20)
    steps = 0
    while any(not request.num_output_tokens for request in (*asked, plain)):
        plan = step(scheduler)
        assert sum(n for request, n in plan.items() if request in asked) <= 10
        steps += 1
        assert steps < 20
    assert steps >= 8


def test_a_tenant_that_asks_for_prompt_logprobs_gets_no_more_than_its_share() -> None:
    scheduler, params = make(num_blocks=1024), SamplingParams(max_tokens=1, prompt_logprobs=0)
    for i in range(60):
        scheduler.add(Request(NewRequest(f"scored-{i}", list(range(64)), params, tenant_id="scored"), arrival_number=i))
        ask(scheduler, "plain", 64, max_tokens=1)
    computed: Counter[str] = Counter()
    for _ in range(60):
        for request, num_tokens in step(scheduler).items():
            computed[request.tenant_id] += num_tokens
    assert computed["plain"] / computed["scored"] == pytest.approx(SCORED, rel=0.1)


def test_a_request_whose_adapter_never_comes_earns_no_credit_for_its_tenants_others() -> None:
    class Loading(AlwaysThere):
        def is_resident(self, digest: str) -> bool:
            return False

        def resident_among(self, digests: Set[str | None]) -> list[str]:
            return []

        def ensure(self, digest: str, tenant_id: str = "", weight: float = 1.0) -> Residency:
            return Residency.LOADING

    now = [0.0]
    scheduler = Scheduler(KVCache(1024, 16), Loading(), StepLimits(4, 64), clock=lambda: now[0])  # type: ignore[arg-type]
    new = NewRequest("loading", [1, 2, 3], SamplingParams(), adapter_digest="x", tenant_id="patient")
    scheduler.add(Request(new, arrival_number=next(_arrivals)))
    for _ in range(100):
        ask(scheduler, "busy", 5, max_tokens=20)
    for _ in range(200):
        step(scheduler)
        now[0] += 0.05
    for _ in range(100):
        ask(scheduler, "patient", 5, max_tokens=20)
    computed: Counter[str] = Counter()
    for _ in range(100):
        for request, num_tokens in step(scheduler).items():
            computed[request.tenant_id] += num_tokens
    assert computed["busy"] / computed["patient"] == pytest.approx(1.0, rel=0.2)


def test_an_adapter_on_the_head_costs_what_pages_of_its_size_do() -> None:
    class OnTheHead(EveryAdapter):
        def get(self, digest: str) -> HostAdapter:
            module = LoraModule(torch.zeros(8, 16), torch.zeros(4000, 8), 1.0)
            return HostAdapter(digest, 8, {(NO_LAYER, LM_HEAD): module}, 128_512)

    worker = Worker()
    pool = pool_of(OnTheHead(), 200, worker)
    scheduler = Scheduler(KVCache(64, 16), pool, StepLimits(8, 64))
    request = Request(NewRequest("a", [1, 2], SamplingParams(), adapter_digest="x"))
    scheduler.add(request)
    while request.seat < 0:
        scheduler.schedule()
        worker.finish()
    # The layers' part has no rank, and takes a page.
    assert request.num_adapter_pages == 1 + math.ceil(128_512 / pool.page_bytes) > 2


def test_one_failed_load_ends_every_request_that_waits_for_it() -> None:
    class Broken(AlwaysThere):
        tries = 0

        def is_resident(self, digest: str) -> bool:
            return False

        def resident_among(self, digests: Set[str | None]) -> list[str]:
            return []

        def ensure(self, digest: str, tenant_id: str = "", weight: float = 1.0) -> Residency:
            self.tries += 1
            return Residency.FAILED

        def error(self, digest: str) -> Exception:
            return AdapterError("adapter", "damaged")

        def leave(self, digest: str, tenant_id: str) -> None: ...
        def no_longer_wanted(self, digest: str) -> None: ...

    pool = Broken()
    scheduler = Scheduler(KVCache(64, 16), pool, StepLimits(8, 64))  # type: ignore[arg-type]
    for i in range(100):
        scheduler.add(
            Request(
                NewRequest(str(i), [1, 2, 3], SamplingParams(), adapter_digest="x", tenant_id=str(i % 3)),
                arrival_number=i,
            )
        )
    well = ask(scheduler, "b", 5)
    assert step(scheduler) == {well: 5}
    assert pool.tries == 1
    failed = scheduler.take_failed()
    assert len(failed) == 100
    fault = Fault("AdapterError", ["adapter", "damaged"])
    assert all((r.finish_reason, r.error, r.fault) == ("error", "adapter: damaged", fault) for r in failed)


def test_long_cached_prompts_start_one_after_the_other(monkeypatch: Any) -> None:
    """Long cached prompts start one after the other, because a start costs host time for each block, cached or not."""
    monkeypatch.setattr("engine.scheduling.scheduler.STARTED_BLOCKS", 20)
    scheduler = make(num_blocks=64, max_num_batched_tokens=1000)
    prompt = list(range(160))
    for n in range(4):
        choice = Request(NewRequest(f"choice-{n}", prompt, SamplingParams(max_tokens=4)), arrival_number=n)
        scheduler.add(choice)
        if not n:
            assert list(step(scheduler).values()) == [160]
    assert [sum(n > 1 for n in step(scheduler).values()) for _ in range(3)] == [2, 1, 0]
