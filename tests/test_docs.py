"""Agreement of documentation and code: everything that exists is documented, and everything documented exists."""

import ast
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import click
import pytest
from prometheus_client import CollectorRegistry

import engine.metrics.metrics
import gateway.metrics
from benchmarks.hostile.catalogue import ATTACKS
from engine.config import EngineConfig, ServerConfig
from engine.gpus import GPUS
from engine.model.families import FAMILIES
from engine.model.gguf.model import ARCHITECTURES
from gateway.limits.kinds import KINDS
from gateway.route_table import ROUTES
from gateway.settings import Settings, env_name
from loraplex.bench.workload import Workload
from loraplex.cli import main
from loraplex.commands.common import WithSubcommands
from loraplex.commands.programs.vllm_flags import INSTEAD
from loraplex.up.config import UpConfig
from loraplex.up.demo_tenants import DemoTenant
from loraplex.up.display import Display
from wire.options import options as config_options

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = (ROOT / "docs" / "reference.md").read_text()
CODE = set(re.findall(r"`([^`\n]+)`", REFERENCE))
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "deploy/README.md",
    *sorted((ROOT / "examples").rglob("*.md")),
]


def commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        for child, sub in command.commands.items():
            yield from commands(sub, f"{name} {child}")
    else:
        yield name, command
        if isinstance(command, WithSubcommands):
            yield from commands(command.subcommands, name)


COMMANDS = dict(commands(main, "loraplex"))


def params(command: click.Command) -> list[click.Option]:
    """Return a command's options, without `--help`."""
    every = command.get_params(click.Context(command))
    return [param for param in every if isinstance(param, click.Option) and "--help" not in param.opts]


def options(command: click.Command) -> set[str]:
    named = params(command)
    return {flag for option in named for flag in (*option.opts, *option.secondary_opts)}


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_flag(name):
    assert re.search(rf"`{name}\b", REFERENCE), name
    assert options(COMMANDS[name]) <= CODE
    assert COMMANDS[name].help
    assert all(option.help for option in params(COMMANDS[name]))
    examples = (COMMANDS[name].epilog or "").splitlines()[2:]
    assert examples, "its --help shows no example"
    for line in examples:
        assert f"{name} " in f"{line} "
        flags = {word for word in line.split() if re.fullmatch(r"--[a-z-]+", word)}
        assert flags - {"--max-num-seqs"} <= options(COMMANDS[name])  # that flag is an example inside --engine-args


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_kind_of_limit(kind):
    assert re.search(rf"^\| `{kind.name}` \| ", REFERENCE, re.MULTILINE), "no row of the table of limits"
    assert f"--{kind.name.replace('_', '-')}" in CODE


def test_a_flags_default_is_its_fields():
    for name, configs in {"engine": (EngineConfig, ServerConfig), "up": (UpConfig,), "bench": (Workload,)}.items():
        shown = {p.name: p for p in COMMANDS[f"loraplex {name}"].params}
        for field in [field for config in configs for field in fields(config) if "option" in field.metadata]:
            assert field.metadata["option"].help in shown[field.name].help
            if field.default is not MISSING:
                assert shown[field.name].default == field.default, field.name
    helps = {p.name: p.help for p in COMMANDS["loraplex engine"].params}
    assert "[default: 4GiB on the CPU, 4 times --adapter-memory on a GPU]" in helps["host_adapter_memory"]
    assert "[default: 640 on the CPU, 8192 on a GPU]" in helps["max_num_batched_tokens"]


def test_a_devices_default_is_in_the_reference():
    helps = {p.name: p.help for p in COMMANDS["loraplex engine"].params}
    named = [name for name, option in config_options(EngineConfig).items() if option.by_device is not None]
    assert named
    for name in named:
        [row] = re.findall(rf"^\| `--{name.replace('_', '-')}` \|.*$", REFERENCE, re.MULTILINE)
        [default] = re.findall(r"\[default: (.*)\]$", helps[name])
        assert f"default: {default}" in row


def test_every_gpu_of_estimates():
    for name, gpu in GPUS.items():
        figures = gpu.memory >> 20, round(gpu.roofline.bandwidth / 1e9), gpu.roofline.flops / 1e12
        assert "| `{}` | {:,} | {:,} | {:,g} |".format(name, *figures) in REFERENCE


def test_every_documented_flag_exists():
    exist = set().union(*(options(command) for command in COMMANDS.values()))
    assert {word for word in CODE if word.startswith("--")} <= exist | {"--version", "--help"} | set(INSTEAD)
    assert set(INSTEAD) <= CODE - exist


def spelt(node: ast.expr, names: dict[str, str]) -> str:
    """Return the string value of a constant, an f-string or a name bound to one."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id=name):
            return names[name]
        case ast.JoinedStr(values=parts):
            return "".join(spelt(p.value if isinstance(p, ast.FormattedValue) else p, names) for p in parts)
    raise AssertionError(f"a route's path is {ast.unparse(node)}")


def routes() -> set[tuple[str, str]]:
    """Return (METHOD, path) of each route of the gateway's table, and of each `web.get(path, ...)` and
    `....router.add_get(path, ...)` in the engine's source.
    """
    found = {(route.method, route.canonical) for route in ROUTES}
    for path in sources("engine/http"):
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
    of_commands = {"LORAPLEX_GATEWAY", "LORAPLEX_API_KEY", "LORAPLEX_ENGINE_API_KEY"}
    known = {env_name(field.name) for field in fields(Settings)} | of_commands
    documented = {word for word in CODE if word.startswith("LORAPLEX_")}
    assert documented == known
    from_flags = {p.envvar for command in COMMANDS.values() for p in command.params if p.envvar}
    assert from_flags <= known


def as_written(default: Any) -> str:
    match default:
        case bool():
            return "yes" if default else "no"
        case float():
            return f"{default:g}"
        case tuple():
            return ",".join(default)
    return str(default)


def test_every_settings_default():
    defaults = {env_name(field.name): field.default for field in fields(Settings)}
    for variables, cell in re.findall(r"^\| (`LORAPLEX_.*?) \| (.*?) \| .* \|$", REFERENCE, re.MULTILINE):
        shown = [word.strip("`") for word in re.findall(r"`[^`]+`|\brequired\b|\bnone\b", cell)]
        expected = [defaults.pop(name) for name in re.findall(r"`(\w+)`", variables)]
        words = ["required" if d is MISSING else "none" if d in (None, ()) else as_written(d) for d in expected]
        assert shown == words, variables
    assert not defaults


def metric_names(registry: CollectorRegistry) -> set[str]:
    suffix = {"counter": "_total"}
    names = {metric.name + suffix.get(metric.type, "") for metric in registry.collect()}
    # The library's own, which its documentation describes.
    return {name for name in names if not name.startswith("process_")}


METRICS = metric_names(gateway.metrics.Metrics().registry) | metric_names(engine.metrics.metrics.Metrics()._registry)


def test_every_metric_and_no_other():
    assert len(METRICS) > 15
    assert {word for word in CODE if re.match(r"loraplex_(gateway|engine)_", word)} == METRICS


def test_the_readme_shows_what_make_demo_prints(capsys):
    tenants = [DemoTenant("acme", "lpx_...", ("pirate", "json")), DemoTenant("globex", "lpx_...", ("brief",))]
    Display().demo_banner("http://127.0.0.1:8080", "...", "SmolLM2-135M-Instruct", tenants)
    printed = re.sub(r"-H 'Content-Type.*", "...", capsys.readouterr().out)
    assert f"```\n{printed.strip()}\n```" in (ROOT / "README.md").read_text()


def anchors(text: str, levels: str = "1,6") -> list[str]:
    """Return the links that GitHub gives to a page's headings of these levels, in their order."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(rf"^#{{{levels}}} (.+)$", prose, re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_commands_in_the_documents_are_real(path):
    text = path.read_text()
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^):]+))?\)", text):
        linked = path.parent / target if target else path
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked.read_text()), f"{target}#{anchor}"
    for line in re.findall(r"^(?:LORAPLEX_\S+=\S+ )?(loraplex [a-z].*)$", text, re.MULTILINE):
        words = line.split()
        name = next((n for k in (4, 3, 2) if (n := " ".join(words[:k])) in COMMANDS), None)
        assert name is not None, line
        assert {w.split("=")[0] for w in words if w.startswith("--")} <= options(COMMANDS[name]) | {"--help"}, line


def test_every_page_of_measurements_has_a_table_of_figures():
    pages = {path.name: path.read_text() for path in (ROOT / "docs/perf").glob("2*.md")}
    assert [name for name, text in pages.items() if not re.search(r"^\|.*\d.*\|$", text, re.MULTILINE)] == []


def test_the_contents_of_the_reference_list_its_sections_in_order():
    contents = re.findall(r"\]\(#([^)]+)\)", REFERENCE.split("\n## ")[0])
    assert len(anchors(REFERENCE, "2")) > 5
    assert {*anchors(REFERENCE, "2,3")} <= {*contents}
    assert contents == [anchor for anchor in anchors(REFERENCE) if anchor in contents]


SECURITY = (ROOT / "docs" / "security.md").read_text()


def test_every_test_that_the_threat_model_names_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", SECURITY)
    assert len(named) > 20
    for path, name in named:
        assert re.search(rf"^(async )?def {name}\b", (ROOT / path).read_text(), re.MULTILINE), f"{path}::{name}"


def test_every_row_of_the_threat_model_says_what_shows_it():
    table = SECURITY.split("## Threats")[1].split("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 20
    for row in rows:
        assert len(row) == 5
        assert re.search(r"`tests/|attacks? `", row[4]), row


def test_every_attack_that_the_threat_model_names_exists():
    named = {
        name for group in re.findall(r"attacks? ((?:`[\w-]+`(?:, )?)+)", SECURITY) for name in group.split("`")[1::2]
    }
    assert len(named) > 20
    assert named <= set(ATTACKS)


def test_every_served_architecture():
    named = re.search(r"Served architectures: (.*?) \|", REFERENCE)
    assert named is not None
    assert set(re.findall(r"`(\w+)`", named[1])) == {*FAMILIES, *ARCHITECTURES}


def test_the_architecture_is_read_in_minutes():
    text = (ROOT / "docs/architecture.md").read_text()
    assert len([word for word in text.split() if re.search(r"\w", word)]) <= 900
    assert text.count("```") == 2, "expected one figure"


@pytest.mark.parametrize("path", sorted((ROOT / "docs/design").glob("*.md")), ids=lambda path: path.stem)
def test_every_design_page_has_a_figure_and_the_effects_of_failures(path):
    assert re.search(r"^```\n.*?[─▶].*?\n```$", path.read_text(), re.MULTILINE | re.DOTALL)
    assert re.search(r"^\| what (dies|happens) \| effect \|$", path.read_text(), re.MULTILINE)


def test_the_readme_says_what_this_is_and_shows_output_before_code():
    text = (ROOT / "README.md").read_text()
    assert text.splitlines()[2].startswith("Loraplex serves many customers' LoRA adapters on shared base models")
    output = text.split("```python")[0].split("```")[-2].strip().splitlines()
    assert len(output) >= 5


def test_contributing_adds_each_kind_of_part_in_five_lines():
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## How to add\n")[1]
    recipes = [part.splitlines() for part in section.strip().split("\n\n")]
    assert {re.match(r"\*\*An? (.*?)\.\*\*", lines[0])[1] for lines in recipes} == {
        *("limit", "route", "engine kind", "model family", "kernel backend"),
        *("quantised format", "tool-call format", "object store", "gateway setting", "scheduler policy"),
    }
    assert all(len(lines) <= 5 for lines in recipes)
    for name in re.findall(r"`([\w/]+/[\w.]+)`", section):
        assert (ROOT / name).exists(), name
