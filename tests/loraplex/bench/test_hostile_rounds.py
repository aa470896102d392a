"""Rounds of `benchmarks.hostile`: the load of the quiet ones, what they leave behind, and flags that contradict."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import cast

import pytest

from benchmarks.hostile.__main__ import read_flags
from benchmarks.hostile.attack import Attack
from benchmarks.hostile.attacker import Order, Round
from benchmarks.hostile.catalogue import ATTACKS
from benchmarks.hostile.neighbour import Measurements, Neighbour
from benchmarks.hostile.place import Place
from benchmarks.hostile.report import Report, show
from benchmarks.hostile.run import Child, Limits, QuietLoad, Result, Side, judge, quiet_load
from benchmarks.hostile.watch import Remains, Seen, Watch


class IdleNeighbour:
    """Neighbour with one chat of 20 ms in each round."""

    async def measure(self, until: asyncio.Event) -> Measurements:
        await until.wait()
        return Measurements(whole=[0.02], first=[0.01])


class OneRequest:
    """Process of an attacker whose every round has one request, which stores an adapter."""

    async def run(self, order: Order) -> Round:
        return Round(Counter({"201": 1}), breaches=["500: broken"], accepted=["sha256:mine"], seconds=order.seconds)


class Remaining:
    """Watch that finds the given remains, one after the other. asked: arguments of `settled`."""

    def __init__(self, *remains: Remains) -> None:
        self._remains = [*remains]
        self.asked: list[tuple[object, object]] = []

    async def observe(self, until: asyncio.Event) -> Seen:
        await until.wait()
        return Seen(memory=7)

    async def settled(self, before: Remains | None = None, accepted: set[str] | None = None) -> Remains:
        self.asked.append((before, accepted))
        return self._remains.pop(0)


def remains(leases: int, *digests: str) -> Remains:
    return Remains(Counter({"leases": leases}), frozenset(digests))


def side(watch: Remaining) -> Side:
    return Side(cast(Child, OneRequest()), cast(Watch, watch))


async def run(one: Side, of_neighbour: Remaining) -> None:
    await one.run(cast(Neighbour, IdleNeighbour()), cast(Watch, of_neighbour), Order(0.5))


def place(url: str) -> Place:
    return Place(url, "", "", 0, "", Path(), Path(), Path())


@pytest.mark.parametrize("name", ["pax-bomb", "huge-token-ids"])
def test_the_quiet_load_is_the_attack_itself_if_there_is_another_stack(name: str):
    attack, here, there = ATTACKS[name], place("http://here"), place("http://there")
    assert quiet_load(attack, here, there) == QuietLoad(attack, there, f"{name} elsewhere")


def test_the_quiet_load_is_an_honest_use_or_cpu_time_on_the_same_stack():
    here = place("http://here")
    ids, busy = ATTACKS["token-ids-free"], ATTACKS["busy-loop"]
    assert quiet_load(ATTACKS["huge-token-ids"], here, None) == QuietLoad(ids, here, "token-ids-free")
    assert quiet_load(ATTACKS["pax-bomb"], here, None) == QuietLoad(busy, here, "busy-loop")


async def test_a_round_waits_for_the_stack_that_its_process_used():
    before, after = remains(1), remains(3, "sha256:mine", "sha256:other")
    used, of_neighbour = Remaining(before, after), Remaining()
    quiet = side(used)
    await run(quiet, of_neighbour)
    assert used.asked == [(None, None), (before, {"sha256:mine"})]
    assert of_neighbour.asked == []
    assert quiet.left == ["2 leases", "1 adapters in the store without an accepted upload"]


async def test_what_the_quiet_rounds_leave_behind_counts_too():
    of_neighbour = Remaining(remains(0), remains(0))
    attacked, quiet = side(of_neighbour), side(Remaining(remains(0), remains(2)))
    await run(attacked, of_neighbour)
    await run(quiet, of_neighbour)
    result = judge(Attack("any", "", ATTACKS["nothing"].run), Limits(), attacked, quiet)
    assert result.missed == ["left: 2 leases", "500: broken"]
    assert result.notes == ["in the quiet rounds: 500: broken"]
    assert (result.rate, result.quiet_rate) == (2.0, 2.0)
    assert (result.p50.value, result.samples, result.memory) == (1.0, 1, 7)


def test_the_report_names_the_load_of_the_quiet_rounds():
    report = Report(Limits(), None)
    report.add(Result("pax-bomb", quiet_load="pax-bomb elsewhere", rate=3.0, quiet_rate=2.5))
    head, _, row = report.table().splitlines()
    column = [cell.strip() for cell in head.split("|")].index("quiet load")
    assert row.split("|")[column].strip() == "pax-bomb elsewhere"
    assert row.split("|")[column + 1].strip() == "3.0 (2.5)"
    assert "quiet (pax-bomb elsewhere)" in show(report.results[0])


@pytest.mark.parametrize("other", [["--engine-core"], ["--latency", "0"]])
def test_a_second_stack_contradicts(other: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        read_flags(["--elsewhere", *other])
    error = capsys.readouterr().err.splitlines()[-1]
    assert "--elsewhere" in error
    assert other[0] in error
    assert not read_flags(other).elsewhere
    assert read_flags(["--elsewhere", "--attacker-core", "--postgres"]).elsewhere
