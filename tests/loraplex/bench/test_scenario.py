"""Scenario files: each wrong one is refused with its line and key."""

import json
import re
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner

from loraplex.bench.arrivals import Closed, Poisson
from loraplex.bench.scenario import Access, Scenario, ScenarioError
from loraplex.bench.trace import read_trace
from loraplex.cli import main

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = sorted((ROOT / "examples/scenarios").glob("*.toml"))

GOOD = """\
name = "x"
seconds = 10

[slo]
ttft = 1

[[tenants]]
name = "quiet"
arrival = {kind = "poisson", rate = 2}
input = {kind = "fixed", tokens = 8}
output = {kind = "fixed", tokens = 8}

[[tenants]]
name = "flood"
weight = 2
adapters = [
    "a{0..3}",
    "base",
]

[tenants.arrival]
kind = "closed"
concurrency = 4

[tenants.input]
kind = "uniform"
min = 1
max = 9

[tenants.output]
kind = "lognormal"
median = 10
sigma = 1
"""
# The second phase is two lines below the first key.
PHASES = """{{kind = "phases", phases = [
    {{seconds = 1, arrival = {{kind = "even", rate = 1}}}},
    {{seconds = 1, arrival = {{kind = "{}", {}}}}},
]}}"""
MODELS = ["a0", "a1", "a2", "a3"]
ACCESS = {name: Access(f"key of {name}", ["base", *MODELS], MODELS) for name in ("quiet", "flood")}


def read(folder: Path, text: str | bytes) -> Scenario:
    (folder / "s.toml").write_bytes(text.encode() if isinstance(text, str) else text)
    return Scenario(folder / "s.toml")


def used(scenario: Scenario) -> None:
    scenario.keys_from_environment()
    scenario.load(ACCESS)


def test_a_scenario_becomes_a_load(tmp_path):
    load = read(tmp_path, GOOD).load(ACCESS)
    quiet, flood = load.sources
    assert quiet.arrival == Poisson(2)
    assert [target.model for target in quiet.targets] == ["a0", "a1", "a2", "a3"]
    assert [target.model for target in flood.targets] == ["a0", "a1", "a2", "a3", "base"]
    assert {target.api_key for target in flood.targets} == {"key of flood"}
    assert [(tenant.weight, tenant.slo.ttft) for tenant in load.tenants] == [(1, 1), (2, 1)]
    assert read(tmp_path, GOOD).load(ACCESS, seed=5).seed == 5


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ("seconds = 10", "second = 10", 2, "second: unknown key; known are name, tenants,"),
        ("seconds = 10", "seconds = -1", 2, "seconds: expected a number > 0.0: -1"),
        ("seconds = 10", 'seconds = "10"', 2, "seconds: expected a number, got a text"),
        ("seconds = 10", "", 9, "tenants[0].arrival: never ends"),
        ("seconds = 10", "seconds = " + "9" * 5000, 2, "not TOML: a number has more than 4300 digits"),
        ("seconds = 10", "seed = 0x" + "f" * 5000, 2, "seed: expected a whole number <= 9223372036854775807: a number"),
        ("weight = 2", "weight = " + "[" * 3000 + "]" * 3000, 15, "not TOML: lists or tables are nested too deeply"),
        ("weight = 2", '"we\\night" = 2', 15, r"tenants[1].we\night: unknown key"),
        ("seconds = 10", "seconds = = 10", 2, "not TOML: Invalid value"),
        ("seconds = 10", "seconds = 10\nseconds = 11", 3, "not TOML: Cannot overwrite a value"),
        ("ttft = 1", "ttft = 0", 5, "slo.ttft: expected a number > 0.0: 0"),
        ("ttft = 1", "tfft = 1", 5, "slo.tfft: unknown key; known are ttft, tpot, latency"),
        ("rate = 2", "rate = 0", 9, "tenants[0].arrival.rate: expected a number >= 1e-06: 0"),
        ("rate = 2", "rate = inf", 9, "tenants[0].arrival.rate: expected a number <= 10000.0: inf"),
        ("rate = 2", "rate = nan", 9, "tenants[0].arrival.rate: expected a number"),
        ('{kind = "poisson", rate = 2}', '{kind = "phases", phases = []}', 9, "phases: expected a list of length >= 1"),
        ('{kind = "poisson", rate = 2}', PHASES.format("ramp", "start_rate = 0, end_rate = 0, over = 1"), 11,
         "tenants[0].arrival.phases[1].arrival.end_rate: expected start_rate or end_rate above 0"),
        ('{kind = "poisson", rate = 2}', PHASES.format("even", "rat = 2"), 11,
         "tenants[0].arrival.phases[1].arrival.rat: unknown key; known are kind, rate"),
        ('{kind = "poisson", rate = 2}', PHASES.format("closed", "concurrency = 2"), 11,
         "'closed' is not a known kind; expected one of even, poisson, gamma, onoff, ramp"),
        ('{kind = "poisson", rate = 2}', '{kind = "gamma", rate = 5e-324, cv = 20}', 9,
         "tenants[0].arrival.rate: expected a number >= 1e-06: 5e-324"),
        ('{kind = "poisson", rate = 2}', '{kind = "onoff", rate = 2, on = 5e-324, off = 1}', 9,
         "tenants[0].arrival.on: expected a number >= 0.001: 5e-324"),
        ("[slo]", "[slos.quiet]\nttft = 1\n[slo]", 4, "slos: unknown key; known are name, tenants,"),
        ("[slo]", "[[slos.quiet.more]]\nttft = 1\n[slo]", 4, "slos: unknown key; known are name, tenants,"),
        ("[tenants.output]", "[tenants.extra.table]\n[tenants.output]", 30, "tenants[1].extra: unknown key"),
        ("rate = 2", "rat = 2", 9, "tenants[0].arrival.rat: unknown key; known are kind, rate"),
        ("rate = 2", "rate = 2, cv = 3", 9, "tenants[0].arrival.cv: unknown key; known are kind, rate"),
        ('kind = "poisson", rate = 2', 'kind = "poison", rate = 2', 9, "is not a known kind; expected one of closed,"),
        ('kind = "poisson", rate = 2', "rate = 2", 9, "the key kind is missing; expected one of closed,"),
        ('arrival = {kind = "poisson", rate = 2}', "", 7, "tenants[0]: the key arrival is missing"),
        ('input = {kind = "fixed", tokens = 8}', "", 7, "tenants[0]: input is missing"),
        ("tokens = 8", "tokens = -8", 10, "tenants[0].input.tokens: expected a whole number >= 1: -8"),
        ("tokens = 8", "tokens = 8.5", 10, "tenants[0].input.tokens: expected a whole number, got a number: 8.5"),
        ("weight = 2", "weight = 0", 15, "tenants[1].weight: expected a number > 0.0: 0"),
        ("weight = 2", "weight = -1", 15, "tenants[1].weight"),
        ('name = "flood"', 'name = "quiet"', 14, "tenants[1].name: 'quiet' is the name of an earlier tenant"),
        ('name = "flood"', 'name = "fl ood"', 14, "tenants[1].name"),
        ("a{0..3}", "a{3..0}", 17, "tenants[1].adapters[0]: expected {first..last}"),
        ('"base"', '"a2"', 18, "tenants[1].adapters[1]: 'a2' is in the list twice"),
        ('"base"', '"gone"', 18, "tenants[1].adapters[1]: the server has no model 'gone' for this tenant; it lists"),
        ('"base"', '7', 18, "tenants[1].adapters[1]: expected a text, got a whole number: 7"),
        ('"base"', '"b{0..99999}"', 18, "tenants[1].adapters[1]: expected at most 100000 names in the list"),
        ("concurrency = 4", "concurrency = 0", 23, "tenants[1].arrival.concurrency: expected a whole number >= 1: 0"),
        ("min = 1", "min = 10", 27, "tenants[1].input.min: expected at most max (9), got 10"),
        ("sigma = 1", "sigma = -1", 33, "tenants[1].output.sigma: expected a number >= 0.0: -1"),
        ("weight = 2", "start = 10", 15, "tenants[1].start: expected less than the run's 10 seconds, got 10"),
        ("weight = 2", "start = 5\nstop = 4", 16, "tenants[1].stop: expected more than start (5), got 4"),
        ("[slo]", '[baseline]\nwithout = ["flod"]\n[slo]', 5, "baseline.without[0]: no tenant is named 'flod'"),
        ("[slo]", '[baseline]\nwithout = ["flood", "quiet"]\n[slo]', 5, "expected at least one tenant to remain"),
        ("seconds = 10", "seconds = 10\nwindow = 20", 3, "window: expected at most the run's 10 seconds, got 20"),
        ("seconds = 10", "drain = 5", 2, "drain: needs seconds, after which the requests in flight are drained"),
        ("seconds = 10\n", "seconds = 10\ndrain = -1\n", 3, "drain: expected a number >= 0.0: -1"),
        ("seconds = 10", "seconds = 10\napi = \"chats\"", 3, "api"),
        ("rate = 2", "rate = 10000", 9, "tenants[0].arrival: gives more than 1000000 requests"),
        ("weight = 2", 'key_env = "NO_SUCH_VARIABLE_OF_OURS"', 15, "the environment has no variable NO_SUCH"),
        ('{kind = "poisson", rate = 2}', '{kind = "trace", file = "none.csv"}', 10, "the trace has lengths of its own"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["lf", "crlf"])
def test_a_wrong_scenario_is_named_by_line_and_key(old, new, line, says, end, tmp_path):
    assert old in GOOD
    text = GOOD.replace(old, new, 1)
    if "more than 1000000" in says:
        text = text.replace("seconds = 10", "seconds = 600000", 1)
    with pytest.raises(ScenarioError) as caught:
        used(read(tmp_path, text.replace("\n", end)))
    assert str(caught.value).startswith(f"{tmp_path}/s.toml:{line}: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("old", ['{kind = "poisson", rate = 2}', 'kind = "closed"\nconcurrency = 4'])
def test_a_plan_that_lasts_for_more_than_a_week_is_named_by_line(old, tmp_path):
    """The limit holds without `seconds`, too."""
    is_table = old.startswith("kind")
    new = 'kind = "even"\nrate = 1e-6' if is_table else '{kind = "even", rate = 1e-6}'
    text = GOOD.replace("seconds = 10", "").replace(old, new)
    text = text.replace('name = "quiet"', 'requests = 3\nname = "quiet"').replace("weight = 2", "requests = 3")
    with pytest.raises(ScenarioError) as caught:
        read(tmp_path, text).load(ACCESS)
    line, number = (22, 1) if is_table else (10, 0)
    says = f"tenants[{number}].arrival: has its last request in second 2e+06; expected at most 604800"
    assert str(caught.value) == f"{tmp_path}/s.toml:{line}: {says}"


def test_rates_are_scaled_within_their_bounds(tmp_path):
    (tmp_path / "s.toml").write_text(GOOD)
    quiet, flood = Scenario(tmp_path / "s.toml", 3.0).load(ACCESS).sources
    assert (quiet.arrival, flood.arrival) == (Poisson(6.0), Closed(4))
    (tmp_path / "s.toml").write_text(GOOD.replace("rate = 2", "rate = 20"))
    with pytest.raises(ScenarioError) as caught:
        Scenario(tmp_path / "s.toml", 1000.0)
    says = "tenants[0].arrival.rate: expected a number <= 10000.0: 20000.0, after --rate-scale 1000"
    assert str(caught.value) == f"{tmp_path}/s.toml:9: {says}"
    (tmp_path / "s.toml").write_text(GOOD.replace('{kind = "poisson", rate = 2}', PHASES.format("even", "rate = 200")))
    with pytest.raises(ScenarioError, match=r"s.toml:11: tenants\[0\].arrival.phases\[1\].arrival.rate: expected"):
        Scenario(tmp_path / "s.toml", 1000.0)
    closed = GOOD.replace('{kind = "poisson", rate = 2}', '{kind = "closed", concurrency = 2}')
    (tmp_path / "s.toml").write_text(closed)
    with pytest.raises(ScenarioError, match=r"^--rate-scale: .*s.toml has closed loops only"):
        Scenario(tmp_path / "s.toml", 2.0)


@pytest.mark.parametrize("factor", ["0", "-1", "nan", "inf", "1001", "fast"])
def test_a_wrong_factor_of_rates_is_one_line_and_2(factor, tmp_path):
    (tmp_path / "s.toml").write_text(GOOD)
    flags = ("--scenario", str(tmp_path / "s.toml"), "--url", "http://127.0.0.1:9", "--rate-scale", factor)
    done = CliRunner().invoke(main, ("bench", *flags))
    says = f"Error: Invalid value for '--rate-scale': expected a number from 0.001 to 1,000; got {factor}"
    assert (done.exit_code, done.stderr.splitlines()[-1]) == (2, says)


def test_the_short_form_has_no_rates_to_scale():
    flags = ("--models", "a", "--url", "http://127.0.0.1:9", "--rate", "2", "--rate-scale", "2")
    done = CliRunner().invoke(main, ("bench", *flags))
    assert done.exit_code == 2
    assert done.stderr == "Error: --rate-scale needs --scenario; without one, --rate gives the rate\n"


def test_a_rate_without_end_is_refused_in_the_short_form():
    flags = ("--models", "a", "--url", "http://127.0.0.1:9", "--rate", "1e-6", "--n", "9")
    done = CliRunner().invoke(main, ("bench", *flags))
    assert done.exit_code == 2
    assert done.stderr.startswith("Error: --rate: the load has its last request in second ")


def test_a_plan_is_written_with_scaled_rates(tmp_path):
    written = []
    for factor in ("1", "2"):
        flags = ("--scenario", str(ROOT / "examples/scenarios/azure-like-replay.toml"), "--rate-scale", factor)
        done = CliRunner().invoke(main, ("bench", *flags, "--plan-only", "--trace-out", str(tmp_path / "t.csv")))
        assert (done.exit_code, done.output) == (0, "")
        written.append([row.timestamp for row in read_trace(tmp_path / "t.csv")])
    assert written[1] == pytest.approx([time / 2 for time in written[0]], abs=1e-5)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (GOOD.encode().replace(b"weight = 2", b"weight = 2 # \xff"), ":15: expected UTF-8"),
        (b"\xff\xfe", ":1: expected UTF-8"),
        (b"# 34567\n" * (1 << 17) + b"\n", ":131073: expected at most 1048576 bytes; they end on this line"),
        (b"a = [\n1,\n", ":2: not TOML: Invalid value"),
    ],
    ids=["byte", "utf-16", "large", "end"],
)
def test_a_file_that_is_no_text_is_named_by_line(content, says, tmp_path):
    with pytest.raises(ScenarioError) as caught:
        read(tmp_path, content)
    assert str(caught.value) == f"{tmp_path}/s.toml{says}"


def test_a_missing_file(tmp_path):
    with pytest.raises(ScenarioError, match=r"none.toml: No such file"):
        Scenario(tmp_path / "none.toml")


@pytest.mark.usefixtures("starts_servers")
def test_a_key_of_another_tenant_is_named(tmp_path):
    (tmp_path / "s.toml").write_text(GOOD)
    tenants = [{"name": name, "api_key": f"lpx_{name}", "models": ["a0"]} for name in ("acme", "flood")]
    (tmp_path / "demo.json").write_text(json.dumps({"gateway": "http://127.0.0.1:9", "tenants": tenants}))
    flags = ("--scenario", str(tmp_path / "s.toml"), "--tenants", str(tmp_path / "demo.json"))
    done = CliRunner().invoke(main, ("bench", *flags))
    assert [line for line in done.stderr.splitlines() if "key of" in line] == ["quiet sends with the key of acme"]
    assert "lpx_" not in done.stderr


def test_a_scenario_without_a_server_names_both_ways_to_give_one(tmp_path):
    (tmp_path / "s.toml").write_text(GOOD)
    done = CliRunner().invoke(main, ("bench", "--scenario", str(tmp_path / "s.toml")))
    says = "give --url, or --tenants with a file that has the server's URL and keys"
    assert (done.exit_code, done.stderr) == (2, f"Error: {says}\n")


def test_a_tenant_without_a_key_is_named_by_line(tmp_path):
    (tmp_path / "s.toml").write_text(GOOD)
    tenants = [{"name": "acme", "api_key": "lpx_a", "models": ["a0"]}]
    (tmp_path / "demo.json").write_text(json.dumps({"gateway": "http://127.0.0.1:9", "tenants": tenants}))
    flags = ("--scenario", str(tmp_path / "s.toml"), "--tenants", str(tmp_path / "demo.json"))
    done = CliRunner().invoke(main, ("bench", *flags))
    says = f"tenants[1].name: no key for 'flood': --tenants {tmp_path}/demo.json has 1 tenants, none is left"
    remedy = (
        "create it (`loraplex tenant create flood --weight 2`, `loraplex key create flood`) and add "
        '{"name": "flood", "api_key": "lpx_...", "models": []} to the tenants of that file, or set key_env in the '
        "scenario to a variable with its key"
    )
    assert (done.exit_code, done.stderr) == (2, f"Error: {tmp_path}/s.toml:14: {says}; {remedy}\n")


def test_a_trace_names_the_tenants_it_has(tmp_path):
    (tmp_path / "t.csv").write_text(
        "timestamp,tenant,adapter,input,output\n0,acme,a1,4,5\n1,acme,a9,4,5\n0.5,acme,a1,4,5\n0,acme,a9,1,1\n"
    )
    tenant = '[[tenants]]\nname = "{}"\narrival = {{kind = "trace", file = "t.csv"}}\n'
    with pytest.raises(ScenarioError, match=r"s.toml:4: .*no request of tenant 'quiet'; it has those of acme"):
        read(tmp_path, 'name = "x"\n' + tenant.format("quiet"))
    table = '[[tenants]]\nname = "acme"\n[tenants.arrival]\nkind = "trace"\nfile = "t.csv"\nrows = "gone"\n'
    with pytest.raises(ScenarioError, match=r"s.toml:7: tenants\[0\].arrival.rows: .*no request of tenant 'gone'"):
        read(tmp_path, 'name = "x"\n' + table)
    with pytest.raises(ScenarioError, match=r"s.toml:4: .*none.csv: No such file"):
        read(tmp_path, 'name = "x"\n' + tenant.format("acme").replace("t.csv", "none.csv"))
    with pytest.raises(ScenarioError, match=r"s.toml:4: .*t\\x00.csv: expected the name of a file"):
        read(tmp_path, 'name = "x"\n' + tenant.format("acme").replace("t.csv", r"t\u0000.csv"))
    scenario = read(tmp_path, 'name = "x"\n' + tenant.format("acme"))
    with pytest.raises(ScenarioError, match=rf"s.toml:4: .*no model 'a9'.* a3; {tmp_path}/t.csv:3$"):
        scenario.load({"acme": ACCESS["quiet"]})
    listed = tenant.format("acme") + 'adapters = [\n"a1",\n"a8",\n]\n'
    with pytest.raises(
        ScenarioError, match=rf"s.toml:5: tenants\[0\].adapters: .*'a9'.* this list; {tmp_path}/t.csv:3$"
    ):
        read(tmp_path, 'name = "x"\n' + listed).load({"acme": Access(None, ["a1", "a8", "a9"], [])})
    with pytest.raises(ScenarioError, match=r"s.toml:7: tenants\[0\].adapters\[1\]: .*no model 'a8'.* lists a1, a9$"):
        read(tmp_path, 'name = "x"\n' + listed).load({"acme": Access(None, ["a1", "a9"], [])})
    load = scenario.load({"acme": Access(None, ["a1", "a9"], [])})
    planned = [(p.at, p.target.model, p.input_tokens) for p in load.plan(load.sources[0])]
    assert planned == [(0, "a1", 4), (0, "a9", 1), (0.5, "a1", 4), (1, "a9", 4)]


def test_phases_end_a_tenants_requests(tmp_path):
    text = GOOD.replace("seconds = 10", "").replace('{kind = "poisson", rate = 2}', PHASES.format("even", "rate = 2"))
    quiet, _ = read(tmp_path, text.replace("weight = 2", "stop = 1")).load(ACCESS).sources
    assert list(quiet.arrival.times(Random(1))) == [0, 1, 1.5]


@pytest.mark.parametrize(
    ("name", "models"), [("azure-like", ""), ("slora-power-law", ",".join(f"a{i}" for i in range(32)))]
)
def test_the_traces_among_the_examples_are_those_of_their_commands(name, models, tmp_path):
    out = tmp_path / "plan.csv"
    flags = ("--scenario", str(ROOT / f"examples/scenarios/{name}.toml"), "--plan-only", "--trace-out", str(out))
    done = CliRunner().invoke(main, ("bench", *flags, *(("--models", models) if models else ())))
    assert (done.exit_code, done.output) == (0, "")
    made, kept = read_trace(out), read_trace(ROOT / f"examples/scenarios/{name}.csv")
    assert [(row.tenant, row.adapter) for row in made] == [(row.tenant, row.adapter) for row in kept]
    # Logarithms may differ in their last bit between machines.
    for column in ("timestamp", "input", "output"):
        assert [getattr(row, column) for row in made] == pytest.approx([getattr(row, column) for row in kept], abs=1)


@pytest.mark.parametrize(
    ("text", "flags", "says"),
    [
        (GOOD, ("--plan-only",), "--plan-only needs --scenario and --trace-out"),
        (GOOD, ("--plan-only", "--trace-out", "t.csv", "--zipf", "1"), "--zipf cannot be combined with --scenario"),
        (GOOD.replace('{kind = "poisson", rate = 2}', '{kind = "closed", concurrency = 2}'),
         ("--plan-only", "--trace-out", "t.csv"), "s.toml has closed loops only, whose requests have no times"),
    ],
)  # fmt: skip
def test_a_plan_that_cannot_be_written(text, flags, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.toml").write_text(text)
    done = CliRunner().invoke(main, ("bench", "--scenario", "s.toml", *flags))
    assert done.exit_code == 2
    assert says in done.stderr
    assert not (tmp_path / "t.csv").exists()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_valid_and_says_where_it_comes_from(path):
    scenario = Scenario(path)
    models = [f"a{i}" for i in range(1000)]
    load = scenario.load({name: Access(None, models, models) for name in scenario.tenants})
    assert load.plan_hash() == load.plan_hash()
    assert path.read_text().startswith("# ")
    assert "Made for this project" in path.read_text()
    assert scenario.spec.name == path.stem


def test_the_list_of_examples_has_each_with_its_tenants():
    text = (ROOT / "examples/scenarios/README.md").read_text()
    listed = re.findall(r"^\| `([\w-]+)` \| (\d+) \| (?:about )?(\d+) \| ", text, re.MULTILINE)
    scenarios = [Scenario(path) for path in EXAMPLES]
    assert sorted((name, int(tenants)) for name, tenants, _ in listed) == sorted(
        (scenario.spec.name, len(scenario.tenants)) for scenario in scenarios
    )
    seconds = {name: int(number) for name, _, number in listed}
    for spec in (scenario.spec for scenario in scenarios):
        assert spec.seconds is None or seconds[spec.name] == spec.seconds
    assert "examples/scenarios/README.md" in " ".join(CliRunner().invoke(main, ("bench", "--help")).output.split())
