"""A small run of `python -m benchmarks.hostile`: no attack delays a neighbour, crashes a part or leaves anything
behind.

Latencies are not judged, because tests share their machine; the limit on stalls is generous.
"""

import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from benchmarks.hostile.__main__ import read_flags, run_all
from benchmarks.hostile.catalogue import ATTACKS, SHOWN
from benchmarks.hostile.place import Place, before_doubles, of_stack
from benchmarks.hostile.report import Report
from benchmarks.hostile.run import Limits, Rounds, as_json, run_attack
from testing.stack import Stack

SECONDS = 2.0
# An attack that a busy machine has left no time for is repeated within so many seconds.
REPEATS_SECONDS = 90.0
LIMITS = Limits(latency=None, upload=20.0, stall=3.0, refusal=30.0)


@pytest.fixture(scope="module")
def place(stack: Stack) -> Place:
    return of_stack(stack)


@pytest.fixture(scope="module")
def doubles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Place]]:
    """Return a function that returns a gateway before the engine doubles of a kind, started once for all attacks."""
    with ExitStack() as exits:
        yield cache(lambda kind: exits.enter_context(before_doubles(tmp_path_factory.mktemp(kind), kind)))


async def attacked(name: str, place: Place, statuses: set[str]) -> set[str]:
    """Run an attack until it has seen `statuses`, and return all that it has seen."""
    seen: set[str] = set()
    deadline = time.monotonic() + REPEATS_SECONDS
    while not statuses <= seen:
        assert time.monotonic() < deadline, f"{name}: expected the statuses {statuses}, saw {seen}"
        result = await run_attack(ATTACKS[name], place, Rounds(SECONDS, 1), LIMITS)
        assert not result.missed, result
        assert result.samples
        [written] = json.loads(as_json([result]))
        assert written["statuses"] == result.statuses
        assert (written["rate"] > 0) == bool(result.statuses)
        seen |= set(result.statuses)
    return seen


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
    seen = await attacked(name, place, statuses)
    assert all(status == "503" or not status.startswith("5") for status in seen)


@pytest.mark.parametrize(
    ("kind", "name", "statuses"),
    [
        ("vllm", "vllm-fields", {"200", "400"}),
        ("vllm", "large-foreign-answers", {"200"}),
        ("vllm", "many-sequences", {"200", "400"}),
        ("vllm", "long-sequences", {"200"}),
        ("redirecting", "redirects", {"200"}),
    ],
)
async def test_an_engine_that_misbehaves_learns_nothing(
    kind: str, name: str, statuses: set[str], doubles: Callable[[str], Place]
):
    await attacked(name, doubles(kind), statuses)


def tenants_of(home: Path) -> dict[str, int]:
    """Return the limit of concurrent requests of each tenant that a stopped stack had, by name without its number."""
    with closing(sqlite3.connect(home / "gateway.db")) as database:
        rows = database.execute("SELECT name, limits FROM tenants").fetchall()
    return {name.rpartition("-")[0]: json.loads(limits).get("max_concurrent") for name, limits in rows}


async def test_the_same_attack_on_a_second_stack_is_the_load_of_the_quiet_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The attacker has an equal tenant there, and it has none of the first stack in the quiet rounds."""
    attack = replace(ATTACKS["vllm-fields"], limits={"max_concurrent": 7})
    monkeypatch.setitem(ATTACKS, attack.name, attack)
    flags = read_flags(["--elsewhere", "--only", attack.name, "--seconds", "1", "--pairs", "1"])
    report = Report(LIMITS, None)
    await run_all(flags, tmp_path, report)
    [result] = report.results
    assert result.quiet_load == "vllm-fields elsewhere", result
    assert result.rate > 0
    assert result.quiet_rate > 0
    assert set(result.statuses) <= {"200", "400"}
    here, there = tenants_of(tmp_path / "vllm-0"), tenants_of(tmp_path / "vllm-elsewhere-0")
    assert (here.pop("attacker"), there.pop("calm")) == (7, 7)
    assert here.keys() == there.keys() == {"neighbour"}
