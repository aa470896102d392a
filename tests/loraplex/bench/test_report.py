import json

import pytest

from loraplex.bench.report import jain, percentile, print_report, summarise
from loraplex.bench.run import Sample
from loraplex.bench.workload import Target, Workload

ACME, GLOBEX = Target("acme", "secret-a", "pirate"), Target("globex", "secret-b", "brief")
WORKLOAD = Workload((ACME, GLOBEX), 3, 2, None, 0.0, 8, 16, 0, 0)


@pytest.mark.parametrize(
    ("values", "p", "expected"),
    [
        ([], 50, None),
        ([7.0], 99, 7.0),
        ([3.0, 1.0, 2.0], 50, 2.0),
        ([1.0, 2.0, 3.0, 4.0], 50, 2.0),
        ([1.0, 9.0], 99, 9.0),
    ],
)
def test_percentile_is_the_nearest_rank(values, p, expected):
    assert percentile(values, p) == expected


@pytest.mark.parametrize(
    ("shares", "expected"), [([5, 5, 5], 1.0), ([9, 0, 0], 1 / 3), ([3, 1], 0.8), ([], None), ([0, 0], None)]
)
def test_jain(shares, expected):
    assert jain(shares) == (None if expected is None else pytest.approx(expected))


def test_figures_are_per_tenant_and_failures_count_only_as_failures():
    samples = [
        Sample(ACME, 0.5, 1.0, [0.1, 0.3], 10, 20),
        Sample(ACME, 0.7, 2.0, [0.2], 10, 20),
        Sample(GLOBEX, error="status 500: no"),
    ]
    report = summarise(WORKLOAD, samples, 4.0)
    assert report["all"]["output_tokens_per_second"] == 10.0
    assert report["all"]["total_tokens_per_second"] == 15.0
    assert report["tenants"]["acme"]["ttft"] == {"p50": 0.5, "p95": 0.7, "p99": 0.7}
    assert report["tenants"]["acme"]["inter_token"]["p50"] == 0.2
    assert report["tenants"]["globex"]["requests"] == 0
    assert (report["errors"], report["first_error"]) == (1, "status 500: no")
    assert report["fairness"]["jain_output_tokens"] == pytest.approx(0.5)


def test_the_report_is_json_and_holds_no_key(capsys):
    report = summarise(WORKLOAD, [Sample(ACME, 0.5, 1.0, [0.1], 10, 20), Sample(GLOBEX, 0.5, 1.0, [], 1, 1)], 1.0)
    print_report(report)
    shown = json.dumps(report) + capsys.readouterr().out
    assert "secret" not in shown
    assert "globex" in shown
    assert "fairness" in shown
