"""Consistency of deploy/: Prometheus, Alertmanager and Grafana use only metrics and labels that exist."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.test_docs import METRICS

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
SERVICES = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
[GROUP] = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
ALERTS = {rule["alert"]: rule for rule in GROUP["rules"]}
DASHBOARD = json.loads((DEPLOY / "grafana/loraplex.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
RUNBOOK = (ROOT / "docs/runbook.md").read_text()
REFERENCE = (ROOT / "docs/reference.md").read_text()


def asked(expression: str) -> set[str]:
    """Return our metrics in an expression."""
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"loraplex_\w+", expression)}


def test_the_dashboard_asks_for_metrics_that_exist():
    names = set().union(*(asked(target["expr"]) for panel in PANELS for target in panel["targets"]))
    assert len(names) > 8
    assert names <= METRICS


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel(panel: dict[str, Any]):
    defaults, targets = panel["fieldConfig"]["defaults"], panel["targets"]
    assert panel["description"]
    assert defaults["unit"]
    for target in targets:
        # A tenant's or model's label only with a bound on the number of lines.
        labels = set(re.findall(r"by \(([\w, ]+)\)", target["expr"]))
        if any({"tenant", "model"} & set(each.split(", ")) for each in labels):
            assert target["expr"].startswith("topk(10, ")
        # Gauges that each gateway reports about the same thing are never added up.
        assert not re.search(r"sum[^(]*\(loraplex_gateway_(engine|part)_", target["expr"])
        assert target["datasource"]["uid"] == "${datasource}"
    legends = [target["legendFormat"] for target in targets]
    assert len(legends) == len(set(legends))


def test_panels_do_not_overlap():
    cells = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert all(x < 24 for x, _ in cells)


def test_the_dashboards_variables_are_used_and_every_used_one_exists():
    names = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert names == {"datasource", "tenant", "model", "engine"}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(PANELS)))
    assert used - {"__rate_interval", "__range"} == names


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert(name: str):
    rule: dict[str, Any] = ALERTS[name]
    assert asked(rule["expr"]) <= METRICS
    assert asked(rule["expr"]) or re.search("(up|process_start_time_seconds){job=", rule["expr"])
    assert rule["labels"].keys() == {"severity", "part"}
    assert rule["labels"]["severity"] in ("critical", "warning", "info")
    # Names in the summary's braces are labels that the expression keeps.
    kept = set(re.findall(r"by \((\w+)\)", rule["expr"])) or {"instance", "job"}
    assert set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) <= kept
    assert f"\n## {name}\n" in RUNBOOK


def test_every_alert_has_a_test():
    tests = yaml.safe_load((DEPLOY / "alerts_test.yml").read_text())["tests"]
    checked = [each for test in tests for each in test["alert_rule_test"]]
    fires = {each["alertname"] for each in checked if each["exp_alerts"]}
    rests = {each["alertname"] for each in checked if not each["exp_alerts"]}
    assert fires == rests == set(ALERTS)


CHECKS = (
    ("prometheus", "promtool check rules alerts.yml"),
    ("prometheus", "promtool test rules alerts_test.yml"),
    ("prometheus", "promtool check config prometheus.yml"),
    ("prometheus-alertmanager", "amtool check-config alertmanager.yml"),
)


@pytest.mark.parametrize(("package", "command"), CHECKS, ids=[command for _, command in CHECKS])
def test_prometheus_own_tools_accept_the_files(package: str, command: str):
    tool, *arguments = command.split()
    program = shutil.which(tool)
    if program is None:
        pytest.skip(f"{tool} is not installed: `apt-get install {package}`")
    ran = subprocess.run([program, *arguments], cwd=DEPLOY, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_runbook_has_a_section_for_each_alert_and_no_other():
    assert re.findall(r"^## (\w+)$", RUNBOOK, re.MULTILINE) == list(ALERTS)
    words = set(re.findall(r"`((?:LORAPLEX_|loraplex_|--)[\w-]+)", RUNBOOK))
    assert words
    assert {word for word in words if f"`{word}`" not in REFERENCE} == set()


def test_statuses_in_expressions_are_those_that_requests_have():
    row = next(
        line for line in REFERENCE.splitlines() if line.startswith("| `loraplex_gateway_inference_requests_total`")
    )
    named = {
        each
        for expr in re.findall(r'status=~"([a-z|]+)"', (DEPLOY / "alerts.yml").read_text())
        for each in expr.split("|")
    }
    assert named
    assert named <= set(re.findall(r"`(\w+)`", row))


def test_prometheus_finds_what_compose_runs():
    prometheus = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    found = {}
    for job in prometheus["scrape_configs"]:
        [lookup] = job["dns_sd_configs"]
        found[job["job_name"]] = (lookup["names"], lookup["type"], lookup["port"])
    assert found == {
        "gateway": (["gateway"], "A", int(SERVICES["gateway"]["environment"]["LORAPLEX_METRICS_PORT"])),
        "engine": (["engine"], "A", 8000),
    }
    assert "--port=8000" in SERVICES["engine"]["command"]
    mounted = {volume.split(":")[1]: volume.split(":")[0] for volume in SERVICES["prometheus"]["volumes"]}
    for file in prometheus["rule_files"]:
        assert (ROOT / mounted[f"/etc/prometheus/{file}"]).is_file()
