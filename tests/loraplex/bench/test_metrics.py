"""Figures and fairness, against cases computed by hand."""

from array import array
from dataclasses import replace

import pytest

from loraplex.bench.arrivals import Closed, Poisson
from loraplex.bench.fairness import Cumulative, entitled, fairness, jain, largest_difference, max_min, service_of
from loraplex.bench.load import Load, PlannedRequest, Slo, Source, Target, Tenant
from loraplex.bench.metrics import figures, percentile
from loraplex.bench.sampling import Even, Fixed
from loraplex.bench.sending import UNFINISHED, Failure, Sample

POISSON = Poisson(1.0)
TARGETS = {name: Target(name, f"secret-{name}", "m") for name in ("acme", "globex", "initech")}


def sample(tenant="acme", due=0.0, times=(), ended=None, prompt=10, tokens=None, error=None, asked=4) -> Sample:
    """Return a sample of `asked` planned tokens; its answer is whole unless there is an error."""
    planned = PlannedRequest(tenant, 0, due, TARGETS[tenant], prompt, asked)
    end = (times[-1] if times else due) if ended is None else ended
    counts = (prompt, len(times) if tokens is None else tokens) if error is None else (None, None)
    return Sample(planned, due, due, end, array("d", times), *counts, error)


def source(name: str, arrival=POISSON, **changes) -> Source:
    return replace(Source(name, (TARGETS[name],), arrival, Even(), Fixed(1), Fixed(1)), **changes)


@pytest.mark.parametrize(
    ("values", "p", "expected"),
    [
        ([], 50, None),
        ([7.0], 99, 7.0),
        ([3.0, 1.0, 2.0], 50, 2.0),
        ([1.0, 2.0, 3.0, 4.0], 50, 2.0),
        ([1.0, 9.0], 99, 9.0),
        (list(range(1, 101)), 99, 99),
    ],
)
def test_percentile_is_the_nearest_rank(values, p, expected):
    assert percentile(values, p) == expected


@pytest.mark.parametrize(
    ("shares", "expected"), [([5, 5, 5], 1.0), ([9, 0, 0], 1 / 3), ([3, 1], 0.8), ([], None), ([0, 0], None)]
)
def test_jain(shares, expected):
    assert jain(shares) == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    ("capacity", "demands", "weights", "expected"),
    [
        (12, [100, 100], [1, 1], [6, 6]),
        (12, [100, 100], [1, 2], [4, 8]),
        (12, [2, 100, 100], [1, 1, 1], [2, 5, 5]),
        (12, [2, 3, 100], [1, 1, 2], [2, 3, 7]),
        (12, [1, 2, 3], [1, 1, 1], [1, 2, 3]),
        (12, [0, float("inf")], [5, 1], [0, 12]),
        (0, [1, 1], [1, 1], [0, 0]),
    ],
)
def test_max_min_shares(capacity, demands, weights, expected):
    assert max_min(capacity, demands, weights) == pytest.approx(expected)


def test_latencies_count_from_the_planned_time():
    late = replace(sample(due=1.0, times=(3.0, 3.5, 4.5), ended=5.0), sent=2.5)
    found = figures([late], 10.0, {"acme": Slo()})
    assert found["ttft"]["mean"] == 2.0
    assert found["latency"]["p99"] == 4.0
    assert (found["inter_token"]["p50"], found["inter_token"]["max"]) == (0.5, 1.0)
    assert found["tpot"]["p50"] == 0.75
    assert found["goodput"] is None


def test_rates_count_whole_answers_and_failures_count_by_kind():
    samples = [
        sample(times=(1.0, 2.0)),
        sample(times=(1.0,), error=Failure("cut", "x")),
        sample(error=Failure("http 429 quota", "x")),
        sample(error=Failure("http 429 quota", "x")),
        sample(times=(1.0,), error=UNFINISHED),
    ]
    found = figures(samples, 4.0, {"acme": Slo()})
    assert [found[key] for key in ("requests", "completed", "failed", "unfinished")] == [5, 1, 3, 1]
    assert found["errors"] == {"http 429 quota": 2, "cut": 1}
    assert (found["output_tokens_per_second"], found["total_tokens_per_second"]) == (0.5, 3.0)
    assert found["requests_per_second"] == 0.25


def test_goodput_needs_a_whole_answer_within_every_target():
    slos = {"acme": Slo(ttft=1.0, tpot=0.5), "globex": Slo(latency=2.0), "initech": Slo()}
    samples = [
        sample(times=(1.0, 1.5)),
        sample(times=(1.1, 1.2)),
        sample(times=(0.5, 1.1)),
        sample(times=(0.5,)),  # a single token has no time per token
        sample(error=Failure("timeout", "")),
        sample("globex", times=(1.0, 2.0)),
        sample("globex", times=(1.0, 2.0), ended=2.1),
        sample("initech", times=(90.0,)),  # without targets, not judged
    ]
    found = figures(samples, 2.0, slos)["goodput"]
    assert found == {"requests_per_second": 1.5, "share": 3 / 7}


def test_counts_compare_usage_and_stream():
    samples = [
        sample(times=(1.0, 2.0), tokens=4),  # two tokens in an event
        sample(times=(1.0, 2.0), tokens=1),  # impossible, and short
        sample(times=(1.0,) * 5, tokens=5),
        replace(sample(times=(1.0, 2.0)), completion_tokens=None, prompt_tokens=None),
    ]
    found = figures(samples, 1.0, {"acme": Slo()})
    counts = found["counts"]
    assert [counts[key] for key in ("without_usage", "more_events", "longer", "shorter")] == [1, 1, 1, 1]
    assert counts["events_per_token"] == 9 / 10
    assert found["output_tokens"] == 4 + 1 + 5 + 2


def test_cumulative_counts_what_is_before_a_moment():
    total = Cumulative([(2.0, 5.0), (1.0, 1.0), (2.0, 1.0)])
    assert [total.before(at) for at in (0.0, 1.0, 1.5, 2.0, 2.1)] == [0, 0, 1, 1, 7]


def test_service_is_the_prompt_at_the_first_token_and_tokens_as_they_arrive():
    service = service_of([sample(due=1.0, times=(3.0, 4.0), prompt=10, tokens=4)], 1.0, 2.0)
    assert [service.received.before(at) for at in (3.0, 3.5, 5.0)] == [0, 14, 18]
    assert service.waiting == [(1.0, 3.0)]
    assert service.is_backlogged(1.0, 3.0)
    assert not service.is_backlogged(1.0, 3.3)


def streams(tenant: str, rate: float, until: float, waits_until: float) -> list[Sample]:
    """Return a tenant that gets `rate` tokens a second in one long answer and has another request waiting."""
    times = tuple(i / rate for i in range(int(rate * until)))
    return [sample(tenant, times=times, prompt=0, asked=10_000), sample(tenant, ended=waits_until, error=UNFINISHED)]


def test_the_largest_difference_is_between_backlogged_tenants_only():
    samples = {"acme": streams("acme", 10, 20, 20), "globex": streams("globex", 4, 20, 20)}
    services = {name: service_of(own, 0.0, 1.0) for name, own in samples.items()}
    found = largest_difference(services, {"acme": 1.0, "globex": 1.0}, 5.0, 20.0)
    assert found is not None
    assert found.tokens == pytest.approx(30, abs=2)
    assert found.of_mean == pytest.approx(30 / 35, abs=0.1)
    assert found.tenants == ("acme", "globex")
    weighted = largest_difference(services, {"acme": 5.0, "globex": 2.0}, 5.0, 20.0)
    assert weighted is not None
    assert weighted.tokens <= 1
    services["globex"] = service_of(streams("globex", 4, 20, 3.0), 0.0, 1.0)
    assert largest_difference(services, {"acme": 1.0, "globex": 1.0}, 5.0, 20.0) is None


def test_entitlement_of_backlogged_tenants_follows_their_weights():
    samples = {"acme": streams("acme", 10, 12, 12), "globex": streams("globex", 20, 12, 12)}
    services = {name: service_of(own, 0.0, 1.0) for name, own in samples.items()}
    found = entitled(services, {"acme": 1.0, "globex": 2.0}, ["acme", "globex"], 12.0)
    assert found == {"acme": pytest.approx(120), "globex": pytest.approx(240)}
    found = entitled(services, {"acme": 1.0, "globex": 1.0}, ["acme", "globex"], 12.0)
    assert found == {"acme": pytest.approx(180), "globex": pytest.approx(180)}


def test_a_tenant_that_asks_for_little_is_entitled_to_no_more():
    """A quiet tenant, served at once, has its max-min share although the flood gets a hundred times as much."""
    quiet = [sample("globex", due=float(i), times=(i + 0.01, i + 0.02), prompt=0, asked=2) for i in range(10)]
    services = {
        "acme": service_of(streams("acme", 50, 10, 10), 0.0, 1.0),
        "globex": service_of(quiet, 0.0, 1.0),
    }
    found = entitled(services, {"acme": 1.0, "globex": 1.0}, ["acme"], 10.0)
    assert found["globex"] == pytest.approx(20)
    assert found["acme"] == pytest.approx(500)


def test_a_refused_request_leaves_the_backlog():
    refused = [sample("globex", due=1.0, error=Failure("http 429", ""), ended=1.0, prompt=0, asked=1000)]
    services = {
        "acme": service_of(streams("acme", 60, 10, 10), 0.0, 1.0),
        "globex": service_of(refused, 0.0, 1.0),
    }
    found = entitled(services, {"acme": 1.0, "globex": 1.0}, ["acme"], 10.0)
    # It counts in its own slice (a sixtieth of the run, in which 10 tokens were served), and not after it.
    assert found["globex"] == pytest.approx(5, abs=1)


def test_fairness_of_a_starved_tenant():
    """The server serves acme only, though both wait: shares 2 and 0 of what they are entitled to."""
    load = Load(
        (Tenant("acme"), Tenant("globex")),
        (source("acme", Closed(2)), source("globex", Closed(2))),
        seconds=10.0,
        input_weight=0.0,
        output_weight=1.0,
    )
    samples = {"acme": streams("acme", 30, 10, 10), "globex": [sample("globex", ended=10.0, error=UNFINISHED)]}
    found = fairness(load, samples, 10.0)
    assert found["tenants"]["acme"]["of_entitled"] == pytest.approx(2.0, rel=0.02)
    assert found["tenants"]["globex"]["of_entitled"] == 0.0
    assert found["jain_entitled"] == pytest.approx(0.5)
    assert found["jain_service"] == pytest.approx(0.5)
    assert found["window"] == 2.5
    assert found["largest_difference"]["tokens"] == pytest.approx(75, abs=1)
    assert found["largest_difference"]["of_mean"] == pytest.approx(2.0)
    assert found["series"]["service"]["acme"][-1] == 300
    assert all(found["series"]["backlogged"]["globex"])
