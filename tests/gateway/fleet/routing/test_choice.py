"""The choice of an engine, as a function of the known state of each."""

import time
from collections.abc import Sequence

import msgspec
import pytest

from benchmarks.routing import POLICIES, measure, seconds_to_engines
from gateway.fleet.discovery.base_engines import BaseEngines
from gateway.fleet.engines.engine import Address, EngineRecord, EngineState
from gateway.fleet.engines.health import Condition, Health
from gateway.fleet.routing.choice import (
    MAX_PREFIXES,
    Conversations,
    Rates,
    RoutedRequest,
    choose,
    number_of_homes,
    prefix_key,
    rank,
)

URLS = [f"http://{name}:1" for name in "abcd"]
SLOTS = 8


def engine(url: str, in_flight: int = 0, resident: tuple[str, ...] = (), **fields: object) -> EngineRecord:
    record = EngineRecord(Address(url), condition=Condition(Health.UP), slots=SLOTS, **fields)  # type: ignore[arg-type]
    record.requests.sequences, record.resident = in_flight, frozenset(resident)
    return record


def home(digest: str, urls: list[str]) -> str:
    return min(urls, key=lambda url: rank(digest.encode(), url))


def chosen(engines: list[EngineRecord], digest: str | None, **more: object) -> str | None:
    found = choose(engines, RoutedRequest(digest, **more))  # type: ignore[arg-type]
    return None if found is None else found.engine.url


def homes_of(digest: str, engines: list[EngineRecord], rate: float) -> Sequence[EngineRecord]:
    found = choose(engines, RoutedRequest(digest, rate=rate))
    assert found is not None
    return found.homes


def test_an_adapter_that_nobody_holds_has_one_home_among_idle_engines():
    engines = [engine(url) for url in URLS]
    for digest in ("d1", "d2", "d3", "d4", "d5", "d6"):
        assert chosen(engines, digest) == home(digest, URLS)
        assert chosen(engines[::-1], digest) == home(digest, URLS)


def test_what_was_measured_of_idle_engines_moves_no_home():
    engines = [engine(url, load_seconds=0.01 * (i + 1), request_seconds=1 + i) for i, url in enumerate(URLS)]
    for digest in ("d1", "d2", "d3", "d4", "d5", "d6"):
        assert chosen(engines, digest) == home(digest, URLS)


def test_homes_are_spread_and_stay_when_an_engine_leaves():
    digests = [f"digest-{i}" for i in range(400)]
    counts = [sum(home(digest, URLS) == url for digest in digests) for url in URLS]
    assert min(counts) > 60
    for digest in digests:
        if home(digest, URLS) != URLS[0]:
            assert home(digest, URLS[1:]) == home(digest, URLS)


def test_who_holds_the_adapter_serves_it_wherever_its_home_is():
    for url in URLS:
        engines = [engine(u, resident=("d",) if u == url else ()) for u in URLS]
        assert chosen(engines, "d") == url


def test_an_adapter_on_its_way_is_held_already():
    engines = [engine(url) for url in URLS]
    with engines[2].requests.count("d"):
        assert chosen(engines, "d") == URLS[2]
    assert chosen(engines, "d") == home("d", URLS)


def test_a_hot_adapter_is_copied_where_waiting_is_shortest_and_the_copy_left_when_it_cools():
    holder, *others = (engine(url) for url in URLS)
    holder.resident = frozenset(["d"])
    # Light load: every request goes to the engine that holds the adapter.
    holder.requests.sequences = 3
    assert chosen([holder, *others], "d") == holder.url
    # The queue there takes longer than a load elsewhere.
    holder.requests.sequences = SLOTS + 4
    others[0].requests.sequences = others[1].requests.sequences = 2
    assert chosen([holder, *others], "d") == others[2].url
    # Both engines hold it under light load: one of them gets all requests.
    others[2].resident = frozenset(["d"])
    holder.requests.sequences = 0
    assert len({chosen([holder, *others], "d") for _ in range(3)}) == 1


def test_a_load_that_takes_longer_than_the_queue_is_not_made():
    holder, other = engine(URLS[0], SLOTS + 1, ("d",), request_seconds=1.0), engine(URLS[1], SLOTS)
    holder.load_seconds = other.load_seconds = 60.0
    assert chosen([holder, other], "d") == holder.url


def test_a_conversation_goes_back_to_who_has_its_prefix():
    engines = [engine(url, resident=("d",)) for url in URLS]
    for cached in engines:
        assert chosen(engines, "d", cached=cached) == cached.url
        assert chosen(engines, None, prefix=b"p", cached=cached) == cached.url


def test_an_activated_lora_follows_the_base_models_blocks_though_another_engine_holds_it():
    engines = [engine(url, resident=("d",) if i == 0 else ()) for i, url in enumerate(URLS)]
    engines[0].state = EngineState(adapters_activated=frozenset(["d"]))
    assert BaseEngines(engines).activated == {"d"}
    for cached in engines:
        assert chosen(engines, "d", cached=cached, reuses_base=True) == cached.url
        assert chosen(engines, "d", cached=cached) == URLS[0]
    # The blocks are not worth a wait.
    engines[1].requests.sequences = 2 * SLOTS
    assert chosen(engines, "d", cached=engines[1], reuses_base=True) == URLS[0]


def test_conversations_of_the_base_model_are_spread_by_how_they_begin():
    engines = [engine(url) for url in URLS]
    homes = {chosen(engines, None, prefix=b"conversation %d" % i) for i in range(64)}
    assert homes == set(URLS)


def test_load_outweighs_everything_when_an_engine_is_far_above_the_others():
    full, free = engine(URLS[0], 2 * SLOTS, ("d",)), engine(URLS[1])
    assert chosen([full, free], None, cached=full) == free.url
    assert chosen([full, free], "d", cached=full) == free.url


def test_an_engine_is_passed_over_that_is_down_or_broken():
    down, broken, well = (engine(url, resident=("d",)) for url in URLS[:3])
    down.mark_down("test")
    for _ in range(3):
        broken.breaker.failed(broken.breaker.sent("one"))
        broken.breaker.failed(broken.breaker.sent("two"))
    assert chosen([down, broken, well], "d") == well.url
    assert chosen([down, broken], "d") is None
    assert chosen([], "d") is None


def test_others_requests_count():
    busy, free = engine(URLS[0], other_processes_load=2 * SLOTS), engine(URLS[1])
    assert chosen([busy, free], None) == free.url


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},) * 2 + (True,),
        (
            {"messages": [{"content": "s"}, {"content": "u"}, {"content": "more"}]},
            {"messages": [{"content": "s"}, {"content": "u"}, {"content": "else"}]},
            True,
        ),
        ({"messages": [{"content": "s"}, {"content": "u"}]}, {"messages": [{"content": "s"}, {"content": "v"}]}, False),
        ({"prompt": "x" * 2000 + "y"}, {"prompt": "x" * 2000 + "z"}, True),
        ({"prompt": "x"}, {"prompt": "y"}, False),
        ({"prompt": [1, 2]}, {"prompt": [1, 3]}, False),
        ({"prompt": ["a", "b"]}, {"prompt": ["a", "c"]}, False),
        ({"prompt": [[1, 2], [3]]}, {"prompt": [[1, 2], [4]]}, False),
        ({"prompt": "x", "prompt_cache_key": "k"}, {"prompt": "y", "prompt_cache_key": "k"}, True),
        ({}, {"prompt": None}, True),
    ],
)
def test_what_a_conversation_is_known_by(one: dict[str, object], other: dict[str, object], same: bool):
    assert (prefix_key("t", "d", one) == prefix_key("t", "d", other)) is same
    assert prefix_key("t", "d", one) != prefix_key("another tenant", "d", one)
    assert prefix_key("t", "d", one) != prefix_key("t", None, one)


def test_a_conversations_key_does_not_read_megabytes():
    large = "\n" * 2**22
    slow: list[dict[str, object]] = [
        {"messages": [{"role": "user", "content": "a", "another_field": large}] * 2},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": large, "x": large}]}]},
        {"prompt_cache_key": msgspec.Raw(msgspec.json.encode(large)), "prompt": "a"},
        {"prompt": [large, large]},
        {"prompt": [[1] * 2**20] * 9},
    ]
    # Three times, because a busy machine may take the core away once.
    for body in slow:
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            prefix_key("t", "d", body)
            seconds.append(time.perf_counter() - began)
        assert min(seconds) < 0.002, "one encoding of 8 MiB takes 10 to 40 ms"


def test_conversations_are_remembered_up_to_a_number():
    conversations, one = Conversations(), engine(URLS[0])
    for i in range(MAX_PREFIXES + 1):
        conversations.served(b"%d" % i, one)
    assert conversations.engine(b"0") is None
    assert conversations.engine(b"1") is one


def test_a_hot_adapter_has_more_homes_and_they_serve_it_before_there_is_a_queue():
    engines = [engine(url) for url in URLS]
    # Two batches of requests in a second.
    rate = 2.0 * SLOTS
    homes = sorted(URLS, key=lambda url: rank(b"d", url))
    assert [e.url for e in homes_of("d", engines, rate)] == homes[:3]
    assert homes_of("d", engines, 0.1 * rate) == ()
    assert len(homes_of("d", engines, 100 * rate)) == len(URLS)
    # A single request, however long it takes, makes no adapter popular.
    for each in engines:
        each.request_seconds = 600.0
    assert homes_of("d", engines, 1.0) == ()
    for each in engines:
        each.request_seconds = 1.0
    by_url = {e.url: e for e in engines}
    by_url[homes[0]].observe_resident(["d"])
    by_url[homes[0]].requests.sequences = SLOTS // 2
    assert chosen(engines, "d", rate=rate) == homes[1]
    assert chosen(engines, "d", rate=0.1 * rate) == homes[0]
    # An engine that is no home loads only if the homes have queues.
    for url in homes[:3]:
        by_url[url].observe_resident(["d"])
        by_url[url].requests.sequences = SLOTS // 2
    assert chosen(engines, "d", rate=rate) in homes[:3]


def test_an_engine_gets_no_more_hot_adapters_than_fit_on_its_device():
    engines = [engine(url) for url in URLS]
    rate, homes = 2.0 * SLOTS, sorted(URLS, key=lambda url: rank(b"d", url))
    first = next(e for e in engines if e.url == homes[0])
    # Four pages for each of the adapters there: room for two.
    first.observe_state(pages(8, 0, "xy"), 0)
    assert first.adapter_room == 2
    with first.requests.count("x"):
        assert homes_of("d", engines, rate)[0] is first
        with first.requests.count("y"):
            assert [e.url for e in homes_of("d", engines, rate)] == homes[1:]
            assert chosen(engines, "d") == homes[1]
            assert homes_of("x", engines, rate), "the adapters there keep their homes"
            # Its room is no reason to leave it if the others have queues.
            for other in engines:
                other.requests.sequences = SLOTS if other is first else 4 * SLOTS
            assert chosen(engines, "d") == homes[0]
    # Without adapters, each takes a page; without pages, the room is unknown.
    first.observe_state(pages(8, 8, ""), 0)
    assert first.adapter_room == 8
    first.observe_state(pages(0, 0, "xy"), 0)
    assert first.adapter_room is None
    assert first.has_room_for("d")


def pages(total: int, free: int, resident: str) -> EngineState:
    return EngineState(adapter_pages_total=total, adapter_pages_free=free, adapters_resident=[*resident])


def test_requests_at_other_gateways_count_in_the_number_of_homes():
    engines = [engine(url, 2, other_processes_load=6) for url in URLS]
    rate = 0.5 * SLOTS
    assert number_of_homes("d", [engine(url, 2) for url in URLS], rate) == 1
    assert number_of_homes("d", engines, rate) == 3


def test_an_engine_with_other_loads_ahead_gets_no_further_one():
    engines = [engine(url) for url in URLS]
    first = next(e for e in engines if e.url == home("d", URLS))
    with first.requests.count("other", loads=True):
        assert chosen(engines, "d") != first.url
        # It holds the other adapter now.
        first.observe_resident(["other"])
        assert chosen(engines, "d") == first.url
    first.observe_resident([])
    with first.requests.count("other", loads=True):
        pass
    assert chosen(engines, "d") == first.url


def test_a_rate_follows_the_requests_of_the_last_seconds():
    now = 0.0
    rates = Rates(lambda: now)
    assert rates.of("d") == rates.of(None) == 0.0
    for number in range(50):
        now = 0.1 * number
        rates.count("d")
    assert rates.of("d") == pytest.approx(10.0, rel=0.1)
    now += 5.0
    assert rates.of("d") < 0.1


def test_a_simulated_fleet_loads_fewer_adapters_than_before_and_answers_no_later():
    # Simulated time and seeded requests: every run is the same. The benchmark has more requests.
    found = {name: measure(POLICIES[name], 3000, 30.0, 1.0, 0.3) for name in ("least loaded", "2026-11-21", "ours")}
    ours, before, least = found["ours"], found["2026-11-21"], found["least loaded"]
    assert 1.5 * ours.loads <= least.loads
    assert ours.loads <= 0.9 * before.loads
    assert ours.median <= least.median
    assert ours.worst <= before.worst <= least.worst


def test_a_simulated_hot_adapter_is_on_three_engines_within_five_seconds():
    seconds = seconds_to_engines(POLICIES["ours"], 3, 0.8, 0.6, 0.3)
    assert seconds is not None
    assert seconds < 5.0
