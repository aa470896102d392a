"""Expected block demand: an answer without the peak, where memory is plenty, is the answer of the peak."""

import random
from collections.abc import Sequence

from engine.scheduling.block_demand import BlockDemand
from engine.scheduling.kv_cache import KVCache
from engine.scheduling.request import NewRequest, Request, SamplingParams
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
        sizes = sorted(demand._size(request) for request in [*requests, new])
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


def test_short_answers_of_a_tenant_cause_no_preemptions_of_anothers_long_ones() -> None:
    world = World(seats=64, blocks=400)
    short = [Asked(at=step, tenant_id="short", weight=1.0, prompt=4, outputs=1) for step in range(200)]
    long = [Asked(at=300, tenant_id="long", weight=1.0, prompt=200, outputs=800) for _ in range(20)]
    run(world, [*long, *short], 20_000)
    assert not world.scheduler.requests
    assert world.num_again < 0.1 * world.num_computed
