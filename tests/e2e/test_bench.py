"""`loraplex bench --scenario` on the real stack: two tenants through the gateway, with a baseline."""

import json

from testing.stack import Stack, loraplex

SCENARIO = """\
name = "small"
warmup = 1
[baseline]
without = ["globex"]
[[tenants]]
name = "acme"
arrival = {kind = "even", rate = 1}
requests = 3
input = {kind = "fixed", tokens = 8}
output = {kind = "fixed", tokens = 4}
[[tenants]]
name = "globex"
weight = 2
arrival = {kind = "closed", concurrency = 2}
requests = 5
input = {kind = "fixed", tokens = 8}
output = {kind = "fixed", tokens = 4}
"""


def test_a_scenario_on_the_real_stack(stack: Stack, tmp_path):
    (tmp_path / "s.toml").write_text(SCENARIO)
    out, page = tmp_path / "report.json", tmp_path / "report.html"
    flags = ("--scenario", tmp_path / "s.toml", "--tenants", stack.data / "demo.json", "--json", out, "--html", page)
    done = loraplex("bench", *map(str, flags), "--no-overhead", timeout=150)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    [run] = report["runs"]
    assert run["tenants"]["acme"]["completed"] == 3
    assert run["tenants"]["globex"]["completed"] == 5
    assert run["all"]["errors"] == {}
    assert run["all"]["counts"]["without_usage"] == run["all"]["counts"]["shorter"] == 0
    assert report["isolation"]["acme"]["ratio"] > 0
    # The demo's tenants have equal weights.
    assert report["server_weights"] == {"acme": 1, "globex": 1}
    assert [text for text in report["warnings"] if text.endswith("tenants: acme 1 (server: 1), globex 2 (server: 1)")]
    shown = out.read_text() + page.read_text() + done.stdout + done.stderr
    assert not [tenant["name"] for tenant in stack.demo["tenants"] if tenant["api_key"] in shown]
