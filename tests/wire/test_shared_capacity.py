"""A shared capacity: the shares of owners that act together."""

import pytest

from wire.shared_capacity import SharedCapacity


def fill(capacity: SharedCapacity, owner: str, step: int = 1, *, leaves_room: bool = True) -> int:
    """Let an owner take as much as it may, in steps; return its total."""
    held = 0
    while capacity.has_room(owner, step, leaves_room=leaves_room):
        capacity.change(owner, step)
        held += step
    return held


@pytest.mark.parametrize("leaves_room", [False, True])
def test_one_owner_gets_half(leaves_room: bool):
    assert fill(SharedCapacity(1024), "a", leaves_room=leaves_room) == 512


def test_owners_that_act_together_leave_some_to_others():
    capacity = SharedCapacity(1024)
    assert [fill(capacity, owner) for owner in "abcd"] == [512, 256, 128, 64]
    # Room that one owner returns goes to owners that hold less than they leave free.
    capacity.change("a", -512)
    assert fill(capacity, "d") > 200
    assert capacity.held < capacity.total


def test_owners_that_take_turns_leave_as_much():
    capacity = SharedCapacity(1024)
    while any(capacity.has_room(owner, 8, leaves_room=True) for owner in "ab"):
        for owner in "ab":
            if capacity.has_room(owner, 8, leaves_room=True):
                capacity.change(owner, 8)
    assert capacity.held <= 2 * 1024 / 3
    assert fill(capacity, "c") >= 1024 / 8
