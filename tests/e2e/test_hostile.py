"""A small run of `python -m benchmarks.hostile`: no attack delays a neighbour, crashes a part or leaves anything
behind.

Latencies are not judged, because tests share their machine; the limit on stalls is generous.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.hostile.catalogue import ATTACKS, SHOWN
from benchmarks.hostile.place import Place, before_doubles, of_stack
from benchmarks.hostile.run import Limits, Result, as_json, run_attack
from testing.stack import Stack

SECONDS = 2.0
LIMITS = Limits(latency=None, upload=20.0, stall=3.0, refusal=30.0)


@pytest.fixture(scope="module")
def place(stack: Stack) -> Place:
    return of_stack(stack)


@pytest.fixture
def doubles(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Place]:
    """Start a gateway before the engine doubles of a kind."""
    with before_doubles(tmp_path, request.param) as place:
        yield place


async def attacked(name: str, place: Place) -> Result:
    result = await run_attack(ATTACKS[name], place, SECONDS, 1, LIMITS)
    assert not result.missed, result
    assert result.samples
    [written] = json.loads(as_json([result]))
    assert written["statuses"] == result.statuses
    return result


def test_there_are_as_many_attacks_as_were_promised():
    assert len(SHOWN) >= 25
    assert len({attack.words for attack in SHOWN}) == len(SHOWN)


@pytest.mark.parametrize(
    ("name", "statuses"),
    [
        ("rank-65", {"400"}),
        ("leaving-uploads", {"left"}),
        ("pax-bomb", {"400"}),
        ("cancel-storm", {"left"}),
        ("header-flood", {"400"}),
        ("wrong-keys", {"401", "429"}),
        ("alias-churn", {"200", "201"}),
        ("partial-uploads", {"201", "left"}),
    ],
)
async def test_an_attack_is_felt_by_nobody_and_leaves_nothing(name: str, statuses: set[str], place: Place):
    result = await attacked(name, place)
    assert statuses <= set(result.statuses)
    assert all(status == "503" or not status.startswith("5") for status in result.statuses)


@pytest.mark.parametrize(
    ("doubles", "name", "statuses"),
    [
        ("vllm", "vllm-fields", {"200", "400"}),
        ("redirecting", "redirects", {"200"}),
    ],
    indirect=["doubles"],
)
async def test_an_engine_that_misbehaves_learns_nothing(name: str, statuses: set[str], doubles: Place):
    result = await attacked(name, doubles)
    assert statuses <= set(result.statuses)
