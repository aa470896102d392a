"""Whole benchmarks over real HTTP, against a server double with known times and failures."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from click.testing import CliRunner

from loraplex.bench.arrivals import Closed, Even
from loraplex.bench.load import Load, Target
from loraplex.bench.run import BenchError
from loraplex.bench.scenario import Scenario, ScenarioError
from loraplex.bench.session import BenchRun, benchmark, fixed, of_scenario
from loraplex.bench.table import print_report
from loraplex.bench.workload import Workload
from loraplex.cli import main
from testing.openai_double import Double
from testing.ports import free_port
from testing.serving import serving

pytestmark = pytest.mark.usefixtures("starts_servers")

KEYS = {"acme": "lpx_secret_of_acme", "globex": "lpx_secret_of_globex"}
TARGETS = tuple(Target(name, key, "a0") for name, key in KEYS.items())
SCENARIO = """\
name = "x"
seconds = {seconds}
warmup = 0
timeout = {timeout}
[baseline]
without = ["globex"]
[[tenants]]
name = "acme"
weight = 3
arrival = {{kind = "even", rate = 20}}
input = {{kind = "fixed", tokens = 4}}
output = {{kind = "fixed", tokens = 2}}
[[tenants]]
name = "globex"
adapters = ["{adapter}"]
arrival = {{kind = "closed", concurrency = 3}}
input = {{kind = "fixed", tokens = 4}}
output = {{kind = "fixed", tokens = 2}}
"""


async def run(url: str, load: Load, **settings: Any) -> dict[str, Any]:
    return await benchmark(BenchRun(url, fixed(load), "test", **{"with_overhead": False} | settings))


def short(**sizes: Any) -> Load:
    return Workload(**{"n": 6, "concurrency": 2, "warmup": 0, "input_words": 5, "output_tokens": 5} | sizes).load(
        TARGETS
    )


def scenario(folder: Path, seconds: float = 0.5, timeout: float = 60.0, adapter: str = "a1") -> Scenario:
    (folder / "s.toml").write_text(SCENARIO.format(seconds=seconds, timeout=timeout, adapter=adapter))
    return Scenario(folder / "s.toml")


@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_known_times_are_measured(api):
    """A chat's first event, which has a role only, does not count as its first token."""
    double = Double(ttft=0.1, gap=0.03)
    async with double.serving() as url:
        report = await run(url, replace(short(), api=api))
    [measured] = report["runs"]
    every = measured["all"]
    assert (every["completed"], every["failed"], every["output_tokens"], every["prompt_tokens"]) == (6, 0, 30, 48)
    assert 0.1 <= every["ttft"]["p50"] < 2
    assert 0.02 <= every["inter_token"]["mean"] < 1
    # All answers have equal lengths. A token that is read late shortens the time after it.
    assert every["tpot"]["mean"] == pytest.approx(every["inter_token"]["mean"])
    assert 0.02 <= every["tpot"]["p50"] < 1
    assert every["tpot"]["max"] >= 0.03
    assert every["ttft"]["p50"] + 0.12 <= every["latency"]["max"]
    assert every["latency"]["p50"] >= 0.22
    assert every["counts"]["events_per_token"] == 1
    assert measured["seconds"] >= 3 * 0.22
    assert sum(figures["completed"] for figures in measured["tenants"].values()) == 6
    assert report["warnings"] == [] or measured["generator"]["was_bottleneck"]


async def test_a_load_is_sent_with_its_keys_models_and_lengths():
    double = Double()
    async with double.serving() as url:
        await run(url + "/v1", short(n=20))
    assert {headers["Authorization"] for headers in double.headers} == {f"Bearer {key}" for key in KEYS.values()}
    for body in double.bodies:
        assert (body["model"], body["max_tokens"], len(body["prompt"].split())) == ("a0", 5, 5)
        assert (body["stream"], body["stream_options"], body["ignore_eos"]) == (True, {"include_usage": True}, True)


async def test_two_runs_of_one_seed_send_the_same_requests():
    sent = []
    for seed in (3, 3, 4):
        double = Double()
        async with double.serving() as url:
            report = await run(url, short(rate=200.0, seed=seed, n=12))
        sent.append((sorted(body["prompt"] for body in double.bodies), report["load"]["plan"]))
    assert sent[0] == sent[1]
    assert sent[0][0] != sent[2][0]
    assert sent[0][1] != sent[2][1]


async def test_failures_are_counted_by_kind_and_no_key_is_shown(capsys):
    fails = {0: "429", 1: "503", 2: "drop", 3: "event", 4: "empty", 5: "429"}
    double = Double(fails=fails)
    async with double.serving() as url:
        report = await run(url, short(n=10, concurrency=1))
    assert report["runs"][0]["all"]["errors"] == {
        "http 429 quota_exceeded": 2,
        "http 503 quota_exceeded": 1,
        "cut": 1,
        "stream engine_died": 1,
        "no token": 1,
    }
    assert report["runs"][0]["all"]["completed"] == 4
    print_report(report)
    shown = json.dumps(report) + capsys.readouterr().out
    assert "Bearer ***" in shown
    assert not [key for key in KEYS.values() if key in shown]


async def test_a_stalled_request_is_a_time_out():
    async with Double(fails={1: "stall"}).serving() as url:
        report = await run(url, replace(short(n=3), timeout=4.0))
    assert report["runs"][0]["all"]["errors"] == {"timeout": 1}
    assert report["runs"][0]["all"]["completed"] == 2


@pytest.mark.parametrize(
    ("double", "counts", "warning"),
    [
        ({"per_event": 2}, {"events_per_token": 0.5, "shorter": 6}, "6 answers were shorter than planned"),
        ({"extra": None}, {"without_usage": 6}, "6 answers had no usage block; their events count as tokens"),
        ({"extra": -1}, {"more_events": 6}, "6 answers had more events than the server counted tokens"),
        ({"extra": 1}, {"longer": 6}, "6 answers were longer than their max_tokens"),
    ],
)
async def test_token_counts_are_checked_against_the_stream(double, counts, warning):
    async with Double(**double).serving() as url:
        report = await run(url, short())
    found = report["runs"][0]["all"]["counts"]
    assert {key: found[key] for key in counts} == counts
    assert warning in report["warnings"]


async def test_a_late_generator_adds_to_the_latency_instead_of_hiding_it():
    """The event loop is blocked for 0.6 s: requests planned in that time count from their planned times."""
    load = replace(short(n=10, rate=1.0), seconds=None)
    load = replace(load, sources=(replace(load.sources[0], arrival=Even(20.0)),))
    double = Double()
    async with double.serving() as url:

        async def block() -> None:
            while not double.bodies:  # noqa: ASYNC110 - the double sends no event
                await asyncio.sleep(0.001)
            time.sleep(0.6)  # noqa: ASYNC251

        report, _ = await asyncio.gather(run(url, load), block())
    [measured] = report["runs"]
    assert measured["all"]["completed"] == 10
    assert measured["all"]["ttft"]["max"] >= 0.4
    assert measured["generator"]["late"]["max"] >= 0.3
    assert measured["generator"]["was_bottleneck"]
    assert "the generator was a bottleneck" in report["warnings"][0]


async def test_an_open_loop_does_not_wait_for_answers_and_a_closed_loop_does():
    """A server of one seat: an open loop queues there; a closed loop of one never does."""
    for arrival, queues in ((Even(50.0), True), (Closed(1), False)):
        load = short(n=6, output_tokens=1)
        load = replace(load, sources=(replace(load.sources[0], arrival=arrival),))
        async with Double(ttft=0.1, seats=1).serving() as url:
            [measured] = (await run(url, load))["runs"]
        # The last of six waits for five others: 0.6 s, less the 0.1 s by which it was planned later.
        assert (measured["all"]["ttft"]["max"] >= 0.45) == queues or measured["generator"]["was_bottleneck"]


async def test_a_baseline_runs_first_without_its_tenants(tmp_path):
    double = Double(ttft=0.02, seats=2)
    async with double.serving() as url:
        bench_run = BenchRun(url, of_scenario(scenario(tmp_path), KEYS, None), "x", "", ["globex"], 2, False)
        report = await benchmark(bench_run)
    assert list(report["baseline"]["tenants"]) == ["acme"]
    assert report["baseline"]["all"]["requests"] == 10
    assert [run["tenants"]["acme"]["requests"] for run in report["runs"]] == [10, 10]
    figures = report["isolation"]["acme"]
    assert figures["ratio"] == pytest.approx(figures["ttft_p99_with"] / figures["ttft_p99_without"])
    spread = report["summary"]["tenants"]["acme"]["ttft.p99"]
    assert spread["min"] <= spread["median"] <= spread["max"]
    firsts = [headers["Authorization"] for headers in double.headers[:10]]
    assert set(firsts) == {f"Bearer {KEYS['acme']}"}
    # No prompt comes twice, so that the server's prefix cache helps no run.
    prompts = [body["prompt"] for body in double.bodies]
    assert len(set(prompts)) == len(prompts)
    assert {body["model"] for body in double.bodies} == {"a0", "a1"}


async def test_a_missing_adapter_is_named_before_anything_is_sent(tmp_path):
    double = Double()
    async with double.serving() as url:
        with pytest.raises(ScenarioError, match=r"s.toml:15: .*no model 'gone' for this tenant; it lists base, a0, a1"):
            await benchmark(BenchRun(url, of_scenario(scenario(tmp_path, adapter="gone"), KEYS, None), "x"))
    assert double.bodies == []


async def test_a_key_that_the_server_refuses_is_named_with_its_tenant(tmp_path):
    class Refusing(Double):
        async def models(self, request: web.Request) -> web.Response:
            if request.headers.get("Authorization") != f"Bearer {KEYS['acme']}":
                raise web.HTTPUnauthorized
            return await super().models(request)

    double = Refusing()
    for key, asked in ((KEYS["globex"], "the key"), (None, r"requests without a key \(see --tenants,.*\)")):
        async with double.serving() as url:
            keys = {"acme": KEYS["acme"], "globex": key}
            says = rf"s.toml:14: tenants\[1\].name: no key for 'globex': {url}/v1/models refuses {asked}: status 401$"
            with pytest.raises(ScenarioError, match=says):
                await benchmark(BenchRun(url, of_scenario(scenario(tmp_path), keys, None), "x"))
    assert double.bodies == []


async def test_an_engine_gets_the_tenants_name_and_weight_with_the_internal_token(tmp_path):
    double = Double()
    async with double.serving() as url:
        bench_run = BenchRun(
            url, of_scenario(scenario(tmp_path), KEYS, None), "x", internal_token="inner", with_overhead=False
        )
        report = await benchmark(bench_run)
    named = {(h["x-loraplex-tenant"], h["x-loraplex-weight"], h["x-loraplex-internal-token"]) for h in double.headers}
    assert named == {("acme", "3", "inner"), ("globex", "1", "inner")}
    assert "inner" not in json.dumps(report)


async def test_the_overhead_is_measured_against_the_echo_server():
    async with Double().serving() as url:
        report = await run(url, short(), with_overhead=True)
    overhead = report["overhead"]
    assert overhead["max_requests_per_second"] > 10
    assert overhead["max_events_per_second"] == pytest.approx(5 * overhead["max_requests_per_second"])
    assert overhead["ttft"]["p50"] > 0


async def test_a_server_that_is_not_there():
    port = free_port()
    with pytest.raises(BenchError, match=f"^cannot reach http://127.0.0.1:{port}: Connection refused$"):
        await run(f"http://me:password@127.0.0.1:{port}", short())


async def test_a_redirect_gets_no_key():
    other = Double()

    async def elsewhere(request: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect(url + request.path)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", elsewhere)
    async with other.serving() as url, serving(app) as first:
        report = await run(first, short(), internal_token="inner")
    assert report["runs"][0]["all"]["errors"] == {"http 307": 6}
    assert other.bodies == []


def test_a_wrong_scenario_is_one_line_and_2(tmp_path):
    scenario(tmp_path)
    path = tmp_path / "s.toml"
    path.write_text(path.read_text().replace("rate = 20", "rate = -20"))
    result = CliRunner().invoke(main, ("bench", "--scenario", str(path), "--url", "http://127.0.0.1:9"))
    assert result.exit_code == 2
    assert result.stderr == f"Error: {path}:10: tenants[0].arrival.rate: expected a number >= 1e-06: -20\n"
    result = CliRunner().invoke(main, ("bench", "--scenario", str(path), "--n", "3"))
    assert (result.exit_code, result.stderr) == (2, "Error: --n cannot be combined with --scenario: the file sets it\n")


@pytest.mark.parametrize(
    ("flags", "path", "has_field"),
    [
        ((), "/v1/completions", True),
        (("--api", "chat", "--no-ignore-eos"), "/v1/chat/completions", False),
        (("--no-ignore-eos",), "/v1/completions", False),
    ],
)
async def test_the_short_form_has_both_routes_with_and_without_ignore_eos(flags, path, has_field):
    double = Double()
    async with double.serving() as url:
        sizes = ("--models", "a0", "--n", "2", "--warmup", "1", "--output-tokens", "3", "--no-overhead")
        command = (sys.executable, "-m", "loraplex.cli", "bench", "--url", url, *sizes, *flags)
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, error = await asyncio.wait_for(process.communicate(), 120)
    assert (process.returncode, error) == (0, b""), out
    assert len(double.bodies) == 3
    assert {"messages" in body for body in double.bodies} == {path.endswith("chat/completions")}
    assert {body.get("ignore_eos", False) for body in double.bodies} == {has_field}


async def test_ctrl_c_writes_the_report_of_what_was_measured(tmp_path):
    out = tmp_path / "report.json"
    arguments = ("--models", "a0", "--n", "9", "--c", "4", "--warmup", "0", "--output-tokens", "50000", "--json", out)
    double = Double(gap=0.01)
    async with double.serving() as url:
        command = (sys.executable, "-m", "loraplex.cli", "bench", "--url", url, *arguments)
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            deadline = time.monotonic() + 60
            while len(double.bodies) < 4:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            process.send_signal(signal.SIGINT)
            await asyncio.wait_for(process.communicate(), 60)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert process.returncode == 130
    report = json.loads(out.read_text())
    [measured] = report["runs"]
    assert measured["interrupted"]
    assert (measured["all"]["unfinished"], measured["all"]["failed"]) == (4, 0)
    assert "interrupted; 4 requests were in flight" in report["warnings"]


async def test_requests_in_flight_are_cut_after_the_drain():
    """They count as unfinished, which neither interrupts the run nor fails it."""
    double = Double(gap=0.05)
    load = replace(short(n=4, concurrency=4, output_tokens=50_000), seconds=4.0, drain=0.5)
    async with double.serving() as url:
        report = await run(url, load)
    [measured] = report["runs"]
    assert (measured["all"]["unfinished"], measured["all"]["failed"], measured["interrupted"]) == (4, 0, False)
    assert 4.4 <= measured["seconds"] < 40
    assert len(measured["ttft_points"]["acme"]) + len(measured["ttft_points"]["globex"]) == 4
