"""States of the limits in the memory of one process: those that are paid off are dropped, at a bounded cost."""

import sys
from collections.abc import Callable
from functools import partial
from itertools import count

import pytest

from gateway.quota import local
from gateway.quota.limits import Limit
from gateway.quota.local import LocalLimits
from gateway.records.money.prices import Price
from tests.gateway.quota.scripted import DAY, SECOND, START, demand

PRICE = Price(input=1_000_000, cached=1_000_000, output=1_000_000)
LETTERS = {"a request rate of a minute": "r", "a token rate of a day": "d", "a budget": "j", "a rolling budget": "l"}


def limit(key: int, letter: str, value: int = 1000) -> Limit:
    return Limit(f"key:{key}:{letter}", "key", letter, value)


class Use:
    """Requests of many keys, one after the other."""

    def __init__(self) -> None:
        self.limits, self._numbers = LocalLimits(), count()

    def request(self, key: int, letter: str, now: int, value: int = 1000) -> bool:
        """Send and settle a request of one token and one micro-unit, and return whether it was admitted."""
        id_ = f"r{next(self._numbers)}"
        allowed = self.limits.acquire([limit(key, letter, value)], demand(id_, 1, 0, 1, PRICE), now).allowed
        if allowed:
            self.limits.settle("", id_, 1, 1, counts=True, now=now)
        return allowed

    @property
    def num_states(self) -> int:
        return len(self.limits._states) + len(self.limits._days)


def calls_of(do: Callable[[], object]) -> int:
    """Return the number of functions, of Python and of C, that `do` calls."""
    calls, before = 0, sys.getprofile()

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        do()
    finally:
        sys.setprofile(before)
    return calls


@pytest.mark.parametrize("letter", LETTERS.values(), ids=LETTERS)
def test_the_work_of_an_admission_does_not_grow_with_the_states(letter: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local, "MAX_STATES", 100)
    work = []
    for keys in (200, 4000):
        use = Use()
        for key in range(keys):
            use.request(key, letter, START)
        assert use.num_states == keys
        work.append(max(calls_of(partial(use.request, 0, letter, START)) for _ in range(5)))
    assert work[1] <= work[0] + 10, work


@pytest.mark.parametrize("letter", LETTERS.values(), ids=LETTERS)
def test_states_that_are_paid_off_are_dropped_and_others_stay(letter: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(local, "MAX_STATES", 100)
    use, paid_off = Use(), START + 40 * DAY
    for key in range(2000):
        use.request(key, letter, START)
    # A limit of one, which is used up.
    assert use.request(-1, letter, paid_off, 1)
    for _ in range(100):
        use.request(-2, letter, paid_off + SECOND)
    assert use.num_states <= 100
    assert not use.request(-1, letter, paid_off + SECOND, 1)
