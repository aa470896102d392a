"""Every module of benchmarks/ imports, so that none breaks unseen when what it uses is renamed."""

import json
import re
import subprocess
import sys
from pathlib import Path

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


def test_every_benchmarks_module_imports():
    """Import all in one process. A module that needs an optional package may fail for lack of it only."""
    assert MODULES
    command = [sys.executable, "-c", IMPORT_ALL, *MODULES]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    failed = json.loads(done.stdout.splitlines()[-1])
    traces = [
        f"{name}:\n{trace}"
        for name, (missing, trace) in failed.items()
        if missing is None or missing.partition(".")[0] not in OPTIONAL
    ]
    assert not traces, "\n".join(traces)


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
