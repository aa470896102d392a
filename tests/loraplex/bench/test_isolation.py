"""Isolation counts requests without a first token, in `loraplex bench` and in `benchmarks.fairness`."""

import math

import pytest

from benchmarks.fairness import figures
from loraplex.bench.isolation import isolation, wait_ratio
from loraplex.bench.metrics import wait_at
from loraplex.bench.page import html_page
from loraplex.bench.report import MAX_POINTS
from loraplex.bench.sending import UNFINISHED, Failure
from loraplex.bench.table import print_report
from testing.bench_reports import answered, failed, load_of, report_of, run_of

QUIET, BOTH = load_of("quiet"), load_of("quiet", "flood")
REFUSED, TIMED_OUT = Failure("http 429 quota", "x"), Failure("timeout", "x")
ALONE = run_of(QUIET, [answered("quiet", 0.1)] * 10)


def beside(*unserved: Failure, served: int = 1, ttft: float = 0.1) -> list:
    return [*[answered("quiet", ttft)] * served, *(failed("quiet", failure) for failure in unserved)]


def test_the_ratio_is_that_of_the_p99s_and_the_median_of_the_runs():
    runs = [run_of(BOTH, beside(ttft=ttft)) for ttft in (0.2, 0.6, 0.4)]
    found = isolation(ALONE, runs)["quiet"]
    assert (found["ttft_p99_without"], found["ttft_p99_with"]) == pytest.approx((0.1, 0.4))
    assert found["ratio"] == pytest.approx(4.0)
    assert (found["unserved_without"], found["unserved_with"]) == (0, 0)


def test_unserved_requests_are_infinite_waits_and_the_report_says_how_many(capsys):
    report = report_of(BOTH, [beside(*[UNFINISHED] * 5, *[REFUSED] * 4)], ALONE)
    found = report["isolation"]["quiet"]
    assert (found["ttft_p99_without"], found["ttft_p99_with"], found["ratio"]) == (pytest.approx(0.1), None, None)
    warning = "isolation of quiet: 9 of 10 requests beside the others had no first token and count as infinite waits"
    assert report["warnings"] == [warning]
    print_report(report)
    lines = capsys.readouterr().out.splitlines()
    assert "isolation of quiet: p99 TTFT not served beside the others, 100 ms without" in lines
    assert f"warning: {warning}" in lines
    page = html_page(report)
    assert "<td>quiet</td><td>100 ms</td><td>not served</td><td>-</td>" in page
    assert warning in page


@pytest.mark.parametrize("failure", [REFUSED, TIMED_OUT, UNFINISHED, Failure("no token", "x")], ids=lambda f: f.kind)
def test_any_request_without_a_first_token_is_an_infinite_wait(failure):
    for unserved, expected in ((1, pytest.approx(0.1)), (2, math.inf)):
        run = run_of(QUIET, beside(*[failure] * unserved, served=100 - unserved))
        assert wait_at(run["tenants"]["quiet"], "p99") == expected
        assert run["tenants"]["quiet"]["without_first_token"] == unserved


def test_an_answer_that_breaks_after_its_first_token_has_a_wait():
    broken = answered("quiet", 0.3)
    broken.error = Failure("cut", "x")
    run = run_of(QUIET, [broken])
    assert wait_at(run["tenants"]["quiet"], "p99") == pytest.approx(0.3)


def test_an_unserved_baseline_leaves_the_ratio_unknown():
    alone = run_of(QUIET, [failed("quiet", REFUSED)])
    report = report_of(BOTH, [beside()], alone)
    assert report["isolation"]["quiet"]["ratio"] is None
    assert report["isolation"]["quiet"]["ttft_p99_with"] == pytest.approx(0.1)
    [warning] = report["warnings"]
    assert warning.startswith("isolation of quiet: 1 of 1 requests without the others had no first token")
    assert wait_ratio(alone["tenants"]["quiet"], ALONE["tenants"]["quiet"]) is None


def test_a_tenant_without_requests_has_no_wait():
    run = run_of(BOTH, [answered("flood", 0.1)])
    assert wait_at(run["tenants"]["quiet"], "p99") is None
    assert isolation(ALONE, [run])["quiet"]["ratio"] is None
    assert report_of(BOTH, [[answered("flood", 0.1)]], ALONE)["warnings"] == []


@pytest.mark.parametrize("unserved", [[], [REFUSED] * 200, [UNFINISHED] * 200], ids=["none", "refused", "unfinished"])
def test_the_fairness_benchmark_decides_as_the_report_does(unserved):
    """More requests than the plots have points: their points are no measure of the requests served."""
    report = report_of(BOTH, [beside(*unserved, served=2 * MAX_POINTS, ttft=0.4)], ALONE)
    found = {figure.name: figure.value for figure in figures(report)}
    served = not unserved
    assert found["quiet: TTFT p50"] == pytest.approx(0.4)
    assert found["quiet: TTFT p99"] == (pytest.approx(0.4) if served else math.inf)
    assert found["quiet: p99 over p99 alone"] == (pytest.approx(4.0) if served else math.inf)
    assert report["isolation"]["quiet"]["ratio"] == (pytest.approx(4.0) if served else None)
