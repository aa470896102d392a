"""Fixtures for the quarantine's tests."""

import pytest

from tests.gateway.fleet.failures.test_quarantine import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a busy machine from dropping a report by its time-out."""
    monkeypatch.setattr("gateway.fleet.failures.shared_deaths.CALL_SECONDS", 20.0)
    monkeypatch.setattr("gateway.fleet.failures.shared_deaths.LEAVE_SECONDS", 60.0)
