"""A sequence's plain tokens on the event loop: each becomes an output after the last one, and none is lost silently."""

import asyncio

import pytest

from engine.answering.in_flight import InFlight
from engine.core.client import Core
from engine.scheduling.request import NewRequest, RequestOutput, SamplingParams, TokenLogprobs

LOGPROBS = [TokenLogprobs(5, -0.1, 1, [], [])]


class Sink:
    """A core that takes sequences and computes nothing."""

    failure = None

    def start(self, events: InFlight) -> None: ...

    def add(self, new_requests: list[NewRequest], rules: object) -> None: ...

    def abort(self, request_id: str) -> None: ...


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
    core = Core()
    in_flight = InFlight(core, max_requests=8)
    with pytest.raises(OverflowError):
        in_flight.submit([NewRequest("a", [1, 2], SamplingParams(), priority=10**30)])
    assert in_flight.number == 0
    await asyncio.wait_for(in_flight.wait_idle(), 60)
