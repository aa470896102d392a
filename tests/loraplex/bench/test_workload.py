from collections import Counter
from dataclasses import replace
from itertools import islice

import pytest

from loraplex.bench.workload import Target, Workload

TARGETS = tuple(Target("acme", None, f"a{i}") for i in range(4))
WORKLOAD = Workload(TARGETS, 4000, 16, None, 0.0, 8, 16, 10, 3)


def popularity(workload: Workload) -> list[float]:
    counts = Counter(target.model for target, _ in workload.requests())
    return [counts[target.model] / (workload.n + workload.warmup) for target in TARGETS]


def test_zipf_zero_is_uniform():
    assert popularity(WORKLOAD) == pytest.approx([0.25] * 4, abs=0.03)


def test_zipf_one_gives_the_harmonic_shares():
    total = 1 + 1 / 2 + 1 / 3 + 1 / 4
    expected = [1 / (i + 1) / total for i in range(4)]
    assert popularity(replace(WORKLOAD, zipf=1.0)) == pytest.approx(expected, abs=0.03)


def test_the_seed_decides_everything():
    assert list(WORKLOAD.requests()) == list(WORKLOAD.requests())
    assert list(WORKLOAD.requests()) != list(replace(WORKLOAD, seed=4).requests())


def test_prompts_have_the_words_asked_for():
    assert {len(prompt.split()) for _, prompt in WORKLOAD.requests()} == {8}


def test_poisson_gaps_have_the_rate_and_the_variance_of_an_exponential():
    gaps = list(islice(replace(WORKLOAD, rate=5.0).gaps(), 20_000))
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 5, rel=0.05)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.1)


def test_a_closed_loop_has_no_arrivals():
    with pytest.raises(ValueError, match="closed loop"):
        next(WORKLOAD.gaps())
