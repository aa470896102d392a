"""The bound of a request's wait that `benchmarks.residency` compares with the measured one."""

from dataclasses import replace

from benchmarks.adapter_engine import Stream
from benchmarks.residency import bound_figures
from benchmarks.residency_bound import ADAPTER_S, Machine, RequestBound, Wait, waits

MACHINE = Machine(step=0.1, row=0.001, prompt=32, adapters=8)
# Requests long before use more adapters than the device holds.
BEFORE = [Stream("before", f"before{i}", 0.0, [5.0]) for i in range(8)]


def stream(tenant: str, digest: str, sent: float, tokens: int, wait: float = 5.0) -> Stream:
    """Return a stream with its first token after `wait` seconds, and then one each second."""
    return Stream(tenant, digest, sent, [sent + wait + i for i in range(tokens)])


def bound_beside(*others: Stream, adapters: int = 8) -> float:
    """Return the bound at the first token. adapters: number that the device holds."""
    request = stream("mine", "a", 100.0, 16)
    bound = RequestBound(request, [*BEFORE, request, *others], replace(MACHINE, adapters=adapters))
    return bound.at(request.token_times[0])


def wait_beside(request: Stream, *others: Stream) -> Wait:
    return waits([request, *others, *BEFORE], MACHINE)[0]


def test_the_bound_contains_no_length_of_another_tenants_answer() -> None:
    assert bound_beside(stream("other", "b", 99.0, 10)) == bound_beside(stream("other", "b", 99.0, 4000))


def test_each_adapter_that_the_tenant_waits_for_before_it_counts() -> None:
    alone, other = bound_beside(), stream("other", "b", 99.0, 10)
    assert ADAPTER_S < alone < ADAPTER_S + 1
    assert bound_beside(stream("mine", "a", 99.0, 10)) < alone + 1
    assert bound_beside(stream("mine", "c", 99.0, 10)) > alone + ADAPTER_S
    assert bound_beside(stream("mine", "c", 104.0, 10)) < alone + 1  # behind the request
    assert alone < bound_beside(other) < bound_beside(other, stream("mine", "c", 50.0, 60)) - 1


def test_a_request_that_comes_later_and_begins_earlier_counts_by_its_service_only() -> None:
    """Its adapter is on the device, so the request before it does not wait for that adapter's pages."""
    alone, other = bound_beside(), stream("other", "b", 99.0, 10)
    overtaking = stream("mine", "c", 101.0, 10, wait=1.0)
    assert alone < bound_beside(overtaking) < alone + 1
    assert bound_beside(other) + 1 < bound_beside(other, overtaking) < bound_beside(other) + ADAPTER_S


def test_each_token_that_the_tenant_gets_during_the_wait_counts() -> None:
    """The streams end at 102 and 114 s; the request has its first token at 105 s."""
    other = stream("other", "b", 99.0, 10)
    running = [bound_beside(other, stream("mine", "c", 50.0, tokens)) for tokens in (48, 60)]
    assert running[0] < running[1]


def test_requests_that_ended_before_the_wait_count_as_the_tenants_lead_only() -> None:
    assert bound_beside(stream("other", "b", 10.0, 10)) == bound_beside()
    other = stream("other", "b", 99.0, 10)
    assert bound_beside(other, stream("mine", "a", 10.0, 10)) > bound_beside(other)
    assert bound_beside(other, stream("mine", "a", 10.0, 10), stream("other", "b", 10.0, 90)) == bound_beside(other)


def test_without_a_lack_of_pages_the_bound_is_that_of_prompts() -> None:
    assert bound_beside(adapters=9) < 1 < bound_beside(adapters=8)


def test_service_at_the_end_of_a_wait_does_not_excuse_the_time_before() -> None:
    """The tenant gets nothing for 200 s, then 40 later requests are served before the starved one. Their service makes
    the bound at the first token longer than the wait; the request was late long before.
    """
    starved, other = stream("mine", "a", 100.0, 16, wait=205.0), stream("other", "b", 99.0, 400)
    later = [stream("mine", f"c{i % 4}", 300.0, 96, wait=1.0 + i / 100) for i in range(40)]
    streams = [starved, other, *later, *BEFORE]
    wait = waits(streams, MACHINE)[0]
    assert starved.ttft < RequestBound(starved, streams, MACHINE).at(starved.token_times[0])
    assert wait.part > 1
    assert wait.bound < 100
    assert bound_figures([wait])["above bound"] == 1


def test_the_bound_at_the_start_depends_on_nothing_that_comes_later() -> None:
    earlier, other = stream("mine", "c", 99.0, 50), stream("other", "b", 99.0, 400)
    known = [wait_beside(stream("mine", "a", 100.0, 16, wait), earlier, other).at_start for wait in (5.0, 30.0, 3000.0)]
    assert len(set(known)) == 1
    later = [stream("mine", "d", 101.0 + i, 96, wait=1.0) for i in range(20)]
    assert wait_beside(stream("mine", "a", 100.0, 16, 30.0), earlier, other, *later).at_start == known[0]
    longer = wait_beside(stream("mine", "a", 100.0, 16), stream("mine", "c", 99.0, 90), other)
    assert longer.at_start > known[0]


def test_a_wait_behind_its_tenants_own_requests_is_late_by_the_bound_at_the_start_only() -> None:
    """Later requests of the tenant are served without a break: the documented bound grows by their service."""
    request, other = stream("mine", "a", 100.0, 16, wait=200.0), stream("other", "b", 99.0, 400)
    later = [stream("mine", f"c{i % 4}", 101.0 + i / 4, 96, wait=0.5) for i in range(700)]
    wait = wait_beside(request, other, *later)
    assert wait.part < 1
    assert wait.at_start < wait.ttft
    figures = bound_figures([wait])
    assert (figures["above bound"], figures["above bound at start"]) == (0, 1)
