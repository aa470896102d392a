"""The HTML page of a report."""

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from loraplex.bench.page import html_page
from loraplex.bench.sending import Failure, Sample
from loraplex.bench.svg import plot, ticks
from loraplex.bench.table import print_report
from testing.bench_reports import HOSTILE, answered, failed, load_of, report_of, run_of

NAMES = ("acme", "<b>globex")
LOAD = load_of(*NAMES)


def samples(ttft: float) -> list[Sample]:
    """Return an answer for each tenant, and a request that failed."""
    return [*(answered(name, ttft) for name in NAMES), failed(NAMES[1], Failure("http 429", "<script>"), 0.5)]


def report(*ttfts: float, baseline: float | None = None) -> dict[str, Any]:
    alone = None if baseline is None else run_of(LOAD, samples(baseline))
    return report_of(LOAD, [samples(ttft) for ttft in ttfts], alone)


class Tags(HTMLParser):
    """Names of all tags and texts of all cells, and a check that each tag is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.open: list[str] = []
        self.cells: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.cells.append(data)

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


def test_hostile_texts_are_texts_on_the_page():
    texts = [*HOSTILE, "'><script>", "</svg><img src=x>"]
    load = load_of(*texts)
    every = [*(answered(name, 1.0) for name in texts), failed(texts[0], Failure("http 500", "<img>"))]
    alone = run_of(load, [answered(name, 0.5) for name in texts])
    page = html_page(report_of(load, [every, every], alone, name="<img>", description="'\"<script>"))
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert not tags.names & {"script", "img", "b"}
    for text in texts:
        # The tables of both runs and of the baseline, each with figures and fairness, and that of isolation.
        assert tags.cells.count(text) == 7, text


def test_the_page_has_the_figures_of_the_table_and_of_the_json():
    values = report(1.0)
    [run] = values["runs"]
    tags = Tags()
    tags.feed(html_page(values))
    heads = [text for text in tags.cells if text == "total tok/s"]
    assert len(heads) == 1
    # Two answers of 8 and 3 tokens in two seconds.
    assert run["all"]["total_tokens_per_second"] == 11.0
    row = tags.cells.index("all requests")
    assert tags.cells[row : row + 6] == ["all requests", "2", "1", "1.00", "3.0", "11.0"]
    index = run["fairness"]["jain_service"]
    assert f"{index:.3f} of service by weight" in html_page(values)


def test_a_tenant_named_like_the_total_has_a_row_of_its_own(capsys):
    load = load_of("all", "acme")
    values = report_of(load, [[answered("all", 1.0), *[answered("acme", 1.0)] * 3]])
    tags = Tags()
    tags.feed(html_page(values))
    for name, requests in (("all requests", "4"), ("all", "1"), ("acme", "3")):
        row = tags.cells.index(name)
        assert tags.cells[row + 1] == requests
    print_report(values)
    shown = capsys.readouterr().out
    for name, requests in (("all requests", "4"), ("all", "1"), ("acme", "3")):
        assert re.search(rf"(?m)^ {name} +{requests} +0 ", shown)


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
    assert "No data" in html_page(report_of(LOAD, [[]]))
    assert html_page(report_of(LOAD, []))


@pytest.mark.parametrize(
    ("most", "expected"),
    [(0, [0, 1]), (1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (7, [0, 2, 4, 6, 8]), (100, [0, 20, 40, 60, 80, 100])],
)
def test_ticks_are_round_and_cover_the_values(most, expected):
    assert ticks(most) == pytest.approx(expected)


def test_a_plot_places_its_points():
    drawn = plot({"a": [(0.0, 0.0), (10.0, 5.0)]}, "x", "y")
    assert re.search(r'points="64\.0,220\.0 708\.0,12\.0"', drawn)
