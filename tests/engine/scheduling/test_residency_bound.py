"""The bound of a request's wait that `benchmarks.residency` compares with the measured one."""

from dataclasses import replace

from benchmarks.adapter_engine import Stream
from benchmarks.residency_bound import ADAPTER_S, Machine, bound

MACHINE = Machine(step=0.1, row=0.001, prompt=32, adapters=8)


def stream(tenant: str, digest: str, sent: float, tokens: int) -> Stream:
    """Return a stream with its first token after 5 s, and then one each second."""
    return Stream(tenant, digest, sent, [sent + 5.0 + i for i in range(tokens)])


def bound_beside(*others: Stream, adapters: int = 8) -> float:
    """adapters: number that the device holds. Requests long before use more than eight."""
    request, before = stream("mine", "a", 100.0, 16), [stream("before", f"before{i}", 0.0, 1) for i in range(8)]
    return bound(request, [*before, request, *others], replace(MACHINE, adapters=adapters))


def test_the_bound_contains_no_length_of_another_tenants_answer() -> None:
    assert bound_beside(stream("other", "b", 99.0, 10)) == bound_beside(stream("other", "b", 99.0, 4000))


def test_each_adapter_that_the_tenant_waits_for_before_it_counts() -> None:
    alone, other = bound_beside(), stream("other", "b", 99.0, 10)
    assert ADAPTER_S < alone < ADAPTER_S + 1
    assert bound_beside(stream("mine", "a", 99.0, 10)) < alone + 1
    assert bound_beside(stream("mine", "c", 99.0, 10)) > alone + ADAPTER_S
    assert bound_beside(stream("mine", "c", 104.0, 10)) < alone + 1  # behind the request
    assert alone < bound_beside(other) < bound_beside(other, stream("mine", "c", 50.0, 60)) - 1


def test_requests_that_ended_before_the_wait_count_as_the_tenants_lead_only() -> None:
    assert bound_beside(stream("other", "b", 10.0, 10)) == bound_beside()
    other = stream("other", "b", 99.0, 10)
    assert bound_beside(other, stream("mine", "a", 10.0, 10)) > bound_beside(other)
    assert bound_beside(other, stream("mine", "a", 10.0, 10), stream("other", "b", 10.0, 90)) == bound_beside(other)


def test_without_a_lack_of_pages_the_bound_is_that_of_prompts() -> None:
    assert bound_beside(adapters=9) < 1 < bound_beside(adapters=8)
