"""Names of the keys in Redis: they stay, because gateways of two releases share them, and are in one module."""

import ast
from pathlib import Path

from gateway.redis import keys

ROOT = Path(keys.__file__).resolve().parent.parent.parent
HASHED = "8d7af207c27dde8b"  # of "sqlite:///x"


def test_names_stay():
    """A name that changes loses its content when a release is replaced; `key_format.py` says how it may change."""
    constants = {name: value for name, value in vars(keys).items() if name.isupper()}
    assert constants == {
        "FORMAT_KEY": "loraplex:format",
        "ANNOUNCED_ENGINES_KEY": "loraplex:engines",
        "DRAINED_ENGINES_KEY": "loraplex:drained-engines",
        "GATEWAYS_KEY": "loraplex:gateways",
        "REGISTERED_TENANTS_KEY": "loraplex:usage:active",
        "REGISTERED_TENANTS_BEFORE_KEY": "loraplex:usage:tenants",
        "USAGE_BACKLOG_KEY": "loraplex:usage:backlog",
        "USAGE_BACKLOG_OF_TENANTS_KEY": "loraplex:usage:backlog:tenants",
        "LEASE_SWEEPER_KEY": "loraplex:sweeper",
        "USAGE_SWEEPER_KEY": "loraplex:usage:sweeper",
        "LIMITS_REMOVER_KEY": "loraplex:quota:remover",
        "HOUSEKEEPING_KEY": "loraplex:housekeeping",
        "GOLDEN_KEY": "loraplex:golden",
    }
    assert keys.quota_keys("t") == [
        f"loraplex:{{t}}:{part}" for part in ("quota", "leases", "held", "usage", "abandoned")
    ]
    assert keys.service_keys("sqlite:///x") == [
        f"loraplex:{{service:{HASHED}}}:{part}" for part in ("active", "presences", "idle", "processes", "weights")
    ]
    assert [
        keys.golden_rest_key("t"),
        keys.idempotency_key("d"),
        keys.idempotency_names_key("t"),
        keys.probe_key("t", "a", 3),
        keys.wrong_keys_key("sqlite:///x", "192.0.2.1"),
        keys.oidc_state_key("s"),
        keys.form_answers_prefix("o"),
        keys.adapter_uses_key("sqlite:///x"),
        keys.deaths_key("sqlite:///x"),
        keys.deaths_processes_key("sqlite:///x"),
        keys.kept_engine_key("sqlite:///x"),
    ] == [
        "loraplex:golden:t",
        "loraplex:idempotency:d",
        "loraplex:idempotency:of:t",
        "loraplex:probe:t:a:3",
        f"loraplex:wrong-keys:{HASHED[:8]}:192.0.2.1",
        "loraplex:oidc:s",
        "loraplex:answers:o",
        f"loraplex:adapter-uses:{HASHED}",
        f"loraplex:deaths:{HASHED}",
        f"{{loraplex:deaths:{HASHED}}}:processes",
        f"loraplex:kept:{HASHED}",
    ]


def test_no_other_module_names_a_key():
    """Names in comments and docstrings count, too: they would drift."""
    files = [path for path in (ROOT / "gateway").rglob("*.py") if path != Path(keys.__file__).resolve()]
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in files
        if "loraplex:" in path.read_text()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "loraplex:" in node.value
    ]
    # The page of the layout says how a name with a version looks.
    assert found == ["gateway/redis/key_format.py:1"]
