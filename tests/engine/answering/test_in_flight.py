"""Sequences on the event loop: the tenants' shares of places; each plain token becomes an output after the last one."""

import asyncio
from collections import Counter
from contextlib import ExitStack

import pytest

from engine.answering.in_flight import InFlight
from engine.core.client import CoreClient
from engine.errors import QueueFull, TenantQueueFull
from engine.scheduling.request import NewRequest, RequestOutput, SamplingParams, TokenLogprobs

LOGPROBS = [TokenLogprobs(5, -0.1, 1, [], [])]


class Sink:
    """A core that takes sequences and computes nothing."""

    failure = None

    def start(self, events: InFlight) -> None: ...

    def add(self, new_requests: list[NewRequest], rules: object) -> None: ...

    def abort(self, request_id: str, *, is_complete: bool) -> None: ...


async def test_plain_tokens_follow_the_last_output() -> None:
    in_flight = InFlight(Sink(), max_requests=8)
    group = in_flight.submit([NewRequest(id_, [1, 2], SamplingParams()) for id_ in ("a", "b")])
    first = RequestOutput("b", [5], None, 2, 1, 1, LOGPROBS, [None, *LOGPROBS], started_at=7.0, served_digest="base")
    in_flight.stepped(0.0, [first], [])
    in_flight.stepped(0.0, [], [("gone", 4), ("b", 6)])
    in_flight.stepped(0.0, [], [("b", 7)])
    plain = first._replace(logprobs=None, prompt_logprobs=None)
    assert await group.news() == [
        (1, first),
        (1, plain._replace(token_ids=[6], num_output_tokens=2)),
        (1, plain._replace(token_ids=[7], num_output_tokens=3)),
    ]
    assert group.num_generated == [0, 3]


async def test_a_prompts_log_probabilities_arrive_in_parts_with_its_first_token() -> None:
    """A prompt that is preempted begins again."""
    in_flight = InFlight(Sink(), max_requests=8)
    group = in_flight.submit([NewRequest("a", [1, 2, 3, 4], SamplingParams(prompt_logprobs=0))])
    one, two, three = (TokenLogprobs(token, -0.1, 1, [], []) for token in (2, 3, 4))
    part = RequestOutput("a", [], None, 4, 0, 0, None, [None, one])
    in_flight.stepped(0.0, [part], [])
    in_flight.stepped(0.0, [part._replace(prompt_logprobs=[None, one])], [])
    in_flight.stepped(0.0, [part._replace(prompt_logprobs=[two])], [])
    first = part._replace(token_ids=[5], num_output_tokens=1, prompt_logprobs=[three])
    in_flight.stepped(0.0, [first], [])
    in_flight.stepped(0.0, [], [("a", 6)])
    assert await group.news() == [
        (0, first._replace(prompt_logprobs=[None, one, two, three])),
        (0, first._replace(token_ids=[6], num_output_tokens=2, prompt_logprobs=None)),
    ]


async def test_a_plain_token_without_an_output_before_it_is_an_error() -> None:
    """The token would be missing in the answer and in its bill."""
    in_flight = InFlight(Sink(), max_requests=8)
    in_flight.submit([NewRequest("a", [1, 2], SamplingParams())])
    with pytest.raises(KeyError, match="a"):
        in_flight.stepped(0.0, [], [("a", 4)])


async def test_the_last_output_is_kept_without_its_arrays_and_until_the_release() -> None:
    in_flight = InFlight(Sink(), max_requests=8)
    group = in_flight.submit([NewRequest("a", [1, 2], SamplingParams())])
    output = RequestOutput("a", [5], None, 2, 0, 1, LOGPROBS, [None, *LOGPROBS], logits=b"1234")
    in_flight.stepped(0.0, [output], [])
    assert await group.news() == [(0, output)]
    assert in_flight._last == {"a": output._replace(logprobs=None, prompt_logprobs=None, logits=None)}
    in_flight.released("a")
    assert in_flight._last == {}


async def test_sequences_that_cannot_be_sent_leave_nothing_in_flight() -> None:
    """Otherwise a drain waits for them to its end, and a probe for an idle engine for ever."""
    core = CoreClient()
    in_flight = InFlight(core, max_requests=8)
    with pytest.raises(OverflowError):
        in_flight.submit([NewRequest("a", [1, 2], SamplingParams(), priority=10**30)])
    assert in_flight.number == 0
    await asyncio.wait_for(in_flight.wait_idle(), 60)


class Places:
    """The places of an engine with the default limits."""

    def __init__(self, total: int = 64 + 1024) -> None:
        self.in_flight = InFlight(Sink(), max_requests=total)
        self.stack = ExitStack()

    def fill(self, tenant_id: str, count: int = 1) -> int:
        """Let a tenant have as many requests of `count` sequences as it may; return the number of sequences."""
        held = 0
        while self.take(tenant_id, count):
            held += count
        return held

    def take(self, tenant_id: str, count: int = 1) -> bool:
        """Reserve the places of one request. Return whether it got them."""
        try:
            self.stack.enter_context(self.in_flight.place(count, tenant_id))
        except QueueFull:
            return False
        return True


async def test_a_tenant_alone_gets_half_of_the_places_in_one_request_or_many() -> None:
    assert Places().fill("a", 544) == 544
    places = Places()
    assert places.fill("a") == places.in_flight.max_requests("a") == 544
    with pytest.raises(TenantQueueFull, match="544 of your requests are in flight here already"):
        places.stack.enter_context(places.in_flight.place(1, "a"))
    places.stack.close()
    assert places.in_flight._places.held == 0


async def test_a_request_without_enough_free_places_is_told_both_numbers() -> None:
    """The error named 1085 requests as the limit of 1088."""
    places = Places()
    assert places.take("", 1085)
    with pytest.raises(QueueFull) as refused:
        places.stack.enter_context(places.in_flight.place(8, ""))
    assert str(refused.value) == "1085 of 1088 places are in use, and the request needs 8."
    assert places.take("", 3)


@pytest.mark.parametrize(("colluding", "rest"), [(2, 136), (3, 68), (10, 1)])
async def test_tenants_that_act_together_leave_places_to_another_one(colluding: int, rest: int) -> None:
    """Two tenants with half each took every place, and all others got 503 until one of them ended."""
    places = Places()
    held = [places.fill(f"colluding-{number}") for number in range(colluding)]
    assert held[:2] == [544, 272]
    assert places.fill("honest") == rest


async def test_a_few_dozen_tenants_that_act_together_leave_a_place_for_the_first_sequence_of_another_one() -> None:
    """Twelve took every place, and kept them: a place that became free was taken by one of them at once."""
    places = Places()
    colluding = [f"colluding-{number}" for number in range(24)]
    for tenant_id in colluding:
        places.fill(tenant_id)
    assert not any(places.take(tenant_id) for tenant_id in colluding)
    assert places.fill("honest") == 1


async def test_tenants_that_fill_the_places_at_the_same_time_leave_as_many_to_another_one() -> None:
    places = Places()
    held = Counter(dict.fromkeys("abc", 0))
    while got := [tenant_id for tenant_id in held if places.take(tenant_id)]:
        held.update(got)
    assert held == {"a": 272, "b": 272, "c": 272}
    assert places.fill("honest") == 136


async def test_many_tenants_with_few_sequences_use_every_place() -> None:
    places = Places()
    for number in range(1088):
        places.stack.enter_context(places.in_flight.place(1, f"tenant-{number}"))
    with pytest.raises(QueueFull) as refused:
        places.stack.enter_context(places.in_flight.place(1, "late"))
    assert not isinstance(refused.value, TenantQueueFull)


async def test_places_of_an_engine_without_a_gateway_have_no_shares() -> None:
    places = Places(8)
    assert places.fill("") == 8
