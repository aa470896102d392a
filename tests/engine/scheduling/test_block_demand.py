"""Expected block demand: an answer without the peak, where memory is plenty, is the answer of the peak."""

import random
from collections.abc import Sequence

import pytest

from engine.scheduling import block_demand
from engine.scheduling.block_demand import BlockDemand
from engine.scheduling.kv_cache import KVCache
from engine.scheduling.request import FinishReason, NewRequest, Request, SamplingParams, Status
from tests.engine.scheduling.world import Asked, World, run

BLOCK_SIZE = 16


class CountedBlockDemand(BlockDemand):
    num_peaks = 0

    def peak(self, sizes: Sequence[tuple[float, int]]) -> int:
        self.num_peaks += 1
        return super().peak(sizes)


def running(chance: random.Random, cache: KVCache) -> list[Request]:
    """Return requests with prompts and answers of random lengths, all of whose blocks are allocated."""
    found = []
    for number in range(chance.randrange(1, 9)):
        params = SamplingParams(max_tokens=chance.randrange(40, 400))
        request = Request(NewRequest(str(number), [number] * chance.randrange(1, 60), params))
        cache.start(request, [])
        request.token_ids += [1] * chance.randrange(40)
        assert cache.grow(request, request.num_tokens)
        found.append(request)
    return found


def test_a_quick_answer_is_the_peaks() -> None:
    chance, answers = random.Random(0), []
    for _ in range(800):
        cache = KVCache(chance.randrange(60, 250), BLOCK_SIZE)
        demand, requests = CountedBlockDemand(BLOCK_SIZE), running(chance, cache)
        for request in requests[: chance.randrange(2)]:
            demand.observe(request)
        params = SamplingParams(max_tokens=chance.randrange(1, 300))
        new = Request(NewRequest("new", [1] * chance.randrange(1, 200), params))
        found, is_quick = demand.leaves_room(new, [], requests, cache), not demand.num_peaks
        left, tokens = demand._size(new)
        sizes = sorted((max(left - tokens, other), held) for other, held in map(demand._size, [*requests, new]))
        assert found == (demand.peak(sizes) <= cache.num_blocks)
        answers.append((found, is_quick))
    assert min(answers.count(kind) for kind in ((True, True), (True, False), (False, False))) > 20


def test_requests_that_end_together_need_the_sum_of_their_ends() -> None:
    """Three requests of 32 tokens in all, each with a block that may hold a single token."""
    for num_blocks in (8, 9):
        cache, found = KVCache(num_blocks, BLOCK_SIZE), []
        for number in range(3):
            request = Request(NewRequest(str(number), [number] * 16, SamplingParams(max_tokens=16)))
            found.append(request)
        for request in found[:2]:
            cache.start(request, [])
            cache.grow(request, request.num_tokens)
        assert BlockDemand(BLOCK_SIZE).leaves_room(found[2], [], found[:2], cache) == (num_blocks == 9)


def again(first: list[Asked]) -> float:
    """Return the share of tokens that are computed again, if 20 long answers of a tenant follow `first`."""
    world = World(seats=64, blocks=400)
    long = [Asked(at=600, tenant_id="long", weight=1.0, prompt=200, outputs=800, limit=4000) for _ in range(20)]
    run(world, [*first, *long], 20_000)
    assert not world.scheduler.requests
    return world.num_again / world.num_computed


def test_short_answers_of_a_tenant_cause_no_preemptions_of_anothers_long_ones() -> None:
    short = [Asked(at=step, tenant_id="short", weight=1.0, prompt=4, outputs=1, limit=9) for step in range(200)]
    others = [
        Asked(at=number, tenant_id=f"other-{number}", weight=1.0, prompt=4, outputs=500, limit=900)
        for number in range(4)
    ]
    assert again([*short, *others]) < 0.1


def test_answers_that_were_cut_say_nothing_about_longer_ones() -> None:
    """A tenant's answers of at most a token each made the engine admit 20 long ones at once."""
    cut = [Asked(at=step, tenant_id="long", weight=1.0, prompt=4, outputs=1) for step in range(200)]
    assert again(cut) < 0.1


def ended(tenant_id: str, outputs: int, reason: FinishReason = "stop") -> Request:
    request = Request(NewRequest("ended", [1], SamplingParams(max_tokens=4000), tenant_id=tenant_id))
    request.token_ids += [1] * outputs
    request.finish(reason)
    return request


def test_a_single_answer_decides_little_and_many_decide() -> None:
    demand = BlockDemand(BLOCK_SIZE)
    before = demand.expected_outputs("a")
    demand.observe(ended("a", 1))
    assert 0.6 * before < demand.expected_outputs("a") < before
    for _ in range(200):
        demand.observe(ended("a", 100))
    assert 100 < demand.expected_outputs("a") < 250
    for reason in ("length", "abort", "error"):
        now = demand.expected_outputs("a")
        demand.observe(ended("a", 1, reason))
        assert demand.expected_outputs("a") == now


def test_each_tenant_counts_once_in_the_average_over_tenants(monkeypatch) -> None:
    """The tenants with the oldest answers are forgotten, and so are their parts of the average."""
    monkeypatch.setattr(block_demand, "MAX_TENANTS", 3)
    demand, chance = BlockDemand(BLOCK_SIZE), random.Random(0)
    answers: dict[str, list[int]] = {}
    for _ in range(300):
        tenant_id, outputs = chance.choice("aaaaaaaabcde"), chance.randrange(1, 900)
        if len(answers) == 3 and tenant_id not in answers:
            del answers[next(iter(answers))]
        answers[tenant_id] = [*answers.pop(tenant_id, []), outputs]
        demand.observe(ended(tenant_id, outputs))
        expected = [block_demand.PRIOR]
        for lengths in answers.values():
            weights = [0.95**age for age in range(len(lengths))]
            total = sum(w * n for w, n in zip(weights, reversed(lengths), strict=True))
            weight = 4 * 0.95 ** len(lengths)
            expected.append((total + weight * block_demand.PRIOR) / (sum(weights) + weight))
        average = sum(expected) / len(expected)
        assert demand.expected_outputs("new") == pytest.approx(block_demand.MARGIN * average)


def test_long_answers_that_were_cut_are_learnt() -> None:
    """Answers that all end at their limit of 1,500 tokens have 3 preemptions. Without it, they had 19."""
    world = World(seats=64, blocks=800)
    run(world, [Asked(100 * number, "long", 1.0, 200, 1500) for number in range(30)], 20_000)
    assert not world.scheduler.requests
    assert world.num_again < 0.05 * world.num_computed


def test_the_average_over_tenants_loses_its_weight_as_a_tenants_own_answers_become_many() -> None:
    """With a weight that stays, long answers of others cost a tenant of short ones three quarters of its seats."""
    demand = BlockDemand(BLOCK_SIZE)
    for number in range(20):
        demand.observe(ended(f"long-{number}", 3500))
    assert demand.expected_outputs("short") > 1000
    for _ in range(100):
        demand.observe(ended("short", 8))
    assert demand.expected_outputs("short") < 1.2 * block_demand.MARGIN * 8


def steps_of_short_answers(**left: bool) -> int:
    """Return the number of steps that 400 answers take which may have 1,000 tokens and are aborted after 20."""
    world, running = World(seats=64, blocks=400), list[Request]()
    for number in range(20_000):
        if number < 400:
            running.append(world.ask(Asked(0, "a", 1.0, 50, 1000)))
        for request in [each for each in running if each.num_output_tokens >= 20]:
            world.scheduler.abort(request.request_id, **left)
            running.remove(request)
        if number > 400 and not running:
            return number
        world.step()
    raise AssertionError("the answers did not end")


def test_complete_answers_are_learnt_and_those_of_clients_that_leave_are_not() -> None:
    """An answer with a stop string is complete, although the engine sees only an abort."""
    assert steps_of_short_answers(is_complete=True) < 0.5 * steps_of_short_answers()


def test_streams_that_fill_the_cache_in_the_end_leave_room_for_short_answers_until_then() -> None:
    """A tenant's short answers had one seat, because another's streams were expected to fill the cache much later."""
    world = World(seats=64, blocks=952)
    for _ in range(40):
        world.ask(Asked(0, "long", 1.0, 20, 4000))
    for _ in range(100):
        world.step()
    for _ in range(40):
        world.ask(Asked(0, "short", 1.0, 20, 100))
    for _ in range(60):
        world.step()
    assert sum(request.tenant_id == "short" for request in world.scheduler.running) > 10
    assert world.scheduler.num_preemptions == 0


def test_streams_longer_than_expected_do_not_keep_another_tenant_to_one_seat() -> None:
    """Streams that outgrow every expectation are expected to fill the cache. A tenant with a seat got no second one,
    however far it was behind: 59 of its answers ended in these steps.
    """
    world = World(seats=16, blocks=600)
    for _ in range(8):
        world.ask(Asked(0, "long", 1.0, 20, 4700))
    for _ in range(600):
        world.step()
    short = [world.ask(Asked(0, "short", 1.0, 20, 100, limit=200)) for _ in range(200)]
    for _ in range(2100):
        world.step()
    assert sum(request.status is Status.FINISHED for request in short) > 100


def test_the_expectation_of_a_tenant_is_computed_once_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """It took half of the 0.45 ms of a step with a waiting request, when each of 256 running requests computed it."""
    computed, expected = list[float](), block_demand._Answers.expected

    def recorded(answers: block_demand._Answers, prior: float) -> float:
        computed.append(prior)
        return expected(answers, prior)

    monkeypatch.setattr(block_demand._Answers, "expected", recorded)
    demand, cache = BlockDemand(BLOCK_SIZE), KVCache(60, BLOCK_SIZE)
    params = SamplingParams(max_tokens=400)
    requests = [Request(NewRequest(str(i), [i], params, tenant_id="ab"[i % 2])) for i in range(41)]
    for request in requests[:40]:
        cache.start(request, [])
    for _ in range(2):
        demand.begin_step()
        assert not demand.leaves_room(requests[40], [], requests[:40], cache)
        assert len(computed) == 2
        computed.clear()
    demand.observe(ended("a", 1))
    assert demand.expected_outputs("a") < 1000, "an answer that ends changes it at once"
