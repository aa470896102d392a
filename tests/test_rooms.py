"""Rooms of a package, its folders and single modules, have an order: imports between them go down only."""

from pathlib import Path

import pytest

from tests.test_architecture import ROOT, SOURCES, imports, is_ours

# Rooms of a package, folders and single modules, from the top floor down; a room may import those after it.
ROOMS = {
    "gateway": (
        *("serve", "app", "lifecycle", "build", "route_table", "metric_sources", "pages", "api", "alerts"),
        *("components", "resources", "workers", "settings", "setting_types", "spans"),
        *("billing", "fleet", "quota", "access"),
        *("records", "sharing", "redis", "process", "limits", "metrics", "metric_labels", "usage_row", "caller"),
        *("error_boundary", "unknown_urls", "error_codes", "errors", "setting_errors", "log_format", "sql_states"),
    ),
    "engine": (
        *("program", "http", "probing", "answering", "metrics", "core", "sizing", "engine", "build", "draft"),
        *("sizing_speed", "sizing_steps", "execution", "memory", "step_log", "model", "state", "scheduling"),
        *("structured", "sampling_defaults", "gpus", "config", "speculative_config", "progress", "errors"),
    ),
    "gateway.fleet": (
        *("dispatch", "adapter_probes", "attempt_runner", "retry_state", "client", "absence", "history"),
        *("tokenizers", "engine_tokenizer"),
        *("failures", "routing", "discovery", "kinds", "queueing", "calls", "engines"),
    ),
    "gateway.records": (
        *("maintenance", "backup", "search", "attention", "past_usage", "webhooks", "money", "keys", "adapters"),
        *("bases", "tenants", "usage", "activity", "requests", "partitions", "events", "audit", "caches", "sql"),
        *("periods", "version_state", "cursors", "unchanged", "matching", "cooperative_rows", "concurrent_reads"),
    ),
    "loraplex.commands": (
        *("chat", "bench", "adapters", "tenants", "reports", "fleet", "usage", "access", "programs"),
        *("config_options", "common", "output", "values"),
    ),
}


def room_of(path: Path, folder: Path) -> str:
    return Path(path.relative_to(folder).parts[0]).stem


@pytest.mark.parametrize("package", ROOMS)
def test_imports_between_rooms_go_down_only(package):
    """Imports for type checking count too."""
    rooms = ROOMS[package]
    folder = ROOT / package.replace(".", "/")
    sources = [path for path in SOURCES if path.is_relative_to(folder) and path != folder / "__init__.py"]
    assert {room_of(path, folder) for path in sources} == set(rooms)
    up = set()
    for path in sources:
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        below = tuple(f"{package}.{room}." for room in rooms[rooms.index(room_of(path, folder)) :])
        reached = {other for other in imports(path) if other.startswith(f"{package}.") and is_ours(other)}
        up |= {(module, other) for other in reached if not f"{other}.".startswith(below)}
    assert not up


def test_rooms_of_the_pages_stand_alone():
    """Rooms of the pages share `frame` and `widgets` and import no other room; the console is above all of them."""
    pages = ROOT / "gateway" / "pages"
    found = []
    for path in pages.rglob("*/*.py"):
        room = path.relative_to(pages).parts[0]
        allowed = {"frame": ("frame",), "widgets": ("frame", "widgets")}.get(room, ("frame", "widgets", room))
        reached = {m.split(".")[2] for m in imports(path) if m.startswith("gateway.pages.")}
        found += [f"{path.relative_to(ROOT)}: {other}" for other in reached - set(allowed) if room != "console"]
    assert not found
