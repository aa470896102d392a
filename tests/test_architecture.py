"""Rules of the repository: imports go down only, the gateway is free of torch, files are small, nothing is repeated."""

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# From the top floor down; a package may import those after it. migrations belongs to the gateway.
FLOORS = ("loraplex", "migrations", "gateway", "engine", "adapters", "kernels", "wire")
ALLOWED_UP = {("gateway", "migrations")}
# The gateway runs without torch: beside its own floor it imports `wire` and the torch-free part of `adapters`.
NOT_THE_GATEWAYS = ("engine", "kernels", "adapters.tiers")
MAX_LINES = 400
# Words with which no sentence of a docstring or comment may open.
RIDDLES = {"What", "Who", "Whose", "Of", "As", "One", "Until", "For", "Whoever", "Whatever", "Nobody", "Somebody"}
RIDDLES |= {"Which", "Where", "When", "How"}
SOURCES = sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))
PYTHON = [*SOURCES, *(path for folder in ("tests", "testing", "benchmarks") for path in (ROOT / folder).rglob("*.py"))]
# By suffix; a Makefile has none.
COMMENT_MARKS = {".py": "#", ".lua": "--", ".cpp": "//", ".h": "//", ".yaml": "#", ".yml": "#", "": "#"}


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def statements(path: Path) -> tuple[ast.AST, ...]:
    """Return the file's module and every statement of it, handler of exceptions and case of a match."""
    found: list[ast.AST] = [tree(path)]
    for node in found:
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            found += getattr(node, block, ())
    return tuple(found)


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Return the full name of every module imported anywhere in the file: `from a import b` gives `a` and `a.b`."""
    found: set[str] = set()
    for node in statements(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


@functools.cache
def is_ours(module: str) -> bool:
    """Return whether the name is a module or package of this repository, not a name inside one."""
    path = ROOT / module.replace(".", "/")
    return module.split(".")[0] in FLOORS and (path.is_dir() or path.with_suffix(".py").is_file())


def test_every_floor_has_sources():
    assert {path.relative_to(ROOT).parts[0] for path in SOURCES} == set(FLOORS)


def test_imports_go_down_only():
    found = []
    for path in SOURCES:
        floor = path.relative_to(ROOT).parts[0]
        reached = {module.split(".")[0] for module in imports(path) if is_ours(module)}
        up = {f for f in reached if FLOORS.index(f) < FLOORS.index(floor) and (floor, f) not in ALLOWED_UP}
        found += [f"{path.relative_to(ROOT)}: {floor} is below {other}" for other in sorted(up)]
    assert not found


def test_the_gateway_takes_only_torch_free_modules_from_below():
    refused = tuple(f"{name}." for name in NOT_THE_GATEWAYS)
    sources = [path for path in SOURCES if path.is_relative_to(ROOT / "gateway")]
    assert sources
    assert not [
        f"{path.relative_to(ROOT)}: {module}"
        for path in sources
        for module in sorted(imports(path))
        if is_ours(module) and f"{module}.".startswith(refused)
    ]


def test_the_product_imports_only_what_is_installed():
    development = {"tests", "testing", "benchmarks", "examples"}
    assert not [path for path in SOURCES if {module.split(".")[0] for module in imports(path)} & development]


def test_the_types_of_every_folder_but_the_tests_are_checked():
    checked = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["packages"]
    folders = {path.relative_to(ROOT).parts[0] for path in ROOT.glob("[!.]*/**/*.py")}
    assert set(checked) == folders - {"tests", "build"}  # packaging copies the product into build/


@functools.cache
def modules_after(statement: str) -> frozenset[str]:
    """Return the top-level modules in memory after a fresh interpreter ran the statement."""
    script = f"{statement}\nimport sys\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return frozenset(done.stdout.split())


def test_the_gateway_never_loads_torch():
    every = "\n".join(
        f"import {'.'.join(path.relative_to(ROOT).with_suffix('').parts)}"
        for path in sorted((ROOT / "gateway").rglob("*.py"))
        if path.name != "__init__.py"
    )
    loaded = modules_after(every + "\nimport loraplex.cli")
    assert "gateway" in loaded
    assert not loaded & {"torch", "transformers", "safetensors", "numpy"}


@pytest.mark.usefixtures("takes_a_core")
def test_traces_are_loaded_only_where_they_are_asked_for():
    """The engine loads no OpenTelemetry, and the gateway no span exporter.

    redis-py loads OpenTelemetry itself where it is installed.
    """
    assert "opentelemetry" not in modules_after("import engine.program")
    modules_after("import gateway.serve, sys; assert 'wire.telemetry.otlp' not in sys.modules")


def test_a_gateway_loads_alembic_only_to_migrate():
    """Alembic takes a tenth of a gateway's start."""
    assert not modules_after("import gateway.build, gateway.serve") & {"alembic", "mako"}


def test_the_engine_needs_neither_redis_nor_a_database():
    front = modules_after("import engine.program")
    assert "torch" not in front, "beside a core in a process, the front needs neither its time nor its memory"
    loaded = front | modules_after("import engine.core.child")
    assert "torch" in loaded
    assert not loaded & {"redis", "sqlalchemy", "alembic"}


def test_the_product_needs_none_of_hugging_faces_model_packages():
    """The demo's model is converted by the engine's own reader, so the extra `demo` brings nothing more."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["demo"] == ["loraplex[engine,local]"]
    theirs = {"accelerate", "peft", "safetensors", "transformers"}
    assert not theirs & {re.split(r"[<>=]", package)[0] for package in extras["engine"]}
    assert not {path for path in SOURCES if {module.split(".")[0] for module in imports(path)} & theirs}


def test_help_is_quick():
    """The command line loads only the configuration of the engine, not the programs, because it defines the flags."""
    allowed = {"engine", "engine.config", "engine.speculative_config"}
    check = f"assert {{m for m in sys.modules if m.startswith('engine')}} <= {allowed}"
    loaded = modules_after(f"import loraplex.cli, sys; {check}")
    assert not loaded & {"torch", "aiohttp", "sqlalchemy", "redis", "gateway"}


def test_our_kernels_package_does_not_pose_as_hugging_faces():
    script = "import transformers.utils as u, kernels; print(u.is_kernels_available()); print(kernels.__file__)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    available, file = done.stdout.split()
    assert available == "False"
    assert Path(file) == ROOT / "kernels" / "__init__.py"
    assert (ROOT / "kernels" / "__init__.py").read_text() == ""


# Start of a text, sentence or paragraph.
_OPENING = r"""(?:\A|[.!?;]["')`]*\s+|\n\s*\n\s*)"""
# By rule, texts that it forbids. A sentence that opens with such a word must be read twice.
FORBIDDEN = {
    "a sentence opens with its subject or an imperative": rf"{_OPENING}(?:{'|'.join(RIDDLES)})\b(?!-)",
    "a gloss has its noun: `cost: the cost of ...`": rf"{_OPENING}`?[a-z_]\w*`?(?:, `?[a-z_]\w*`?)*: (?:of|from)\b",
    "a docstring names the errors that are raised": r"\b[Rr]aises? what\b",
}


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    for node in statements(path):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                yield node.body[0].lineno, text


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Return (number of the first line, text) of each block of full-line comments, and of each comment after code."""
    mark, block = COMMENT_MARKS[path.suffix], ""
    for number, line in enumerate([*path.read_text().splitlines(), ""], 1):
        text = line.strip()
        if text.startswith(mark):
            block += text.lstrip(mark + " ") + "\n"
            continue
        if block:
            yield number - block.count("\n"), block
            block = ""
        if f"  {mark} " in line:
            yield number, line.split(f"  {mark} ", 1)[1]


@functools.cache
def prose() -> tuple[tuple[Path, int, str], ...]:
    """Return (path, line number, text) of each docstring and comment of product, tests and benchmarks."""
    sources = [path for folder in (*FLOORS, "deploy") for path in (ROOT / folder).rglob("*")]
    every = [*PYTHON, ROOT / "Makefile", *(path for path in sources if path.is_file() and path.suffix in COMMENT_MARKS)]
    return tuple(
        (path, number, text)
        for path in dict.fromkeys(every)
        for found in ((docstrings(path), comments(path)) if path.suffix == ".py" else (comments(path),))
        for number, text in found
    )


@pytest.mark.parametrize("rule", FORBIDDEN)
def test_prose(rule):
    """Docstrings and comments follow the rule in each sentence, those of tests and benchmarks too."""
    pattern = re.compile(FORBIDDEN[rule])
    found = [
        f"{path.relative_to(ROOT)}:{number + text.count(chr(10), 0, match.end())}: {' '.join(match[0].split())}"
        for path, number, text in prose()
        for match in pattern.finditer(text)
    ]
    assert not found


def test_files_that_sources_and_design_pages_name_exist():
    """A comment or page may name a file by its last folders only."""
    pages = [ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "design").glob("*.md")]
    pages.remove(ROOT / "docs" / "lab-notes.md")  # earlier dates' files
    files = [path.relative_to(ROOT).parts for floor in FLOORS for path in (ROOT / floor).rglob("*.*")]
    files += [path.relative_to(ROOT).parts for path in PYTHON]
    ends = {"/".join(parts[start:]) for parts in files for start in range(len(parts))}
    named = {
        (str(path.relative_to(ROOT)), name)
        for path in SOURCES + pages
        for name in re.findall(r"(?<![\w/.{*}-])((?:[\w-]+/)*[\w-]+\.(?:py|lua))\b", path.read_text())
    }
    assert len(named) > 100
    of_vllm = {("docs/design/gpu.md", "core.py"), ("docs/design/gpu.md", "core_client.py")}
    assert {(path, name) for path, name in named if name not in ends} == of_vllm


def test_files_are_small():
    tests = sorted([*(ROOT / "tests").rglob("*.py"), *(ROOT / "testing").rglob("*.py")])
    long = {str(p.relative_to(ROOT)): n for p in SOURCES + tests if (n := len(p.read_text().splitlines())) > MAX_LINES}
    assert not long


MAX_FUNCTION_LINES, MAX_PARAMETERS = 60, 8


def oversized(path: Path) -> list[str]:
    """Return the file's functions over the limits: their lines and parameters, without self or cls.

    Tests and their doubles may have more parameters: a test's are its fixtures.
    """
    found = []
    is_test = path.relative_to(ROOT).parts[0] in ("tests", "testing")
    for node in statements(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            lines, count = (node.end_lineno or 0) - node.lineno + 1, len(names) - (names[:1] in (["self"], ["cls"]))
            if lines > MAX_FUNCTION_LINES or (count > MAX_PARAMETERS and not is_test):
                found.append(f"{node.name}: {lines} lines, {count} parameters")
    return found


def test_functions_are_small():
    every = [path for path in SOURCES if path.relative_to(ROOT).parts[0] not in ("kernels", "migrations")]
    every += [path for folder in ("benchmarks", "testing", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
    found = {str(path.relative_to(ROOT)): large for path in every if (large := oversized(path))}
    assert not found


# Lines of the shortest run that may stand only once.
RUN_LINES = 6
# Pairs of files that may repeat each other, with the reason. Ops repeat the signatures of their interface and their
# reference; migrations are never edited.
REPEATED = {
    ("engine/model/gemma.py", "engine/model/llama.py"): "each family owns its layers",
    ("wire/text/tokenizer.py", "wire/text/tokenizer.py"): "the parameters of encode_chat and render_chat",
}


def runs(path: Path) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield each run of RUN_LINES lines with its first line's number, without comments, imports and punctuation."""
    lines = [(number, line.strip()) for number, line in enumerate(path.read_text().splitlines(), 1)]
    lines = [
        (number, text)
        for number, text in lines
        if any(c.isalnum() for c in text) and not text.startswith(("#", "import ", "from "))
    ]
    for first in range(len(lines) - RUN_LINES + 1):
        yield tuple(text for _, text in lines[first : first + RUN_LINES]), lines[first][0]


def test_no_runs_are_repeated():
    """No six lines of the product stand in two places; kernels and migrations are exempt."""
    seen: dict[tuple[str, ...], tuple[str, int]] = {}
    found: dict[tuple[str, str], str] = {}
    for path in SOURCES:
        name = str(path.relative_to(ROOT))
        if not name.startswith(("kernels/", "migrations/")):
            for run, line in runs(path):
                first, at = seen.setdefault(run, (name, line))
                if (first, at) != (name, line):
                    found.setdefault((first, name), f"line {at} and line {line}: {run[0]}")
    assert not {pair: where for pair, where in found.items() if pair not in REPEATED}
    assert set(found) >= set(REPEATED), "a mended pair leaves the list"


def test_no_circles_of_files():
    """No file imports itself through others, imports for type checking included."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in SOURCES}
    graph = {name: {m for m in imports(path) if m in modules and m != name} for name, path in modules.items()}
    # A file without imports among the remaining files, or that none of these imports, is in no circle.
    while True:
        imported = set().union(*graph.values())
        outside = {name for name, below in graph.items() if not below or name not in imported}
        if not outside:
            break
        graph = {name: below - outside for name, below in graph.items() if name not in outside}
    assert not graph, "circles among these files"


def test_tests_are_no_package():
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_only_kernels_know_kinds_of_devices():
    """Code outside of `kernels` asks `kernels.platform` for what a device can do, never for its kind."""
    kinds = ("device.type", ".is_cuda", "torch.cuda")
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for path in SOURCES
        if not path.is_relative_to(ROOT / "kernels") and any(kind in path.read_text() for kind in kinds)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute)
        and node.attr in ("type", "is_cuda", "cuda")
        and ast.unparse(node).endswith(kinds)
    ]
    assert not found
