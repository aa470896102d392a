"""Alerts over a whole service: each outage fires something critical, and what is no outage does not.

The series are those of a healthy service, with those of the outage changed. Only Prometheus' own rule tester evaluates.
"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
MINUTES = 60
PARTS = ("database", "redis", "redis_settings", "quota", "engines", "tokenizer", "adapter_store", "ledger", "process")
UP, DOWN, GONE = f"1x{MINUTES}", f"1x20 0x{MINUTES - 20}", "1x20"
REQUESTS = "loraplex_gateway_http_requests_total"


def healthy() -> dict[str, str]:
    """Return the series of two gateways and two engines that serve ten requests a second, by name."""
    series = {}
    for gateway in ("g1", "g2"):
        at = f'job="gateway", instance="{gateway}"'
        series |= {
            f"up{{{at}}}": UP,
            f"process_start_time_seconds{{{at}}}": f"1000x{MINUTES}",
            f"loraplex_gateway_quota_up{{{at}}}": UP,
            f"loraplex_gateway_queue_waiting{{{at}}}": f"0x{MINUTES}",
            f"loraplex_gateway_ledger_waiting_rows{{{at}}}": f"3x{MINUTES}",
            f"loraplex_gateway_ledger_journal_bytes{{{at}}}": f"0x{MINUTES}",
            f"loraplex_gateway_ledger_rejected_events{{{at}}}": f"0x{MINUTES}",
            f"loraplex_gateway_wrong_keys_total{{{at}}}": f"0x{MINUTES}",
            f'{REQUESTS}{{{at}, route="/v1/chat/completions", status="200"}}': f"0+300x{MINUTES}",
            f'loraplex_gateway_inference_requests_total{{{at}, tenant="acme", status="ok"}}': f"0+300x{MINUTES}",
            f"loraplex_gateway_time_to_first_token_seconds_count{{{at}}}": f"0+300x{MINUTES}",
        }
        for bound in ("0.5", "10", "+Inf"):
            bucket = f'loraplex_gateway_time_to_first_token_seconds_bucket{{{at}, le="{bound}"}}'
            series[bucket] = f"0+300x{MINUTES}"
        for part in PARTS:
            series[f'loraplex_gateway_part_up{{{at}, part="{part}"}}'] = UP
        for disk in ("adapter_store", "journal"):
            series[f'loraplex_gateway_disk_free_bytes{{{at}, disk="{disk}"}}'] = f"50x{MINUTES}"
            series[f'loraplex_gateway_disk_size_bytes{{{at}, disk="{disk}"}}'] = f"100x{MINUTES}"
        for engine in ("e1", "e2"):
            series[f'loraplex_gateway_engine_up{{{at}, engine="{engine}"}}'] = UP
            series[f'loraplex_gateway_engine_available{{{at}, engine="{engine}"}}'] = UP
    for engine in ("e1", "e2"):
        at = f'job="engine", instance="{engine}"'
        series |= {
            f"up{{{at}}}": UP,
            f"process_start_time_seconds{{{at}}}": f"1000x{MINUTES}",
            f"loraplex_engine_kv_blocks_used{{{at}}}": f"10x{MINUTES}",
            f"loraplex_engine_kv_blocks{{{at}}}": f"100x{MINUTES}",
            f"loraplex_engine_requests_waiting{{{at}}}": f"0x{MINUTES}",
            f"loraplex_engine_adapter_load_failures_total{{{at}}}": f"0x{MINUTES}",
        }
    return series


def without(*words: str) -> dict[str, str]:
    """Return the healthy series; those whose name has all the words end after 20 minutes."""
    return {name: GONE if all(word in name for word in words) else values for name, values in healthy().items()}


def changed(*words: str, values: str = DOWN) -> dict[str, str]:
    """Return the healthy series; those whose name has all the words have other values."""
    found = {name: values for name in healthy() if all(word in name for word in words)}
    assert found
    return healthy() | found


def quiet() -> dict[str, str]:
    """Return the series of a service that nobody uses: its counters stand still."""
    return {name: values.replace("0+300x", "300x") for name, values in healthy().items()}


def failing(status: int) -> dict[str, str]:
    """Return the series of a service of whose answers every tenth is an error."""
    series = f'{REQUESTS}{{job="gateway", instance="g1", route="/v1/chat/completions", status="{status}"}}'
    return healthy() | {series: f"0+30x{MINUTES}"}


def refused(limit: str) -> dict[str, str]:
    """Return the series of a service that refuses every request of one tenant because of a limit."""
    series = f'loraplex_gateway_quota_refusals_total{{job="gateway", instance="g1", tenant="broke", limit="{limit}"}}'
    return failing(429) | {series: f"0+600x{MINUTES}"}


OUTAGES = {
    "the database is away": changed("part_up", 'part="database"'),
    "one gateway of two does not reach the database": changed("part_up", 'part="database"', "g2"),
    "Redis is away": changed("quota_up"),
    "a gateway is down": changed("up{", "g1"),
    "no gateway is listed": without("gateway"),
    "an engine is down": changed("engine_up", "e1"),
    "no engine is available": changed("engine_available"),
    "engines are gone": without("loraplex_gateway_engine_"),
    "the ledger is full": changed("part_up", 'part="ledger"'),
    "the ledger is behind": changed("ledger_waiting_rows", values=f"3x20 9000x{MINUTES}"),
    "the adapter store is away": changed("part_up", 'part="adapter_store"'),
    "answers are 503": failing(503),
    "answers are 500": failing(500),
    "the adapter store's disk is full": changed("disk_free", "adapter_store", values=f"50x20 1x{MINUTES}"),
    "the journal's disk is full": changed("disk_free", "journal", "g2", values=f"50x20 1x{MINUTES}"),
}
NO_OUTAGES = {
    "all is well": (healthy(), {}),
    "nobody uses the service": (quiet(), {}),
    "a tenant is out of budget": (refused("budget"), {"info": 1}),
    "a tenant is beyond its rate": (refused("requests"), {"warning": 1}),
    "a process restarted once": (
        changed("process_start_time_seconds", values=f"1000x20 2000x{MINUTES}"),
        {},
    ),
}


def check(folder: Path, series: dict[str, str], expected: dict[str, int | None]) -> None:
    """Check the value of each expression over ALERTS 50 minutes after the start; None for no value."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: `apt-get install prometheus`")
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": expr,
                "eval_time": "50m",
                "exp_samples": [] if value is None else [{"labels": "{}", "value": value}],
            }
            for expr, value in expected.items()
        ],
    }
    rules = {"rule_files": [str(DEPLOY / "alerts.yml")], "evaluation_interval": "30s", "tests": [test]}
    # JSON is YAML.
    file = folder / "outage_test.yml"
    file.write_text(json.dumps(rules))
    ran = subprocess.run(
        [promtool, "test", "rules", str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def firing(severity: str) -> str:
    return f'count(ALERTS{{alertstate="firing", severity="{severity}"}})'


@pytest.mark.parametrize("name", OUTAGES)
def test_an_outage_fires_something_critical(tmp_path: Path, name: str):
    check(tmp_path, OUTAGES[name], {f"{firing('critical')} > bool 0": 1})


@pytest.mark.parametrize("name", NO_OUTAGES)
def test_no_outage_fires_nothing_critical(tmp_path: Path, name: str):
    series, alerts = NO_OUTAGES[name]
    check(tmp_path, series, {firing(severity): alerts.get(severity) for severity in ("critical", "warning", "info")})
