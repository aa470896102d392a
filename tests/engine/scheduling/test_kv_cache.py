"""Blocks: taken, shared by prefix, freed and reused; never shared between tenants or adapters."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduling.kv_cache import HASHED_AT_ONCE, KVCache, prefix_keys
from engine.scheduling.request import NEVER, NewRequest, Request, SamplingParams


def request(tokens: list[int], **kwargs: Any) -> Request:
    return Request(NewRequest("r", tokens, SamplingParams(max_tokens=100), **kwargs))


def prefill(cache: KVCache, r: Request) -> int:
    """Run the prompt as the scheduler and a step would; return the tokens found in the cache."""
    prefix = cache.find_prefix(r)
    assert cache.num_missing_blocks(r, r.num_tokens, prefix) <= 0
    cache.start(r, prefix)
    assert cache.grow(r, r.num_tokens)
    found = r.num_computed
    r.num_computed = r.num_tokens
    cache.register(r)
    return found


def test_a_prefix_is_found_by_whole_blocks_and_one_token_is_always_left() -> None:
    cache = KVCache(16, 4)
    prompt = list(range(12))
    assert prefill(cache, request(prompt)) == 0
    assert prefill(cache, request(prompt)) == 8, "the last block holds the token that must be computed"
    assert prefill(cache, request([*prompt, 99])) == 12
    assert prefill(cache, request([*prompt[:6], 77, 78, 79])) == 4
    assert prefill(cache, request([5, *prompt])) == 0


@pytest.mark.parametrize("num_blocks", [0, 1, 3, HASHED_AT_ONCE, HASHED_AT_ONCE * 2 + 5])
def test_keys_computed_before_are_those_of_the_cache(num_blocks: int) -> None:
    owner: dict[str, Any] = {"adapter_digest": "x", "tenant_id": "a", "cache_salt": "s"}
    prompt = list(range(4 * num_blocks + 3))
    keys = prefix_keys(prompt, 4, **owner)
    cache = KVCache(2 * num_blocks + 4, 4)
    first = request(prompt, **owner)
    prefill(cache, first)
    assert first.block_hashes == keys
    assert len(keys) == num_blocks
    second = request(prompt, **owner, prefix_keys=keys)
    assert prefill(cache, second) == 4 * num_blocks
    second.token_ids += [7, 8, 9]
    second.num_computed += 3
    cache.register(second)
    assert second.block_hashes[:-1] == keys == prefix_keys(prompt, 4, **owner), "choices share the list"


def test_equal_blocks_behind_other_beginnings_are_others() -> None:
    cache = KVCache(32, 4)
    same = [7, 7, 7, 7]
    prefill(cache, request([*range(4), *same, 1]))
    prefill(cache, request([*range(10, 14), *range(4), 1]))
    assert prefill(cache, request([*range(10, 14), *same, 1])) == 4
    assert prefill(cache, request([*same, *same, 1])) == 0
    assert prefill(cache, request([*range(4), *same, *same, 1])) == 8


@pytest.mark.parametrize(
    "other",
    [
        {"tenant_id": "b"},
        {"tenant_id": "a", "adapter_digest": "x"},
        {"tenant_id": ""},
        {"adapter_digest": "a"},
        {"tenant_id": "1:a", "adapter_digest": ""},
        {"tenant_id": "a", "cache_salt": "a"},
    ],
)
def test_another_tenant_or_adapter_never_shares(other: dict[str, str]) -> None:
    cache = KVCache(64, 4)
    prompt = list(range(20))
    assert prefill(cache, request(prompt, tenant_id="a")) == 0
    assert prefill(cache, request(prompt, **other)) == 0
    assert prefill(cache, request(prompt, tenant_id="a")) == 16


def test_the_salt_cannot_be_forged_by_shifting_the_border_between_its_parts() -> None:
    cache = KVCache(64, 4)
    prompt = list(range(20))
    prefill(cache, request(prompt, adapter_digest="ab", tenant_id="c"))
    assert prefill(cache, request(prompt, adapter_digest="a", tenant_id="bc")) == 0


def test_shared_blocks_outlive_their_first_holder_and_the_oldest_go_first() -> None:
    cache = KVCache(4, 4)
    first, second = request(list(range(8))), request([*range(8), 50])
    prefill(cache, first)
    assert prefill(cache, second) == 8
    cache.free(first)
    assert cache.num_free == 1
    cache.free(second)
    assert cache.num_free == 4
    other = request([90, 91, 92, 93, 94])
    assert prefill(cache, other) == 0
    assert len(cache.find_prefix(request([*range(8), 1]))) == 2, "blocks that nobody can find go first"
    assert cache.grow(other, 9)
    assert len(cache.find_prefix(request([*range(8), 1]))) == 1, "the start of a prompt outlives its end"


def test_a_waiting_requests_hit_grows_with_the_cache_and_ends_with_an_eviction() -> None:
    """A waiting request's hit is kept between steps, but never contains a block that was evicted since."""
    cache = KVCache(4, 4)
    first, longer = request(list(range(4))), request(list(range(12)))
    waiting = request([*range(12), 99])
    prefill(cache, first)
    assert len(cache.find_prefix(waiting)) == 1
    prefill(cache, longer)
    assert cache.find_prefix(waiting) == longer.blocks
    cache.free(first)
    cache.free(longer)
    thief = request([7] * 16, tenant_id="thief")
    assert prefill(cache, thief) == 0
    assert cache.find_prefix(waiting) == []
    assert cache.num_missing_blocks(waiting, waiting.num_tokens, []) > 0


def test_what_was_used_longest_ago_is_reused_first_and_a_hit_counts_as_use() -> None:
    cache = KVCache(6, 4)
    old, hit, new = ([n, n, n, n, n] for n in (10, 20, 30))
    for prompt in (old, hit, new):
        r = request(prompt)
        prefill(cache, r)
        cache.free(r)
    again = request(hit)
    assert prefill(cache, again) == 4
    cache.free(again)
    left = [old, new, hit]
    taken = request([40])
    assert cache.grow(taken, 12), "three blocks that nobody can find"
    while left:
        assert [bool(cache.find_prefix(request(prompt))) for prompt in left] == [True] * len(left)
        while cache.find_prefix(request(left[0])):
            assert cache.grow(taken, (len(taken.blocks) + 1) * 4)
        left.pop(0)


def test_growth_that_does_not_fit_takes_nothing() -> None:
    cache = KVCache(3, 4)
    r = request(list(range(8)))
    prefill(cache, r)
    assert not cache.grow(r, 20)
    assert cache.num_free == 1
    assert len(r.blocks) == 2


def test_without_prefix_caching_nothing_is_found() -> None:
    cache = KVCache(16, 4, enable_prefix_caching=False)
    prefill(cache, request(list(range(12))))
    assert prefill(cache, request(list(range(12)))) == 0


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 30), st.integers(0, 2), st.booleans()), max_size=40))
def test_no_block_is_lost_or_held_twice(script: list[tuple[str, int, int, bool]]) -> None:
    cache = KVCache(12, 4)
    live: list[Request] = []
    for tenant_id, length, flavour, free_first in script:
        if free_first and live:
            cache.free(live.pop(0))
        r = request([flavour + i % 7 for i in range(length)], tenant_id=tenant_id)
        prefix = cache.find_prefix(r)
        if cache.num_missing_blocks(r, r.num_tokens, prefix) <= 0:
            prefill(cache, r)
            live.append(r)
        held = {b for r in live for b in r.blocks}
        assert len(held) + cache.num_free == cache.num_blocks
        for r in live:
            assert len(set(r.blocks)) == len(r.blocks) == cache.blocks_for(r.num_tokens)
            for other in live:
                if other.tenant_id != r.tenant_id:
                    assert not set(r.blocks) & set(other.blocks)
    for r in live:
        cache.free(r)
    assert cache.num_free == cache.num_blocks


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("num_computed", [5, 8, 11])
def test_a_preempted_request_finds_all_its_blocks(prefix_cache: bool, num_computed: int) -> None:
    cache = KVCache(8, 4, prefix_cache)
    request, other = make_request("one", 12), make_request("two", 12)
    held = preempt(cache, request, num_computed)
    assert cache.num_free == 8
    assert not prefix_cache or len(cache.find_prefix(other)) == num_computed // 4, "full blocks are shared"
    assert prefix_cache or cache.find_prefix(other) == []
    found = cache.find_prefix(request)
    assert found == held
    cache.start(request, found)
    assert (request.num_computed, request.num_registered_blocks) == (num_computed, num_computed // 4)
    assert cache.num_free == 8 - len(held)


def test_the_blocks_of_a_preempted_request_that_ends_are_taken_first() -> None:
    cache = KVCache(8, 4)
    request, other = make_request("one", 12), make_request("two", 8, first=100)
    shared = preempt(cache, other, 8)
    held = preempt(cache, request, 11)
    cache.forget(request)
    assert cache.find_prefix(request) == held[:2], "full blocks are shared"
    assert held[2] not in cache._by_key.values()
    new = make_request("new", 16, first=200)
    cache.start(new, [])
    assert cache.grow(new, 16)
    assert held[2] in new.blocks
    assert not set(shared) & set(new.blocks)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_preempted_request_finds_nothing_in_evicted_blocks(prefix_cache: bool) -> None:
    cache = KVCache(4, 4, prefix_cache)
    request, other = make_request("one", 12), make_request("two", 16, first=100)
    for _ in range(2):  # keys of the first preemption must not be in the way of the second
        preempt(cache, request, 11)
        cache.start(other, cache.find_prefix(other))
        assert cache.grow(other, 16)
        assert cache.find_prefix(request) == []
        cache.free(other)
        assert cache.num_free == 4
        other = make_request("three", 16, first=200)
    cache.start(request, [])
    assert request.num_computed == 0
    assert cache.grow(request, 12)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_preempted_request_whose_first_block_is_evicted_begins_anew(prefix_cache: bool) -> None:
    cache = KVCache(4, 4, prefix_cache)
    request = make_request("one", 12)
    held = preempt(cache, request, 11)
    for index in (3, held[2], held[1], held[0]):  # freed last first, after the block that was never used
        other = make_request(f"other {index}", 4, first=10 * index + 100)
        assert cache.grow(other, 4)
        assert other.blocks == [index]
        assert index != held[2] or cache.find_prefix(request) == held[:2]
    assert cache.find_prefix(request) == []


def make_request(name: str, num_tokens: int, first: int = 0) -> Request:
    return Request(NewRequest(name, list(range(first, first + num_tokens)), SamplingParams()))


def preempt(cache: KVCache, request: Request, num_computed: int) -> list[int]:
    """Start the request, compute tokens, preempt it, and return the blocks of the computed tokens."""
    cache.start(request, cache.find_prefix(request))
    assert cache.grow(request, request.num_tokens)
    request.num_computed = num_computed
    cache.register(request)
    held = request.blocks[: cache.blocks_for(num_computed)]
    cache.keep(request)
    cache.free(request)
    request.preempt()
    return held


@pytest.mark.parametrize("adapter_digest", [None, "x"])
@pytest.mark.parametrize("adapter_start", [0, 2, 4, 9, NEVER])
def test_keys_of_a_request_that_grows_are_those_of_its_whole_text(
    adapter_digest: str | None, adapter_start: int
) -> None:
    """The adapter starts at a block's beginning, inside a block, in the third block, or never."""
    owner: dict[str, Any] = {"adapter_digest": adapter_digest, "tenant_id": "a", "cache_salt": "s"}
    owner["adapter_start"] = adapter_start
    text, cache = list(range(24)), KVCache(8, 4)
    growing = request(text[:1], **owner)
    cache.start(growing, [])
    for num_tokens in range(1, len(text) + 1):
        growing.token_ids = text[:num_tokens]
        assert cache.grow(growing, num_tokens)
        cache.advance(growing, num_tokens)
        assert growing.block_hashes == prefix_keys(text[:num_tokens], 4, **owner)
    assert len(growing.block_hashes) == 6
