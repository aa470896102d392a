"""The `loraplex bench` command: load on any OpenAI server, and the report of it."""

import json
import shlex
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from loraplex.bench.load import LoadError, Target
from loraplex.bench.workload import Workload
from loraplex.commands.common import check_url, examples, is_gateway_of, one_line, whose
from loraplex.commands.config_options import options_of, take
from loraplex.commands.values import Number
from loraplex.up.datadir import DataDirError, read_json
from wire.escaping import escaped
from wire.options import options

if TYPE_CHECKING:
    from loraplex.bench.scenario import Scenario
    from loraplex.bench.session import BenchRun

FILE = click.Path(path_type=Path)
# Flags that a scenario replaces. Its seed may be given.
SHORT_FORM = (*(name for name in options(Workload) if name != "seed"), "models")


@click.command(
    epilog=examples(
        "loraplex bench --tenants .loraplex/demo.json --n 64 --c 16",
        "loraplex bench --url http://127.0.0.1:8000 --models a0,a1,a2 --zipf 1.0 --rate 4 --json report.json",
        "loraplex bench --scenario examples/scenarios/flood.toml --tenants .loraplex/demo.json --html report.html",
        "loraplex bench --compare before.json after.json",
    )
)
@click.option("--url", help="URL of the server; default: the gateway named in --tenants.")
@click.option("--models", help="Model names, comma separated, the most popular first.")
@click.option("--api-key", envvar="LORAPLEX_API_KEY", help="Key without --tenants. [env: LORAPLEX_API_KEY]")
@click.option(
    "--tenants",
    type=FILE,
    help='File like demo.json: {"gateway": URL, "tenants": [{"name", "api_key", "models"}, ...]}; replaces --models.',
)
@click.option("--keys-to-other-url", is_flag=True, help="Send --tenants' keys to a --url that is not their gateway.")
@click.option("--internal-token-file", type=FILE, help="File with the token of an engine behind a gateway.")
@click.option(
    "--scenario",
    type=FILE,
    help="TOML file with a pattern of requests for each tenant. examples/scenarios/README.md lists some; "
    'docs/reference.md describes the format under "Scenario files".',
)
@click.option(
    "--rate-scale",
    default=1.0,
    show_default=True,
    type=Number(min=0.001, max=1000),
    help="Factor of all rates of a scenario's open loops, also of a trace's speed.",
)
@options_of(Workload)
@click.option(
    "--repeat", default=1, show_default=True, type=click.IntRange(1, 100), help="Measured runs; shows their spread."
)
@click.option("--overhead/--no-overhead", default=True, help="Measure the generator's own overhead after the runs.")
@click.option("--accept-errors", is_flag=True, help="Exit with 0 even if requests failed.")
@click.option("--json", "json_path", type=FILE, help="Also write the report to this file.")
@click.option("--html", type=FILE, help="Also write the report with plots as one HTML page.")
@click.option("--compare", nargs=2, type=FILE, help="Compare two reports of --json instead of measuring.")
@click.option("--trace-out", type=FILE, help="Write the planned requests of open loops to this CSV file.")
@click.option("--plan-only", is_flag=True, help="Write a scenario's --trace-out and send nothing.")
@click.pass_context
def bench(context: click.Context, /, **flags: Any) -> None:
    """Measure any OpenAI-compatible server: throughput, latency, fairness between tenants."""
    from loraplex.bench.run import BenchError
    from loraplex.bench.scenario import ScenarioError
    from loraplex.bench.session import run_benchmark

    if flags["compare"]:
        _compare(*flags["compare"])
        return
    for flag in ("json_path", "html", "trace_out"):
        if (path := flags[flag]) and not path.parent.is_dir():
            name = "--" + flag.removesuffix("_path").replace("_", "-")
            raise click.UsageError(f"{name}: there is no folder {path.parent}")
    with one_line(OSError):
        try:
            if flags["plan_only"]:
                _write_plan(context, flags)
                return
            bench_run = _bench_run(context, flags)
            report = run_benchmark(bench_run)
        except ScenarioError as error:
            raise click.UsageError(str(error)) from error
        except BenchError as error:
            raise click.ClickException(escaped(str(error))) from error
        _output(report, flags["json_path"], flags["html"])
    _exit(report, accept_errors=flags["accept_errors"])


def _output(report: dict[str, Any], json_path: Path | None, html: Path | None) -> None:
    """Write the report's files and print it. Each is tried even if another fails: a run may have taken hours."""
    from loraplex.bench.page import html_page
    from loraplex.bench.table import print_report

    # The last callback runs first: a closed pipe or a signal during the printing leaves whole files.
    with ExitStack() as outputs:
        outputs.callback(print_report, report)
        if html:
            outputs.callback(lambda: html.write_text(html_page(report), encoding="utf-8", errors="backslashreplace"))
        if json_path:
            outputs.callback(lambda: json_path.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n"))


def _compare(before: Path, after: Path) -> None:
    from loraplex.bench.compare import print_comparison
    from loraplex.bench.report_file import CompareError, read_report

    try:
        print_comparison(read_report(before), read_report(after))
    except CompareError as error:
        raise click.UsageError(escaped(f"--compare: {error}")) from error


def _bench_run(context: click.Context, flags: dict[str, Any]) -> "BenchRun":
    """Return the benchmark that the flags describe. Raises click.UsageError, ScenarioError."""
    from loraplex.bench.session import BenchRun, fixed, of_scenario

    token = _token(flags["internal_token_file"])
    common = {
        "repeat": flags["repeat"],
        "with_overhead": flags["overhead"],
        "internal_token": token,
        "trace_out": flags["trace_out"],
        "rate_scale": flags["rate_scale"],
    }
    if flags["scenario"] is None:
        if flags["rate_scale"] != 1:
            raise click.UsageError("--rate-scale needs --scenario; without one, --rate gives the rate")
        url, targets = _targets_of_file(flags) if flags["tenants"] else _targets_of_models(flags)
        load = Workload(**take(Workload, flags)).load(targets)
        try:
            load.check_size(load.sources[0])
        except LoadError as error:
            raise click.UsageError(f"--rate: the load {error}") from error
        return BenchRun(url, fixed(load), "command line", admin_key=_admin_key(url, flags), **common)

    scenario = _scenario(context, flags, SHORT_FORM)
    url, keys = _keys_of_scenario(scenario, flags)
    make = of_scenario(scenario, keys, _given_seed(context, flags))
    spec = scenario.spec
    without = spec.baseline.without if spec.baseline else ()
    description = spec.description
    if flags["rate_scale"] != 1:
        description += f" (rates times {flags['rate_scale']:g})"
    admin_key = _admin_key(url, flags)
    return BenchRun(url, make, spec.name, description, without, admin_key=admin_key, **common)


def _write_plan(context: click.Context, flags: dict[str, Any]) -> None:
    """Write the requests that a scenario plans, without a server. Raises click.UsageError, ScenarioError."""
    from loraplex.bench.trace import write_trace

    if flags["scenario"] is None or flags["trace_out"] is None:
        raise click.UsageError("--plan-only needs --scenario and --trace-out")
    scenario = _scenario(context, flags, [name for name in SHORT_FORM if name != "models"])
    models = [model for model in (flags["models"] or "").split(",") if model]
    rows = scenario.load_without_server(models, _given_seed(context, flags)).rows()
    if not rows:
        raise click.UsageError(f"--plan-only: {scenario.path} has closed loops only, whose requests have no times")
    write_trace(flags["trace_out"], rows)


def _scenario(context: click.Context, flags: dict[str, Any], unused: Sequence[str]) -> "Scenario":
    """Return the scenario. Raises click.UsageError for a flag in `unused` that is given, ScenarioError."""
    from loraplex.bench.scenario import Scenario

    for name in unused:
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            flag = next(param.opts[0] for param in context.command.params if param.name == name)
            raise click.UsageError(f"{flag} cannot be combined with --scenario: the file sets it")
    return Scenario(flags["scenario"], flags["rate_scale"])


def _given_seed(context: click.Context, flags: dict[str, Any]) -> int | None:
    """Return --seed, None if it is not given."""
    return flags["seed"] if context.get_parameter_source("seed") is not ParameterSource.DEFAULT else None


def _token(file: Path | None) -> str | None:
    token = file.read_text().strip() if file else None
    if token == "":
        raise click.UsageError(f"--internal-token-file: {file} is empty")
    return token


def _keys_of_scenario(scenario: "Scenario", flags: dict[str, Any]) -> tuple[str, dict[str, str | None]]:
    """Return the server's URL and each tenant's key: from its `key_env`, from --tenants, or --api-key. Raises
    click.UsageError, ScenarioError.

    A tenant of the scenario that is not in --tenants gets the key of the next tenant there that the scenario does not
    name.
    """
    given = scenario.keys_from_environment()
    url = flags["url"]
    keys: dict[str, str | None] = {name: given.get(name, flags["api_key"]) for name in scenario.tenants}
    if flags["tenants"]:
        url, listed = _read_tenants(flags)
        of_file = {tenant["name"]: tenant["api_key"] for tenant in listed}
        unnamed = [name for name in of_file if name not in keys]
        owners: dict[str, str] = {}
        for name in [name for name in scenario.tenants if name not in given]:
            if name not in of_file and not unnamed:
                why = f"--tenants {flags['tenants']} has {len(of_file)} tenants, none is left"
                scenario.fail_without_key(name, f"{why}; {_remedy(scenario, name)}")
            owners[name] = name if name in of_file else unnamed.pop(0)
        keys |= {name: of_file[owner] for name, owner in owners.items()}
        for name, owner in owners.items():
            if owner != name:
                click.echo(escaped(f"{name} sends with the key of {owner}"), err=True)
    return _checked_url(url), keys


def _remedy(scenario: "Scenario", name: str) -> str:
    """Return how a tenant of the scenario gets a key."""
    [weight] = [tenant.weight for tenant in scenario.spec.tenants if tenant.name == name]
    quoted = shlex.quote(name)
    create = f"loraplex tenant create {quoted}" + (f" --weight {weight:g}" if weight != 1 else "")
    entry = json.dumps({"name": name, "api_key": "lpx_...", "models": []})
    return (
        f"create it (`{create}`, `loraplex key create {quoted}`) and add {entry} to the tenants of that file, "
        "or set key_env in the scenario to a variable with its key"
    )


def _admin_key(url: str, flags: dict[str, Any]) -> str | None:
    """Return the operator's key of the gateway at `url` from the local.json beside --tenants, if it is there."""
    if not flags["tenants"]:
        return None
    with one_line(DataDirError):
        local = read_json(flags["tenants"].parent / "local.json") or {}
    return local.get("admin_key") if is_gateway_of(local, url) else None


def _read_tenants(flags: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """Return the server's URL and the tenants of --tenants. Their keys are sent to the file's own gateway only."""
    file, url = flags["tenants"], flags["url"]
    try:
        demo = read_json(file)
    except DataDirError as error:
        raise click.UsageError(f"--tenants: {error}") from error
    if demo is None:
        raise click.UsageError(f"--tenants: there is no file {file}")
    try:
        url = url or str(demo["gateway"])
        tenants = [{name: tenant[name] for name in ("name", "api_key", "models")} for tenant in demo["tenants"]]
    except (KeyError, TypeError) as error:
        raise click.UsageError(f"--tenants: {file} is not in the form of demo.json") from error
    if not is_gateway_of(demo, url) and not flags["keys_to_other_url"]:
        raise click.UsageError(f"{file} {whose(demo, url)}; with --keys-to-other-url its keys are sent there")
    return url, tenants


def _targets_of_file(flags: dict[str, Any]) -> tuple[str, list[Target]]:
    """Return the server's URL and a target for each model of each tenant in the file."""
    if flags["models"] is not None:
        raise click.UsageError("give either --models or --tenants")
    url, tenants = _read_tenants(flags)
    targets = [Target(tenant["name"], tenant["api_key"], model) for tenant in tenants for model in tenant["models"]]
    if not targets:
        raise click.UsageError(f"--tenants: {flags['tenants']} has no model")
    return _checked_url(url), targets


def _targets_of_models(flags: dict[str, Any]) -> tuple[str, list[Target]]:
    """Return the server's URL and a target for each model, all with the same key."""
    if flags["models"] is None:
        raise click.UsageError("give --models, --tenants or --scenario")
    targets = [Target("-", flags["api_key"], model) for model in flags["models"].split(",") if model]
    if not targets:
        raise click.UsageError("--models: expected the name of a model")
    return _checked_url(flags["url"]), targets


def _checked_url(url: str | None) -> str:
    if not url:
        raise click.UsageError("give --url, or --tenants with a file that has the server's URL and keys")
    check_url(url, "--url")
    return url


def _exit(report: dict[str, Any], *, accept_errors: bool) -> None:
    """End with 130 after Ctrl-C, and with 1 if requests failed and that is not accepted."""
    runs = report["runs"]
    if any(run["interrupted"] for run in [*runs, *([report["baseline"]] if report["baseline"] else [])]):
        raise click.exceptions.Exit(130)
    failed = sum(run["all"]["failed"] for run in runs)
    if failed and not accept_errors:
        first = next(run["first_error"] for run in runs if run["first_error"])
        raise click.ClickException(
            f"{failed} of {sum(run['all']['requests'] for run in runs)} requests failed; the first: {escaped(first)}"
        )
