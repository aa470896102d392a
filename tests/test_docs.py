"""The documentation is held to the code: what exists is documented, and what is documented exists."""

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import click
import pytest
import yaml
from prometheus_client import CollectorRegistry

import engine.server.metrics
import gateway.metrics
from gateway.settings import Settings, env_name
from loraplex.cli import main

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = (ROOT / "docs" / "reference.md").read_text()
CODE = set(re.findall(r"`([^`\n]+)`", REFERENCE))
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "deploy/README.md",
]


def commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        for child, sub in command.commands.items():
            yield from commands(sub, f"{name} {child}")
    else:
        yield name, command


COMMANDS = dict(commands(main, "loraplex"))


def options(command: click.Command) -> set[str]:
    named = [p for p in command.params if isinstance(p, click.Option)]
    return {flag for option in named for flag in (*option.opts, *option.secondary_opts)}


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_flag(name):
    assert re.search(rf"`{name}\b", REFERENCE), name
    assert options(COMMANDS[name]) <= CODE
    assert COMMANDS[name].help
    assert all(p.help for p in COMMANDS[name].params if isinstance(p, click.Option))


def test_every_documented_flag_exists():
    exist = set().union(*(options(command) for command in COMMANDS.values()))
    assert {word for word in CODE if word.startswith("--")} <= exist | {"--version", "--help"}


def spelt(node: ast.expr, names: dict[str, str]) -> str:
    """The string that a constant, an f-string or a name of one stands for."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id=name):
            return names[name]
        case ast.JoinedStr(values=parts):
            return "".join(spelt(p.value if isinstance(p, ast.FormattedValue) else p, names) for p in parts)
    raise AssertionError(f"a route's path is {ast.unparse(node)}")


def routes() -> set[tuple[str, str]]:
    """(METHOD, path) of every `web.get(path, ...)` and `....router.add_get(path, ...)` in the two servers' source."""
    found = set()
    for path in sources("gateway", "engine/server"):
        tree = list(ast.walk(ast.parse(path.read_text())))
        assigned = [n for n in tree if isinstance(n, ast.Assign) and isinstance(n.value, ast.Constant)]
        names = {t.id: n.value.value for n in assigned for t in n.targets if isinstance(t, ast.Name)}
        for node in tree:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                method = node.func.attr.removeprefix("add_").upper()
                adds = ast.unparse(node.func.value) == "web" or ast.unparse(node.func.value).endswith("router")
                if adds and method in ("GET", "POST", "PUT", "PATCH", "DELETE"):
                    found.add((method, spelt(node.args[0], names).replace(":.+}", "}")))
    return found


def test_every_route_and_no_other():
    documented = {tuple(word.split(" ")) for word in CODE if re.match(r"(GET|POST|PUT|PATCH|DELETE) /", word)}
    assert len(routes()) > 30
    assert routes() == documented


def test_every_setting_and_no_other():
    known = {env_name(field.name) for field in fields(Settings)} | {"LORAPLEX_GATEWAY", "LORAPLEX_API_KEY"}
    documented = {word for word in CODE if word.startswith("LORAPLEX_")}
    assert documented == known
    from_flags = {p.envvar for command in COMMANDS.values() for p in command.params if p.envvar}
    assert from_flags <= known


def metric_names(registry: CollectorRegistry) -> set[str]:
    suffix = {"counter": "_total"}
    return {metric.name + suffix.get(metric.type, "") for metric in registry.collect()}


METRICS = metric_names(gateway.metrics.Metrics().registry) | metric_names(engine.server.metrics.Metrics()._registry)


def test_every_metric_and_no_other():
    assert len(METRICS) > 15
    assert {word for word in CODE if re.match(r"loraplex_(gateway|engine)_", word)} == METRICS


def test_the_dashboard_asks_for_metrics_that_exist():
    dashboard = json.loads((ROOT / "deploy/grafana/loraplex.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {re.sub(r"_(bucket|sum|count)$", "", name) for q in queries for name in re.findall(r"loraplex_\w+", q)}
    assert len(asked) > 8
    assert asked <= METRICS


def test_prometheus_scrapes_what_compose_runs():
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    scrape = yaml.safe_load((ROOT / "deploy/prometheus.yml").read_text())["scrape_configs"]
    targets = {t for job in scrape for config in job["static_configs"] for t in config["targets"]}
    metrics_port = compose["services"]["gateway"]["environment"]["LORAPLEX_METRICS_PORT"]
    assert targets == {f"gateway:{metrics_port}", "engine:8000"}


def test_every_error_code_and_no_other():
    """Codes are given as `code="..."`, as a class's `code`, or as the last of `status, kind, code = ...`."""
    codes = set()
    for path in sources("gateway", "engine"):
        for node in ast.walk(ast.parse(path.read_text())):
            values: list[ast.expr] = []
            if isinstance(node, ast.keyword) and node.arg == "code":
                values = [node.value]
            elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = zip(target.elts, node.value.elts, strict=True)
                    values = [v for t, v in pairs if isinstance(t, ast.Name) and t.id == "code"]
                elif isinstance(target, ast.Name) and target.id == "code":
                    values = [node.value]
            for value in values:
                branches = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
                codes |= {b.value for b in branches if isinstance(b, ast.Constant) and isinstance(b.value, str)}
    table = REFERENCE.split("## Errors")[1].split("## Metrics")[0]
    rows = [line.split("|")[2] for line in table.splitlines() if re.match(r"\| \d{3} \|", line)]
    documented = {code for row in rows for code in re.findall(r"`(\w+)`", row)}
    assert codes == documented


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_commands_in_the_documents_are_real(path):
    text = path.read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (path.parent / target).exists(), target
    for line in re.findall(r"^(?:LORAPLEX_\S+=\S+ )?(loraplex [a-z].*)$", text, re.MULTILINE):
        words = line.split()
        name = next((n for n in (" ".join(words[:3]), " ".join(words[:2])) if n in COMMANDS), None)
        assert name is not None, line
        assert {w.split("=")[0] for w in words if w.startswith("--")} <= options(COMMANDS[name]) | {"--help"}, line
