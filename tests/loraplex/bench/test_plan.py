"""Plans: which requests are sent when. A plan depends on its seed and its own source only."""

import itertools
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from loraplex.bench.arrivals import Closed, Even, Gamma, OnOff, Phase, Phases, Poisson, Ramp, Trace
from loraplex.bench.load import Load, LoadError, Source, Target, Tenant
from loraplex.bench.sampling import Even as EvenPopularity
from loraplex.bench.sampling import Fixed, LogNormal, PowerLaw, UniformLength, Zipf
from loraplex.bench.trace import Row, TraceError, read_trace, write_trace
from loraplex.bench.workload import Workload

POISSON = Poisson(5.0)
TARGETS = tuple(Target("acme", "secret-a", f"a{i}") for i in range(4))


def source(name="acme", arrival=POISSON, **changes) -> Source:
    base = Source(name, TARGETS, arrival, EvenPopularity(), Fixed(8), Fixed(16))
    return replace(base, **changes)


def load(*sources: Source, **changes) -> Load:
    return replace(Load((Tenant("acme"),), sources or (source(),), seconds=100.0), **changes)


def times(arrival, count: int, seed: int = 1) -> list[float]:
    return list(itertools.islice(arrival.times(Random(seed)), count))


def gaps(arrival, count: int = 20_000) -> list[float]:
    moments = times(arrival, count)
    return [after - before for before, after in itertools.pairwise(moments)]


def cv(values: list[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / len(values)) / mean


def test_the_seed_decides_the_whole_plan():
    first, again = (list(load().plan(source())) for _ in range(2))
    assert first == again
    assert [load().prompt(planned) for planned in first] == [load().prompt(planned) for planned in again]
    assert load().plan_hash() == load().plan_hash()
    other = load(seed=1)
    assert [p.at for p in other.plan(source())] != [p.at for p in first]
    assert other.plan_hash() != load().plan_hash()


def test_a_tenants_plan_does_not_depend_on_the_other_tenants():
    quiet = source("quiet", Poisson(2.0), popularity=Zipf(1.0))
    both = load(source("flood", Gamma(50.0, 3.0)), quiet)
    assert list(both.plan(quiet)) == list(both.without(["flood"]).plan(quiet))
    assert [s.name for s in both.without(["flood"]).sources] == ["quiet"]


def test_a_repeated_run_changes_the_words_and_nothing_else():
    [first, *_], [again, *_] = list(load().plan(source())), list(load(round=1).plan(source()))
    assert first == again
    assert load().prompt(first) != load(round=1).prompt(again)


def test_prompts_have_the_planned_words_and_share_no_prefix():
    prompts = [load().prompt(planned) for planned in load().plan(source(requests=50))]
    assert {len(prompt.split()) for prompt in prompts} == {8}
    assert len({tuple(prompt.split()[:3]) for prompt in prompts}) > 45


def test_arrivals_end_with_the_run_the_source_or_its_number_of_requests():
    assert len(list(load().plan(source(arrival=Even(2.0))))) == 200
    assert len(list(load().plan(source(arrival=Even(2.0), start=10.0, stop=20.0)))) == 20
    assert next(load().plan(source(arrival=Even(2.0), start=10.0))).at == 10.0
    assert len(list(load().plan(source(requests=7)))) == 7
    assert [p.at for p in load(seconds=None).plan(source(arrival=Closed(2), requests=3))] == [None] * 3


def test_poisson_gaps_have_the_rate_and_the_variance_of_an_exponential():
    found = gaps(Poisson(5.0))
    assert sum(found) / len(found) == pytest.approx(1 / 5, rel=0.05)
    assert cv(found) == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("wanted", [0.5, 1.0, 4.0])
def test_gamma_gaps_have_the_rate_and_the_coefficient_of_variation(wanted):
    found = gaps(Gamma(5.0, wanted), 100_000)
    assert sum(found) / len(found) == pytest.approx(1 / 5, rel=0.05)
    assert cv(found) == pytest.approx(wanted, rel=0.1)


def test_on_off_sends_in_its_on_phases_only():
    assert times(OnOff(1.0, 3.0, 10.0), 7) == [0, 1, 2, 13, 14, 15, 26]
    assert times(OnOff(1.0, 3.0, 10.0, "off"), 4) == [10, 11, 12, 23]
    found = times(OnOff(50.0, 3.0, 10.0, within="poisson"), 2000)
    assert all(at % 13 < 3 for at in found)
    assert 2000 / (found[-1] / 13 * 3) == pytest.approx(50, rel=0.1)


def test_a_ramp_changes_its_rate_linearly():
    # The integral of the rate 0.2 t is 0.1 t**2: arrivals at its whole numbers, then at the last rate.
    found = times(Ramp(0.0, 2.0, 10.0), 13)
    assert found == pytest.approx([math.sqrt(10 * i) for i in range(11)] + [10.5, 11])
    # Arrivals of a rate that falls to 0 end with the integral's whole, 10.
    assert times(Ramp(2.0, 0.0, 10.0), 100)[-1] == pytest.approx(10.0)
    assert len(times(Ramp(2.0, 0.0, 10.0), 100)) == 11


def test_phases_follow_each_other_and_then_end():
    """A phase's process starts with the phase, and is cut at its end."""
    arrival = Phases([Phase(3.0, OnOff(1.0, 2.0, 10.0)), Phase(2.0, Even(2.0)), Phase(5.0, Ramp(1.0, 0.0, 4.0))])
    assert times(arrival, 100) == pytest.approx([0, 1, 3, 3.5, 4, 4.5, 5, 5 + 4 - math.sqrt(8), 9])
    found = times(Phases([Phase(100.0, Poisson(50.0)), Phase(100.0, Poisson(10.0))]), 10_000)
    counts = Counter(at // 100 for at in found)
    assert (counts[0], counts[1]) == (pytest.approx(5000, rel=0.1), pytest.approx(1000, rel=0.2))


@pytest.mark.parametrize(
    ("popularity", "expected"),
    [
        (EvenPopularity(), [0.25] * 4),
        (Zipf(0.0), [0.25] * 4),
        (Zipf(1.0), [12 / 25, 6 / 25, 4 / 25, 3 / 25]),
        (PowerLaw(1.0), [0.25] * 4),
        (PowerLaw(0.5), [0.5, math.sqrt(0.5) - 0.5, math.sqrt(0.75) - math.sqrt(0.5), 1 - math.sqrt(0.75)]),
    ],
)
def test_popularity_gives_its_shares(popularity, expected):
    plan = load(seconds=None).plan(source(popularity=popularity, requests=8000))
    counts = Counter(planned.target.model for planned in plan)
    assert [counts[target.model] / 8000 for target in TARGETS] == pytest.approx(expected, abs=0.03)


def test_lengths_follow_their_distribution():
    random = Random(1)
    assert {Fixed(7).draw(random) for _ in range(5)} == {7}
    assert {UniformLength(3, 6).draw(random) for _ in range(200)} == {3, 4, 5, 6}
    drawn = sorted(LogNormal(100, 1.0, 10, 500).draw(random) for _ in range(5001))
    assert (drawn[0], drawn[-1]) == (10, 500)
    assert drawn[2500] == pytest.approx(100, rel=0.1)


def test_a_plan_written_as_a_trace_is_replayed_the_same(tmp_path: Path):
    original = load(source(popularity=Zipf(1.0), input=UniformLength(1, 50)))
    write_trace(tmp_path / "plan.csv", original.rows())
    rows = tuple(read_trace(tmp_path / "plan.csv"))
    replayed = list(load().plan(source(arrival=Trace("plan.csv"), rows=rows)))
    planned = list(original.plan(original.sources[0]))
    assert [p.at for p in replayed] == pytest.approx([p.at for p in planned], abs=1e-6)
    assert [(p.target, p.input_tokens, p.output_tokens) for p in replayed] == [
        (p.target, p.input_tokens, p.output_tokens) for p in planned
    ]


def test_a_trace_is_replayed_faster():
    rows = (Row(2, 4.0, "acme", "a1", 3, 5), Row(3, 300.0, "acme", None, 3, 5))
    [planned] = load().plan(source(arrival=Trace("x", speed=2.0), rows=rows))
    assert (planned.at, planned.target.model, planned.input_tokens, planned.output_tokens) == (2.0, "a1", 3, 5)


HEADER = "timestamp,tenant,adapter,input,output\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("timestamp,tenant,input\n", "1: the column output is missing; expected timestamp, tenant, adapter,"),
        ("", "1: the column timestamp is missing"),
        ("adaptor," + HEADER, "1: unknown column 'adaptor'; expected timestamp, tenant, adapter,"),
        ("tenant," + HEADER, "1: a column is there twice; expected timestamp, tenant, adapter,"),
        (HEADER + "x,a,,1,1\n", "2: timestamp: expected seconds from the start, 0 to 604800, got 'x'"),
        (HEADER + "604800.5,a,,1,1\n", "2: timestamp: expected seconds from the start, 0 to 604800, got '604800.5'"),
        (HEADER + "0,a,,1,1\n1732999999.5,a,,1,1\n", "3: timestamp: expected seconds from the start, 0 to 604800"),
        (
            HEADER + f"{'9' * 5000},a,,1,1\n",
            f"2: timestamp: expected seconds from the start, 0 to 604800, got '{'9' * 60}",
        ),
        (HEADER + "1e999,a,,1,1\n", "2: timestamp: expected seconds from the start"),
        *(
            (HEADER + f"{text},a,,1,1\n", f"2: timestamp: expected seconds from the start, 0 to 604800, got '{text}'")
            for text in ("1_0", "nan", " 1", "1 ", "+1", "0x1", ".", "1e", "٣", "")
        ),
        (HEADER + "1,a,,1,1\n-1,a,,1,1\n", "3: timestamp"),
        (HEADER + "inf,a,,1,1\n", "2: timestamp"),
        (HEADER + "1,a,,-5,1\n", "2: input: expected a number of tokens, 1 to 10000000, got '-5'"),
        (HEADER + "1,a,,10000001,1\n", "2: input: expected a number of tokens"),
        (HEADER + "1,a,,1,0\n", "2: output: expected a number of tokens"),
        (HEADER + "1,a,,1\n", "2: output: expected a number of tokens"),
        (
            HEADER + f"1,a,,{'1' * 5000},1\n",
            f"2: input: expected a number of tokens, 1 to 10000000, got '{'1' * 60}...'",
        ),
        (HEADER + f"1,a,,1,{'0' * 5000}\n", "2: output: expected a number of tokens"),
        (HEADER + "1,a,,1,1,1\n", "2: expected 5 columns, got 6"),
        (HEADER + "1,,,1,1\n", "2: tenant: expected a name, got ''"),
        (HEADER + '\n1,a,,1,1\n1,"a"b,,1,1\n', "4: not CSV: ',' expected after '\"'"),
        (HEADER + '1,a,,1,1\n1,"a,,1,1\n1,a,,1,1\n', "3: not CSV: unexpected end of data"),
        (HEADER + '1,"a\n\nb",,1,1\n1,"a\nb",,1,-1\n', "5: output: expected a number of tokens"),
        (HEADER.encode() + b"1,a,,1,1\n1,\xff,,1,1\n", "3: expected UTF-8"),
    ],
)
@pytest.mark.parametrize("end", [b"\n", b"\r\n"], ids=["lf", "crlf"])
def test_a_wrong_trace_is_named_by_line_and_column(text, says, end, tmp_path):
    content = text if isinstance(text, bytes) else text.encode()
    (tmp_path / "t.csv").write_bytes(content.replace(b"\n", end))
    with pytest.raises(TraceError) as caught:
        read_trace(tmp_path / "t.csv")
    assert str(caught.value).startswith(f"{tmp_path}/t.csv:{says}")


def test_a_trace_may_have_a_byte_order_mark_zeros_and_no_adapters(tmp_path):
    content = "\ufefftenant,timestamp,output,input\nacmé,2,0007,010000000\nacmé,1,1,1\n"
    (tmp_path / "t.csv").write_text(content, encoding="utf-8")
    assert read_trace(tmp_path / "t.csv") == [Row(3, 1, "acmé", None, 1, 1), Row(2, 2, "acmé", None, 10_000_000, 7)]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0", 0), ("604800", 604_800), ("0012.50", 12.5), ("7.", 7), (".25", 0.25), ("1e-05", 1e-5), ("2.5E+2", 250)],
)
def test_times_of_a_trace_are_read_as_programs_write_them(text, seconds, tmp_path):
    (tmp_path / "t.csv").write_text(HEADER + f"{text},a,,1,1\n")
    assert read_trace(tmp_path / "t.csv") == [Row(2, seconds, "a", None, 1, 1)]


def test_impossible_sizes_are_refused():
    with pytest.raises(LoadError, match="more than 1000000 requests"):
        load(seconds=1e6).check_size(source(arrival=Even(10_000.0)))
    with pytest.raises(LoadError, match="no request"):
        load().check_size(source(arrival=OnOff(1.0, 10.0, 1000.0, "off")))
    load().check_size(source(arrival=Closed(4)))


@pytest.mark.parametrize(
    "arrival", [Even(1e-5), Poisson(1e-5), Gamma(1e-5, 0.01), Ramp(0.0, 5e-324, 10.0), Trace("x", speed=0.001)]
)
def test_no_plan_is_longer_than_a_week(arrival):
    long = source(arrival=arrival, requests=30, rows=(Row(2, 1.0, "a", None, 1, 1), Row(3, 604_800, "a", None, 1, 1)))
    with pytest.raises(LoadError, match=r"^has its last request in second .*; expected at most 604800$"):
        load(seconds=None).check_size(long)
    load(seconds=604_800.0).check_size(long)


@pytest.mark.parametrize("arrival", [Even(0.5), Poisson(0.5), Gamma(0.5, 3.0), OnOff(2.0, 1e9, 1.0)])
def test_scaled_rates_divide_the_times(arrival):
    assert times(arrival.scaled(4.0), 50) == pytest.approx([time / 4 for time in times(arrival, 50)])


def test_scaled_processes_keep_what_is_no_rate():
    assert OnOff(2.0, 3.0, 4.0).scaled(0.5) == OnOff(1.0, 3.0, 4.0)
    assert Ramp(1.0, 2.0, 3.0).scaled(10.0) == Ramp(10.0, 20.0, 3.0)
    phases = [Phase(5.0, Even(1.0)), Phase(6.0, Gamma(2.0, 3.0))]
    assert Phases(phases).scaled(2.0) == Phases([Phase(5.0, Even(2.0)), Phase(6.0, Gamma(4.0, 3.0))])
    assert Trace("x", "a", 2.0).scaled(3.0) == Trace("x", "a", 6.0)
    assert Closed(4).scaled(3.0) == Closed(4)


def test_the_short_form_is_one_source_of_all_targets():
    made = Workload(n=40, concurrency=3).load((*TARGETS, Target("globex", None, "b")))
    assert [tenant.name for tenant in made.tenants] == ["acme", "globex"]
    [only] = made.sources
    assert only.arrival == Closed(3)
    assert len(list(made.plan(only))) == 40
    assert Workload(rate=2.0).load(TARGETS).sources[0].arrival == Poisson(2.0)
    assert (made.api, made.ignore_eos) == ("completions", True)
    chat = Workload(api="chat", ignore_eos=False).load(TARGETS)
    assert (chat.api, chat.ignore_eos) == ("chat", False)


def test_no_key_is_in_any_text_form():
    assert "secret" not in repr(load()) + str(load().rows()) + repr(next(load().plan(source())))
