"""The comparison of two reports."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

from loraplex.bench.compare import Change, changes, differences, print_comparison
from loraplex.bench.load import Load, Slo, Tenant
from loraplex.bench.report import load_report
from loraplex.bench.report_file import CompareError, LoadOfReport, Report, read_report
from loraplex.bench.sending import Failure, Sample
from loraplex.cli import main
from testing.bench_reports import HOSTILE, answered, failed, load_of, report_of, run_of

LOAD = load_of("acme", "globex")


def one_each(ttft: float) -> list[Sample]:
    return [answered("acme", ttft), answered("globex", ttft)]


def report(*ttfts: float, load: Load = LOAD, **about: Any) -> Report:
    return read(report_of(load, [one_each(ttft) for ttft in ttfts], **about))


def read(values: dict[str, Any]) -> Report:
    return msgspec.json.decode(json.dumps(values, allow_nan=False), type=Report)


def by_name(before: Report, after: Report) -> dict[tuple[str, str], Change]:
    return {(change.group, change.figure): change for change in changes(before, after)}


def compare(before: Path, after: Path) -> Result:
    return CliRunner().invoke(main, ("bench", "--compare", str(before), str(after)))


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
    found = by_name(report(*before), report(*after))
    change = found["all requests", "ttft.p50"]
    assert (change.verdict, change.relative) == (verdict, pytest.approx(relative))
    assert found["acme", "ttft.p50"].verdict == verdict


def test_the_command_compares_files_and_notes_different_plans(tmp_path):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(json.dumps(report_of(LOAD, [one_each(1.0), one_each(1.1)])))
    new.write_text(json.dumps(report_of(replace(LOAD, seed=1), [one_each(2.0), one_each(2.1)])))
    done = compare(old, new)
    assert done.exit_code == 0, done.output
    assert re.search(r"all requests +ttft\.p50 +1\.05 +2\.05 +\+95\.2 % +worse", done.stdout)
    assert "note: the two reports are of different plans" in done.stdout
    assert "note: different seed: 0 before, 1 after" in done.stdout
    assert "the ranges of the 2 and 2 runs overlap" in done.stdout


@pytest.mark.parametrize(
    ("changed", "note"),
    [
        ({"ignore_eos": False}, "different ignore_eos: True before, False after"),
        ({"window": 3.0}, "different window: none before, 3.0 after"),
        ({"input_weight": 4.0}, "different service input: 1.0 before, 4.0 after"),
        ({"output_weight": 4.0}, "different service output: 2.0 before, 4.0 after"),
        ({"timeout": 5.0}, "different timeout: 600.0 before, 5.0 after"),
        ({"warmup": 7}, "different warmup: 0 before, 7 after"),
        ({"drain": 1.0}, "different drain: none before, 1.0 after"),
        (
            {"tenants": (Tenant("acme", weight=3.0), Tenant("globex"))},
            "different tenants acme weight: 1.0 before, 3.0 after",
        ),
        (
            {"tenants": (Tenant("acme"), Tenant("globex", slo=Slo(ttft=0.5)))},
            "different tenants globex slo ttft: none before, 0.5 after",
        ),
    ],
)
def test_each_condition_that_differs_is_noted_with_both_values(changed, note):
    assert differences(report(1.0), report(1.0)) == []
    assert differences(report(1.0), report(1.0, load=replace(LOAD, **changed))) == [note]


def test_every_condition_of_a_load_is_compared():
    assert set(LoadOfReport.__struct_fields__) == set(load_report(LOAD)) - {"sources"}


def test_a_report_of_an_older_release_lacks_conditions():
    older = report_of(LOAD, [one_each(1.0)])
    for key in ("tenants", "ignore_eos", "window"):
        del older["load"][key]
    found = differences(read(older), report(1.0))
    assert "different ignore_eos: not stated before, True after" in found
    assert "different tenants acme weight: not stated before, 1.0 after" in found


def test_many_differences_are_counted():
    names = [f"t{number}" for number in range(30)]
    load = load_of(*names)
    heavy = replace(load, tenants=tuple(Tenant(name, weight=2.0) for name in names))
    samples = [answered(name, 1.0) for name in names]
    found = differences(read(report_of(load, [samples])), read(report_of(heavy, [samples])))
    assert len(found) == 21
    assert found[-1] == "10 more values of the loads differ"


def test_tenants_of_one_report_only_are_in_the_comparison(capsys):
    other = load_of("acme", "initech")
    after = read(report_of(other, [[answered("acme", 1.0), answered("initech", 2.0)]]))
    found = by_name(report(1.0), after)
    assert found["globex", "ttft.p50"] == Change("globex", "ttft.p50", 1.0, None, None, "only before")
    assert found["initech", "ttft.p50"] == Change("initech", "ttft.p50", None, 2.0, None, "only after")
    assert found["acme", "ttft.p50"].verdict == "same"
    print_comparison(report(1.0), after)
    shown = capsys.readouterr().out
    assert re.search(r"globex +ttft\.p50 +1 +- +- +only before", shown)
    assert re.search(r"initech +ttft\.p50 +- +2 +- +only after", shown)


def test_two_reports_of_one_tenant_each_show_both_tenants():
    one, other = (read(report_of(load_of(name), [[answered(name, 1.0)]])) for name in ("acme", "globex"))
    groups = {change.group for change in changes(one, other)}
    assert {"acme", "globex"} <= groups
    assert "acme" not in {change.group for change in changes(one, one)}


def test_a_figure_that_only_one_report_has_does_not_vanish():
    """A tenant whose requests all fail has no latencies."""
    refused = [answered("acme", 1.0), failed("globex", Failure("http 429", "x"))]
    found = by_name(report(1.0), read(report_of(LOAD, [refused])))
    assert found["globex", "ttft.p50"].verdict == "only before"
    assert (found["globex", "without_first_token"].before, found["globex", "without_first_token"].after) == (0, 1)


def isolated(*ttfts: float | None) -> Report:
    """Return a report with a baseline, in which acme waits 1 s. ttfts: acme's in the runs; None: refused."""
    refusal = failed("acme", Failure("http 429", "x"))
    runs = [[refusal if ttft is None else answered("acme", ttft), answered("globex", 1.0)] for ttft in ttfts]
    return read(report_of(LOAD, runs, run_of(load_of("acme"), [answered("acme", 1.0)])))


def test_isolation_is_compared(capsys):
    change = by_name(isolated(2.0, 2.2), isolated(3.0, 3.2))["acme", "isolation.ratio"]
    assert (change.before, change.after, change.verdict) == (pytest.approx(2.1), pytest.approx(3.1), "worse")
    assert ("globex", "isolation.ratio") not in by_name(isolated(2.0, 2.2), isolated(3.0, 3.2))
    change = by_name(isolated(2.0, 2.2), isolated(None, None))["acme", "isolation.ratio"]
    assert (change.after, change.relative, change.verdict) == (float("inf"), None, "worse")
    assert by_name(isolated(2.0, None), isolated(None, 2.0))["acme", "isolation.ratio"].verdict == "same"
    assert by_name(isolated(2.0, None, 2.0), isolated(3.0, 3.0))["acme", "isolation.ratio"].verdict == "within noise"
    print_comparison(isolated(2.0, 2.2), isolated(None, None))
    assert re.search(r"acme +isolation\.ratio +2\.1 +not served +- +worse", capsys.readouterr().out)


def test_a_comparison_shows_hostile_names_as_they_are(capsys):
    load = load_of(*HOSTILE, "fairness")
    values = report_of(load, [[answered(name, 1.0) for name in (*HOSTILE, "fairness")]])
    values["warnings"] = ["\x1b[2J[/x]"]
    print_comparison(read(values), read(values))
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    for name in ("[/x]", "[team]a", ":smile:", "all", r"\x1b[2J"):
        assert re.search(rf"(?m)^ {re.escape(name)} +ttft\.p50 ", shown), name
    assert "note: before: \\x1b[2J[/x]\n" in shown


def valid() -> dict[str, Any]:
    return report_of(LOAD, [one_each(1.0)])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not a report of loraplex bench --json"),
        ('{"runs": []}', "not a report of loraplex bench --json: Object missing required field `schema`"),
        ('{"schema": "loraplex.bench/9", "runs": [1]}', "expected the schema 'loraplex.bench/1'"),
        ('{"schema": "loraplex.bench/1", "runs": [1]}', "Expected `object`, got `int` - at `$.runs[0]`"),
        ('{"schema": "loraplex.bench/1", "runs": []}', "Object missing required field `load`"),
        (json.dumps(valid() | {"runs": []}), "has no finished run"),
        (json.dumps(valid() | {"warnings": [1]}), "Expected `str`, got `int` - at `$.warnings[0]`"),
        (json.dumps(valid() | {"summary": {}}), "Object missing required field `all` - at `$.summary`"),
        (json.dumps(valid() | {"load": {}}), "Object missing required field `seed` - at `$.load`"),
        (
            json.dumps(valid() | {"summary": {"all": {"failed": {"median": "x"}}}}),
            "got `str` - at `$.summary.all[...].median`",
        ),
        ("[" * 100_000, "not a report of loraplex bench --json"),
        ('{"schema": "loraplex.bench/1", "x": ' + "[" * 100_000, "too many levels"),
        (b"\xff\xfe", "not a report of loraplex bench --json"),
    ],
)
def test_a_file_that_is_no_report_is_named_with_the_field(text, says, tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(CompareError):
        read_report(path)
    done = compare(path, path)
    assert done.exit_code == 2
    assert done.stderr.startswith(f"Error: --compare: {path}: ")
    assert done.stderr.count("\n") == 1
    assert says in done.stderr


def test_a_missing_file_is_named(tmp_path):
    done = compare(tmp_path / "a.json", tmp_path / "a.json")
    assert done.stderr == f"Error: --compare: {tmp_path / 'a.json'}: No such file or directory\n"
