"""The HTML page and the comparison of two reports."""

import json
import re
from array import array
from html.parser import HTMLParser

import pytest
from click.testing import CliRunner

from loraplex.bench.compare import changes
from loraplex.bench.load import Load, PlannedRequest, Target
from loraplex.bench.page import html_page
from loraplex.bench.report import isolation, make_report, run_report
from loraplex.bench.run import Run
from loraplex.bench.sending import Failure, Sample
from loraplex.bench.svg import plot, ticks
from loraplex.bench.table import print_report
from loraplex.bench.workload import Workload
from loraplex.cli import main

TARGETS = (Target("acme", "secret-a", "m"), Target("<b>globex", "secret-b", "m"))
LOAD = Workload(n=4).load(TARGETS)


def run(ttft: float, load: Load = LOAD) -> dict:
    """Return a run of one request of each tenant, and one that failed."""
    samples = []
    for target in TARGETS:
        planned = PlannedRequest("all", 0, None, target, 8, 3)
        times = array("d", [ttft, ttft + 0.1, ttft + 0.2])
        samples.append(Sample(planned, 0.0, 0.0, times[-1], times, 8, 3))
    samples.append(Sample(planned, 0.5, 0.5, 0.6, error=Failure("http 429", "<script>")))
    return run_report(Run(load, samples, seconds=2.0))


def report(*ttfts: float, seed: int = 0, baseline: float | None = None) -> dict:
    load = Workload(n=4, seed=seed).load(TARGETS)
    about = {"name": "x", "description": "<i>", "started": "now", "loraplex": "0", "overhead": None}
    alone = None if baseline is None else run(baseline)
    return make_report("http://x", load, [run(ttft) for ttft in ttfts], alone, **about)


class Tags(HTMLParser):
    """Names of all tags, and a check that each is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.names.add(tag)


def test_the_page_is_whole_and_needs_nothing_else():
    page = html_page(report(1.0, 2.0, baseline=0.5))
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert {"svg", "polyline", "circle", "table"} <= tags.names
    assert not tags.names & {"script", "link", "img", "iframe", "b"}
    assert not re.search(r"(src|href)=", page)
    assert "prefers-color-scheme: dark" in page
    assert "&lt;b&gt;globex" in page
    assert "secret" not in page


def test_the_generators_overhead_is_in_the_table_and_on_the_page(capsys):
    overhead = {"max_requests_per_second": 1234.4, "max_events_per_second": 45678.6, "rate": 30.0}
    with_overhead = report(1.0) | {"overhead": overhead | {"ttft": {"p50": 0.0012, "p99": 0.0456}}}
    line = (
        "generator: at most 1234 requests and 45679 events a second; at 30 requests a second it adds 1.2 ms to a TTFT "
        "(p99 46 ms)"
    )
    print_report(with_overhead)
    assert line in capsys.readouterr().out.splitlines()
    assert f"<h2>Generator</h2><p>{line}.</p>" in html_page(with_overhead)
    print_report(report(1.0))
    assert "generator" not in capsys.readouterr().out
    assert "Generator" not in html_page(report(1.0))


def test_the_page_of_a_run_without_any_answer():
    empty = run_report(Run(LOAD, [], seconds=0.0))
    about = {"name": "x", "description": "", "started": "now", "loraplex": "0", "overhead": None}
    assert "No data" in html_page(make_report("http://x", LOAD, [empty], None, **about))
    assert html_page(make_report("http://x", LOAD, [], None, **about))


@pytest.mark.parametrize(
    ("most", "expected"),
    [(0, [0, 1]), (1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (7, [0, 2, 4, 6, 8]), (100, [0, 20, 40, 60, 80, 100])],
)
def test_ticks_are_round_and_cover_the_values(most, expected):
    assert ticks(most) == pytest.approx(expected)


def test_a_plot_places_its_points():
    drawn = plot({"a": [(0.0, 0.0), (10.0, 5.0)]}, "x", "y")
    assert re.search(r'points="64\.0,220\.0 708\.0,12\.0"', drawn)


def test_isolation_is_the_ratio_of_the_p99s():
    assert isolation(run(0.5), [run(1.0), run(3.0), run(2.0)])["acme"] == {
        "ttft_p99_without": 0.5,
        "ttft_p99_with": 2.0,
        "ratio": 4.0,
    }


@pytest.mark.parametrize(
    ("before", "after", "verdict", "relative"),
    [
        ([1.0, 1.1, 1.2], [2.0, 2.2, 2.4], "worse", 1.0),
        ([2.0, 2.2, 2.4], [1.0, 1.1, 1.2], "better", -0.5),
        ([1.0, 1.1, 1.2], [1.15, 1.32, 1.4], "within noise", 0.2),
        ([1.0, 1.0], [1.0, 1.0], "same", 0.0),
        ([1.0], [2.0], "unknown", 1.0),
    ],
)
def test_changes_beyond_the_runs_ranges_have_a_direction(before, after, verdict, relative):
    found = {(c.group, c.figure): c for c in changes(report(*before), report(*after))}
    change = found["all", "ttft.p50"]
    assert (change.verdict, change.relative) == (verdict, pytest.approx(relative))
    assert found["acme", "ttft.p50"].verdict == verdict


def test_the_command_compares_files_and_notes_different_plans(tmp_path):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(json.dumps(report(1.0, 1.1)))
    new.write_text(json.dumps(report(2.0, 2.1, seed=1)))
    done = CliRunner().invoke(main, ("bench", "--compare", str(old), str(new)))
    assert done.exit_code == 0, done.output
    assert re.search(r"all +ttft\.p50 +1\.05 +2\.05 +\+95\.2 % +worse", done.stdout)
    assert "different plans" in done.stdout
    assert "the ranges of the 2 and 2 runs overlap" in done.stdout


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not a report of loraplex bench --json"),
        ('{"runs": []}', "not a report"),
        ('{"schema": "loraplex.bench/9", "runs": [1]}', "expected the schema 'loraplex.bench/1'"),
        ('{"schema": "loraplex.bench/1", "runs": []}', "has no finished run"),
    ],
)
def test_a_file_that_is_no_report(text, says, tmp_path):
    path = tmp_path / "a.json"
    path.write_text(text)
    done = CliRunner().invoke(main, ("bench", "--compare", str(path), str(path)))
    assert done.exit_code == 2
    assert says in done.stderr
    assert done.stderr.startswith("Error: --compare: ")
