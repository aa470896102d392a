"""Scenario files: each wrong one is refused with its line and key."""

from pathlib import Path

import pytest

from loraplex.bench.arrivals import Poisson
from loraplex.bench.scenario import Access, Scenario, ScenarioError
from loraplex.bench.toml_lines import TomlLines

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
MODELS = ["a0", "a1", "a2", "a3"]
ACCESS = {name: Access(f"key of {name}", ["base", *MODELS], MODELS) for name in ("quiet", "flood")}


def read(folder: Path, text: str) -> Scenario:
    (folder / "s.toml").write_text(text)
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
        ("seconds = 10", "seconds = = 10", 2, "not TOML: Invalid value"),
        ("seconds = 10", "seconds = 10\nseconds = 11", 3, "not TOML: Cannot overwrite a value"),
        ("ttft = 1", "ttft = 0", 5, "slo.ttft: expected a number > 0.0: 0"),
        ("ttft = 1", "tfft = 1", 5, "slo.tfft: unknown key; known are ttft, tpot, latency"),
        ("rate = 2", "rate = 0", 9, "tenants[0].arrival.rate: expected a number > 0.0: 0"),
        ("rate = 2", "rate = inf", 9, "tenants[0].arrival.rate: expected a number <= 10000.0: inf"),
        ("rate = 2", "rate = nan", 9, "tenants[0].arrival.rate: expected a number"),
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
        ("a{0..3}", "a{3..0}", 16, "tenants[1].adapters[0]: expected {first..last}"),
        ('"base"', '"a2"', 16, "tenants[1].adapters[1]: 'a2' is in the list twice"),
        ('"base"', '"gone"', 16, "tenants[1].adapters: the server has no model 'gone' for this tenant; it lists base"),
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
def test_a_wrong_scenario_is_named_by_line_and_key(old, new, line, says, tmp_path):
    assert old in GOOD
    text = GOOD.replace(old, new, 1)
    if "more than 1000000" in says:
        text = text.replace("seconds = 10", "seconds = 600000", 1)
    with pytest.raises(ScenarioError) as caught:
        used(read(tmp_path, text))
    assert str(caught.value).startswith(f"{tmp_path}/s.toml:{line}: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_bytes_that_are_no_text(tmp_path):
    with pytest.raises(ScenarioError, match="No such file"):
        Scenario(tmp_path / "none.toml")
    (tmp_path / "s.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ScenarioError, match="expected UTF-8"):
        Scenario(tmp_path / "s.toml")


def test_a_trace_names_the_tenants_it_has(tmp_path):
    (tmp_path / "t.csv").write_text("timestamp,tenant,adapter,input,output\n0,acme,a1,4,5\n1,acme,a9,4,5\n")
    tenant = '[[tenants]]\nname = "{}"\narrival = {{kind = "trace", file = "t.csv"}}\n'
    with pytest.raises(ScenarioError, match=r"s.toml:4: .*no request of tenant 'quiet'; it has those of acme"):
        read(tmp_path, 'name = "x"\n' + tenant.format("quiet"))
    with pytest.raises(ScenarioError, match=r"s.toml:4: .*none.csv: No such file"):
        read(tmp_path, 'name = "x"\n' + tenant.format("acme").replace("t.csv", "none.csv"))
    scenario = read(tmp_path, 'name = "x"\n' + tenant.format("acme"))
    with pytest.raises(ScenarioError, match=r"s.toml:4: .*no model 'a9'"):
        scenario.load({"acme": ACCESS["quiet"]})
    load = scenario.load({"acme": Access(None, ["a1", "a9"], [])})
    assert [(p.at, p.target.model, p.input_tokens) for p in load.plan(load.sources[0])] == [(0, "a1", 4), (1, "a9", 4)]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_valid_and_says_where_it_comes_from(path):
    scenario = Scenario(path)
    models = [f"a{i}" for i in range(1000)]
    load = scenario.load({name: Access(None, models, models) for name in scenario.tenants})
    assert load.digest() == load.digest()
    assert path.read_text().startswith("# ")
    assert "Made for this project" in path.read_text()
    assert scenario.spec.name == path.stem


def test_lines_of_keys_in_every_form_of_toml():
    text = '''\
# comment
a = 1
"b c" = """
d = 2
[e]
"""
f.g = [
  {h = 1},
  {i = 2},
]
[j."k l".m]
n = {o = {p = 1}}
[[q]]
[[q]]
r = 1
[[q.s]]
t = 1
[q.u]
v = 1
'''
    lines = TomlLines(text)
    expected = {
        ("a",): 2,
        ("b c",): 3,
        ("f", "g"): 7,
        ("f", "g", 1, "i"): 7,
        ("j", "k l", "m", "n"): 12,
        ("j", "k l", "m", "n", "o", "p"): 12,
        ("q", 1): 14,
        ("q", 1, "r"): 15,
        ("q", 1, "s", 0, "t"): 17,
        ("q", 1, "u", "v"): 19,
        ("q", 1, "u", "missing"): 18,
        ("e",): 1,
    }
    assert {path: lines.line(path) for path in expected} == expected
