"""The short forms of the scenarios that `benchmarks.fairness` runs."""

import tomllib
from pathlib import Path

import pytest

from benchmarks.fairness import DIFFERENCE, GENERATOR, START_SECONDS, figures, table
from benchmarks.fairness_patterns import LONG, SHORT, Pattern, text_of
from loraplex.bench.scenario import Scenario

# A round of fair share and FCFS, without vLLM.
MOST_SECONDS = 660


@pytest.mark.parametrize(
    "pattern", [*SHORT, *LONG, *map(Pattern.in_full, SHORT)], ids=lambda p: f"{p.name}-{p.seconds:g}"
)
def test_every_form_is_a_scenario(pattern: Pattern, tmp_path: Path):
    path = tmp_path / "pattern.toml"
    path.write_text(text_of(pattern))
    scenario = Scenario(path)
    assert scenario.spec.seconds == pattern.seconds
    assert tomllib.loads(path.read_text()) == pattern.spec()


@pytest.mark.parametrize("pattern", [p for p in SHORT if p.factor > 1], ids=lambda p: p.name)
def test_a_short_form_requests_the_same_service_a_second(pattern: Pattern):
    whole, short = pattern.in_full().spec()["tenants"], pattern.spec()["tenants"]
    for full, compressed in zip(whole, short, strict=True):
        for key in ("rate", "start_rate", "end_rate"):
            if key in full["arrival"]:
                for length in ("input", "output"):
                    assert _service(compressed, key, length) == pytest.approx(_service(full, key, length), rel=0.08)


def test_a_round_of_all_patterns_takes_eleven_minutes():
    assert 2 * sum(pattern.longest + START_SECONDS for pattern in SHORT) <= MOST_SECONDS


REPORT = {
    "runs": [
        {
            "fairness": {
                "until": 10.0,
                "tenants": {
                    "one": {"service": 100.0, "of_entitled": 1.0},
                    "two": {"service": 80.0, "of_entitled": 0.8},
                },
                "jain_entitled": 0.98,
                "largest_difference": {"of_mean": 0.25},
            },
            "tenants": {"one": {"failed": 0}, "two": {"failed": 0}},
        }
    ],
    "load": {"sources": [{"name": name, "arrival": {"kind": "closed"}} for name in ("one", "two")]},
    "overhead": {"ttft": {"p50": 0.0012, "p99": 0.0034}, "max_requests_per_second": 900.0},
}


def test_figures_have_the_largest_windowed_difference_and_the_generators_overhead():
    lines = table("weights", {"fair": [figures(REPORT)]}).splitlines()
    assert f"| {DIFFERENCE} | 25 % |" in lines
    assert f"| {GENERATOR}: adds to a TTFT, p50 | 1.20 ms |" in lines
    assert f"| {GENERATOR}: adds to a TTFT, p99 | 3.40 ms |" in lines
    assert f"| {GENERATOR}: most requests a second | 900 |" in lines


def test_tenants_that_were_never_backlogged_together_have_no_difference():
    [run] = REPORT["runs"]
    alone = REPORT | {"runs": [run | {"fairness": run["fairness"] | {"largest_difference": None}}], "overhead": None}
    names = [figure.name for figure in figures(alone)]
    assert DIFFERENCE not in names
    assert not [name for name in names if name.startswith(GENERATOR)]


def _service(tenant: dict, rate: str, length: str) -> float:
    tokens = tenant[length]
    return tenant["arrival"][rate] * (tokens.get("tokens") or tokens["median"])
