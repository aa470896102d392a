"""Errors of loads: remembered for a while, but for those that end by themselves."""

import pytest

from adapters.manifest import AdapterError, AdapterNotFound
from adapters.tiers import failed_loads
from adapters.tiers.failed_loads import FailedLoads


@pytest.mark.parametrize("error", [AdapterError("r", "too large"), OSError("the store is away")])
def test_a_refusal_and_a_store_that_is_away_are_remembered_until_forgotten(error: Exception) -> None:
    failed = FailedLoads()
    failed.add("a", error)
    assert failed.get("a") is error
    assert failed.get("b") is None
    failed.forget("a")
    assert failed.get("a") is None


@pytest.mark.parametrize("error", [AdapterNotFound("adapter", "none"), KeyError("a fault"), KeyboardInterrupt()])
def test_a_missing_adapter_and_a_fault_of_the_program_are_not_remembered(error: BaseException) -> None:
    failed = FailedLoads()
    failed.add("a", error)
    assert failed.get("a") is None


def test_an_error_is_remembered_for_a_time_and_the_oldest_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failed_loads, "MAX_FAILURES", 2)
    failed, now = FailedLoads(), [100.0]
    monkeypatch.setattr(failed_loads.time, "monotonic", lambda: now[0])
    for digest in ("a", "b", "c"):
        failed.add(digest, OSError(digest))
    assert [failed.get(digest) is None for digest in ("a", "b", "c")] == [True, False, False]
    now[0] += failed_loads.FAILURE_SECONDS
    assert failed.get("c") is None
