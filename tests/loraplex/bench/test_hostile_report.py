"""Verdicts of `benchmarks.hostile`: latencies against the limit and the controls, totals, and the JSON file."""

import json
import logging
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.hostile.attacker import KNOWS_WAIT
from benchmarks.hostile.ratios import Ratio
from benchmarks.hostile.report import MAX_WAITED, Report, show
from benchmarks.hostile.run import Limits, Result
from benchmarks.hostile.watch import explanations
from gateway.log_format import TEXT
from gateway.process.loop_stalls import Stall, StallLog
from testing.stack import ROOT

COMPETE = """
import asyncio, os, signal
import benchmarks.hostile.catalogue
from benchmarks.hostile.attacker import Order, Target, run_round
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
parent, other = os.getpid(), os.fork()
while other == 0 and os.getppid() == parent:
    pass
if other == 0:
    os._exit(0)
os.nice(19)
found = asyncio.run(run_round("busy-loop", Target("http://127.0.0.1:9", "", "", ""), Order(0.5)))
os.kill(other, signal.SIGKILL)
print(found.waited, found.seconds)
"""

REPLAY = """
import asyncio
import benchmarks.hostile.catalogue
from benchmarks.hostile.attacker import Order, Target, run_round
order = Order(2.0, [(0.0, 0.0), (1.0, 0.0), (1.2, 0.2), (2.0, 0.2)])
found = asyncio.run(run_round("busy-loop", Target("http://127.0.0.1:9", "", "", ""), order))
print(max(used for at, used in found.cpu_curve if at < 1.0), found.cpu_curve[-1][1])
"""


def result(name: str, p50: float, low: float | None = None, **more: object) -> Result:
    """Return a result whose p50 has an interval from `low`."""
    return Result(name, p50=Ratio(p50, p50 if low is None else low, 2 * p50), p99=Ratio(1, 1, 1), **more)  # type: ignore[arg-type]


def verdicts(report: Report) -> dict[str, tuple[bool, bool]]:
    """Return whether each attack missed a limit, and whether it is undecided."""
    return {each.name: (bool(each.all_missed), bool(each.undecided)) for each in report.attacks}


def test_a_latency_is_missed_only_beyond_its_interval_and_the_controls():
    report = Report(Limits(latency=1.2), None)
    for each in (result("fast", 1.1), result("noisy", 1.4, low=1.1), result("slow", 1.5), result("slowest", 3.0)):
        report.add(each)
    assert verdicts(report) == {
        "fast": (False, False),
        "noisy": (False, True),
        "slow": (True, False),
        "slowest": (True, False),
    }
    report.add(result("busy-loop", 1.5))
    assert verdicts(report)["slow"] == (False, True)
    assert verdicts(report)["slowest"] == (True, False)
    assert [each.of_control[0] for each in report.attacks] == pytest.approx([1.1 / 1.5, 1.4 / 1.5, 1.0, 2.0])


def test_a_control_below_one_makes_no_attack_slower():
    report = Report(Limits(latency=1.2), None)
    report.add(result("nothing", 0.5))
    report.add(result("fast", 1.1))
    assert report.results[1].of_control[0] == 1.1
    assert verdicts(report) == {"fast": (False, False)}


def test_other_limits_and_attacks_that_fail_count_whatever_the_controls():
    report = Report(Limits(latency=1.2), None)
    report.add(result("busy-loop", 2.0))
    report.add(result("leaky", 1.0, missed=["left: 1 leases"]))
    report.add(Result("broken", missed=["not measured: OSError: gone"]))
    report.add(result("unjudged", 9.0, judges_latency=False))
    assert verdicts(report) == {"leaky": (True, False), "broken": (True, False), "unjudged": (False, False)}


def test_a_starved_attacker_proves_no_latency():
    report = Report(Limits(latency=1.2), None)
    for each in (
        result("fed", 1.0, waited=0.5),
        result("starved", 1.0, waited=0.51),
        result("slow", 2.0, waited=0.9),
        result("unjudged", 1.0, waited=0.9, judges_latency=False),
        result("busy-loop", 1.0, waited=0.9),
    ):
        report.add(each)
    assert verdicts(report) == {
        "fed": (False, False),
        "starved": (False, True),
        "slow": (True, True),
        "unjudged": (False, False),
    }
    assert report.table().splitlines()[3].endswith("| undecided: the attacker was starved |")
    assert "UNDECIDED the attacker was starved" in show(report.controls[0])
    unjudged = Report(Limits(latency=None), None)
    unjudged.add(result("starved", 1.0, waited=0.9))
    assert verdicts(unjudged) == {"starved": (False, False)}


def test_the_table_has_the_requests_a_second_of_attacks_and_controls():
    report = Report(Limits(latency=1.2), None)
    report.add(result("busy-loop", 1.0, waited=0.25))
    report.add(result("flood", 1.0, rate=1234.56, quiet_rate=12.0))
    control, attack = report.table().splitlines()[2:]
    assert "| 0.0 (0.0) | 25% |" in control
    assert "| 1234.6 (12.0) | 0% |" in attack
    assert "25% 0.0 (0.0)/s" in show(report.controls[0])


def test_the_cause_of_a_stall_is_beside_it(caplog: pytest.LogCaptureFixture):
    caplog.handler.setFormatter(logging.Formatter(TEXT))
    stack = "fsync_file (gateway/some.py:3) < Handle._run (asyncio/events.py:80)"
    StallLog(lambda cause, seconds: None).report(
        Stall(0.122, 0.004, 0.003, 0.115, 0.0, 0.0, 0.0, 0, 0, samples=2, kernel="io_schedule", stack=stack)
    )
    logging.getLogger("other").warning("nothing of interest")
    report = Report(Limits(latency=1.2), None)
    report.add(result("explained", 1.0, stall=0.122, quiet_stall=0.01, explained=explanations(caplog.text)))
    report.add(result("quiet", 1.0, stall=0.01, quiet_stall=0.122, quiet_explained=explanations(caplog.text)))
    report.add(result("calm", 1.0, stall=0.01, quiet_stall=0.02))
    explained, quiet, calm = report.table().splitlines()[2:]
    assert "| 122 (10) ms; 122 ms, 115 blocked, fsync_file (gateway/some.py:3) |" in explained
    assert "| 10 (122) ms; quiet: 122 ms, 115 blocked, fsync_file (gateway/some.py:3) |" in quiet
    assert "| 10 (20) ms |" in calm
    assert f"stack={stack}" in show(report.results[0])
    assert "stall while quiet: left_out=0 held_ms=122" in show(report.results[1])


@pytest.mark.skipif(not KNOWS_WAIT, reason="needs Linux's schedstat")
def test_an_attacker_measures_its_wait_for_a_cpu():
    # Two processes on one CPU, of which the one that measures has the lowest priority.
    ran = subprocess.run([sys.executable, "-c", COMPETE], capture_output=True, check=True, cwd=ROOT, timeout=100)
    waited, seconds = map(float, ran.stdout.split())
    assert MAX_WAITED * seconds < waited <= seconds + 0.01


def test_the_file_has_the_results_after_each_attack(tmp_path: Path):
    path = tmp_path / "hostile.json"
    report = Report(Limits(), path)
    for number, name in enumerate(("busy-loop", "first", "second"), 1):
        report.add(result(name, 1.0))
        assert [each["name"] for each in json.loads(path.read_bytes())][-1] == name
        assert len(json.loads(path.read_bytes())) == number


def test_the_totals_count_every_attack_once():
    report = Report(Limits(latency=1.2), None)
    for each in (result("nothing", 1.0), result("good", 1.0), result("bad", 2.0), result("unclear", 1.3, low=1.0)):
        report.add(each)
    assert report.totals().splitlines()[:3] == [
        "total: 1 hold, 1 undecided, 1 missed",
        "missed: bad",
        "undecided: unclear",
    ]
    assert "of control p50 2.00" in show(report.attacks[1])
    rows = report.table().splitlines()
    assert rows[4].startswith("| bad | 2.00 [2.00 4.00] | 2.00 |")
    assert rows[4].endswith("| **missed**: p50 2.00 times quiet |")


def test_the_quiet_round_takes_cpu_time_at_the_moments_of_the_attack():
    deadline = time.monotonic() + 60
    while True:
        run = subprocess.run([sys.executable, "-c", REPLAY], cwd=ROOT, capture_output=True, text=True, check=True)
        before, total = map(float, run.stdout.split())
        assert before < 0.1
        # On a busy machine the replay may get too little CPU time until its round ends.
        if total > 0.2:
            break
        assert time.monotonic() < deadline, total
