"""The clock of the quota's script, stopped."""

import time

import pytest

from gateway.quota import script
from tests.gateway.quota.scripted import CLOCK, SOURCE


@pytest.fixture
def stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the clock of every quota that the test makes: no rate refills and no period ends during a stall."""
    text = SOURCE.replace(CLOCK, f"{{'{int(time.time())}', '0'}}")
    monkeypatch.setattr(script, "source", lambda: text)
