"""A shared budget: the shares of owners that act together."""

import pytest

from gateway.sharing.budget import Budget


def fill(budget: Budget, owner: str, step: int = 1) -> int:
    """Let an owner take as much as it may, in steps; return its total."""
    held = 0
    while budget.has_room(owner, step):
        budget.change(owner, step)
        held += step
    return held


@pytest.mark.parametrize("leaves_room", [False, True])
def test_one_owner_gets_half(leaves_room: bool):
    assert fill(Budget(1024, leaves_room=leaves_room), "a") == 512


def test_owners_that_act_together_leave_some_to_others():
    budget = Budget(1024, leaves_room=True)
    assert [fill(budget, owner) for owner in "abcd"] == [512, 256, 128, 64]
    # Room that one owner returns goes to owners that hold less than they leave free.
    budget.change("a", -512)
    assert fill(budget, "d") > 200
    assert budget.held < budget.total


def test_owners_that_take_turns_leave_as_much():
    budget = Budget(1024, leaves_room=True)
    while any(budget.has_room(owner, 8) for owner in "ab"):
        for owner in "ab":
            if budget.has_room(owner, 8):
                budget.change(owner, 8)
    assert budget.held <= 2 * 1024 / 3
    assert fill(budget, "c") >= 1024 / 8
