"""Every module of benchmarks/ imports, so that none breaks unseen when what it uses is renamed."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.dashboard_pages import CONSOLE_PAGES, NO_PAGE, PAGES, pages_of
from gateway.route_table import ROUTES

ROOT = Path(__file__).parents[1]
MODULES = sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "benchmarks").rglob("*.py"))
# Packages that benchmarks may need beyond the development environment's.
OPTIONAL = {"llama_cpp"}
IMPORT_ALL = """
import importlib, json, sys, traceback
failed = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as error:
        failed[name] = [getattr(error, "name", None), traceback.format_exc()]
print(json.dumps(failed))
"""


@pytest.fixture(scope="module")
def failures():
    """Return the missing module, if it is that, and the traceback of each module that one process cannot import."""
    command = [sys.executable, "-c", IMPORT_ALL, *MODULES]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", MODULES)
def test_a_benchmarks_module_imports(name, failures):
    missing, trace = failures.get(name, (None, None))
    if missing is not None and missing.partition(".")[0] in OPTIONAL:
        pytest.skip(f"needs {missing}, which is not installed")
    assert trace is None, trace


def test_every_page_of_the_table_of_routes_is_measured():
    paths = [path.partition("?")[0] for path in (*pages_of("/admin", PAGES), *pages_of("/console", CONSOLE_PAGES))]
    pages = [route.path for route in ROUTES if route.method == "GET" and route.scope == "page"]
    left = [
        page
        for page in pages
        if not NO_PAGE.search(page) and not any(re.fullmatch(re.sub(r"{[^}]*}", "[^/]+", page), path) for path in paths)
    ]
    assert len(pages) > 50
    assert left == []
