"""Fixtures of the tests of engines that come and go."""

import pytest


@pytest.fixture
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for new engines, and check those that cannot be followed, ten times a second instead of once."""
    monkeypatch.setattr("gateway.fleet.discovery.registry.POLL_SECONDS", 0.1)
