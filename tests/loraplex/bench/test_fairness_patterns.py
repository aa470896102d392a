"""The short forms of the scenarios that `benchmarks.fairness` runs."""

import tomllib
from pathlib import Path

import pytest

from benchmarks.fairness import START_SECONDS
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


def _service(tenant: dict, rate: str, length: str) -> float:
    tokens = tenant[length]
    return tenant["arrival"][rate] * (tokens.get("tokens") or tokens["median"])
