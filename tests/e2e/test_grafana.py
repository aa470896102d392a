"""The Grafana dashboard over a real Prometheus: each of its queries gives data about a running stack."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from testing.ports import free_port
from testing.stack import ROOT, Stack, Tenant, children, data_dir, http

DASHBOARD = json.loads((ROOT / "deploy/grafana/loraplex.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TARGETS = {
    f"{panel['title']}, {target['legendFormat']}": target["expr"] for panel in PANELS for target in panel["targets"]
}
# Grafana's own variables, and "All" for the dashboard's.
VALUES = {"$__rate_interval": "30s", "$__range": "5m", "$tenant": ".*", "$model": ".*", "$engine": ".*"}
# Longest wait for a state of the stack.
PATIENCE_SECONDS = 60

pytestmark = pytest.mark.slow


class Prometheus:
    """A server of its own, which scrapes a stack once a second."""

    def __init__(self, folder: Path, stack: Stack) -> None:
        program = shutil.which("prometheus")
        if program is None:
            pytest.skip("prometheus is not installed: `apt-get install prometheus`")
        demo = stack.demo
        engines = http("GET", f"{demo['gateway']}/admin/api/engines", demo["admin_key"]).json["data"]
        key = {"authorization": {"credentials": demo["admin_key"]}}
        jobs = [("gateway", [demo["gateway"]], key), ("engine", [each["url"] for each in engines], {})]
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "5s"},
            "rule_files": [str(ROOT / "deploy/alerts.yml")],
            "scrape_configs": [
                {"job_name": name, "static_configs": [{"targets": [u.split("//")[1] for u in urls]}]} | more
                for name, urls, more in jobs
            ],
        }
        (folder / "prometheus.yml").write_text(json.dumps(config))
        self.url = f"http://127.0.0.1:{free_port()}"
        flags = ("--config.file=prometheus.yml", "--storage.tsdb.path=data")
        with open(folder / "prometheus.log", "w") as log:
            self.process = subprocess.Popen(
                (program, *flags, f"--web.listen-address={self.url.removeprefix('http://')}"),
                cwd=folder,
                stdout=log,
                stderr=log,
            )

    def had(self, expression: str) -> list[dict]:
        """Return the series of an expression over the last ten minutes, whether or not they have ended."""
        now = time.time()
        asked = {"query": expression, "start": now - 600, "end": now, "step": 5}
        answer = http("GET", f"{self.url}/api/v1/query_range?{urllib.parse.urlencode(asked)}")
        assert answer.status == 200, (expression, answer.body)
        return answer.json["data"]["result"]

    def query(self, expression: str) -> list[dict]:
        """Return the result of an expression. Raises AssertionError if Prometheus refuses it."""
        answer = http("GET", f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
        assert answer.status == 200, (expression, answer.body)
        return answer.json["data"]["result"]


def eventually(holds: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            if holds():
                return
        except OSError:  # Prometheus does not listen yet
            pass
        assert time.monotonic() < deadline, what
        time.sleep(0.5)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Return a Prometheus that has seen a stack with answers, streams, spending, refusals and an outage."""
    stack = Stack(data_dir(tmp_path_factory.mktemp("stack")), "--demo")
    server = None
    try:
        stack.wait_ready()
        server = Prometheus(tmp_path_factory.mktemp("prometheus"), stack)
        eventually(lambda: len(server.query("up == 1")) == 2, "both are scraped")
        _use(stack, server)
        yield server
    finally:
        if server is not None:
            server.process.terminate()
            server.process.wait(20)
        stack.stop()


def _use(stack: Stack, server: Prometheus) -> None:
    demo = stack.demo
    model = demo["base_model"]
    price = json.dumps({"input": 200_000, "output": 600_000}).encode()
    assert http("PUT", f"{demo['gateway']}/admin/api/prices/{model}", demo["admin_key"], price).status < 300
    acme = Tenant("acme", demo["tenants"][0]["api_key"], (), demo["gateway"])
    body = {"max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}]}

    def chat(**more: object) -> int:
        data = json.dumps(body | {"model": model} | more).encode()
        return http("POST", f"{demo['gateway']}/v1/chat/completions", acme.key, data).status

    # Rates need two scrapes with different values.
    for _ in range(5):
        assert chat() == chat(stream=True) == chat(model=demo["tenants"][0]["models"][0], stream=True) == 200
        assert chat(max_tokens=0) == 400
        time.sleep(1)
    patch = json.dumps({"requests_per_minute": 1, "budget_per_month": 10_000_000}).encode()
    url = f"{demo['gateway']}/admin/api/tenants/acme"
    assert http("PATCH", url, demo["admin_key"], patch).status == 200
    eventually(lambda: chat() == 429, "the limit holds")
    time.sleep(2)
    assert chat() == 429
    assert http("PATCH", url, demo["admin_key"], json.dumps({"requests_per_minute": 600}).encode()).status == 200
    [engine] = [
        pid for pid in _descendants(stack.process.pid) if b"engine" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(engine, signal.SIGSTOP)
    try:
        # A request that came earlier would wait for the engine.
        eventually(lambda: server.query("loraplex_gateway_engine_up == 0"), "the engine's silence is noticed")
        assert chat() == 503
        time.sleep(2)
        assert chat() == 503
        time.sleep(1.5)
    finally:
        os.kill(engine, signal.SIGCONT)
    eventually(lambda: chat() == 200, "the engine is back")
    eventually(lambda: server.query("loraplex_gateway_budget_used_ratio"), "budgets are looked at")


def _descendants(pid: int) -> Iterator[int]:
    for child in children(pid):
        yield child
        yield from _descendants(child)


def expression(text: str) -> str:
    for name, value in VALUES.items():
        text = text.replace(name, value)
    assert "$" not in text
    return text


@pytest.mark.parametrize("name", TARGETS)
def test_a_query_gives_data(prometheus: Prometheus, name: str):
    text = expression(TARGETS[name])
    assert prometheus.had(text), text


@pytest.mark.parametrize("variable", [each for each in DASHBOARD["templating"]["list"] if each["type"] == "query"])
def test_a_variable_has_values(prometheus: Prometheus, variable: dict):
    """`label_values(metric, label)` is Grafana's; Prometheus has the same as labels of a query's result."""
    metric, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["definition"]).groups()
    found = {series["metric"][label] for series in prometheus.query(expression(metric))}
    if variable["regex"]:
        found = {re.fullmatch(variable["regex"].strip("/").replace(r"\/", "/"), each)[1] for each in found}
    assert found
    assert all(found)
    # Each value selects data in the panels that use the variable.
    using = [text for text in TARGETS.values() if f"${variable['name']}" in text]
    assert using
    for text in using:
        values = [text.replace(f"${variable['name']}", re.escape(each).replace("\\", "\\\\")) for each in found]
        assert any(prometheus.had(expression(each)) for each in values), text


def test_annotations_are_queries(prometheus: Prometheus):
    for annotation in DASHBOARD["annotations"]["list"]:
        prometheus.query(annotation["expr"])


def test_series_of_one_panel_are_told_apart(prometheus: Prometheus):
    """No two series of a panel have the same legend."""
    for panel in PANELS:
        legends = []
        for target in panel["targets"]:
            for series in prometheus.had(expression(target["expr"])):
                labels = series["metric"]
                legends.append(re.sub(r"\{\{(\w+)\}\}", lambda m, at=labels: at.get(m[1], ""), target["legendFormat"]))
        assert len(legends) == len(set(legends)), panel["title"]
