"""The gateway's metrics: bounded labels, and the conventions of Prometheus on a running gateway's own output."""

import asyncio
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gateway.metric_labels import MAX_MODELS, MAX_TENANTS, OTHER
from gateway.metrics import Metrics
from gateway.usage_row import UsageRow
from testing.gateway.running import running, settings, until


def row(tenant: str = "acme", model: str = "base", version: int | None = None) -> UsageRow:
    return UsageRow(
        request_id="req_1",
        tenant_id=tenant,
        tenant=tenant,
        key_id="key",
        endpoint="chat",
        model=model,
        adapter_digest=None,
        engine=None,
        prompt_tokens=3,
        completion_tokens=4,
        cached_tokens=0,
        cost=2_500_000,
        latency_ms=100,
        ttft_ms=50,
        status="ok",
        finish_reason="stop",
        created_at=datetime.now(UTC),
        version=version,
    )


def num_series(metrics: Metrics) -> int:
    return sum(not line.startswith(b"#") for line in metrics.render().splitlines())


def test_a_request_counts_by_tenant_and_model():
    metrics = Metrics()
    for model, version in (("base", None), ("pirate@3", 3), ("pirate:prod", 2), ("pirate*0.7+json*0.3", None)):
        metrics.finished(row(model=model, version=version))
    page = metrics.render().decode()
    for model, number in (("base", 1), ("pirate", 2), ("(mixture)", 1)):
        assert f'loraplex_gateway_model_requests_total{{model="{model}",tenant="acme"}} {number}.0' in page
    assert 'loraplex_gateway_cost_total{tenant="acme"} 10.0' in page
    assert 'loraplex_gateway_tenant_time_to_first_token_seconds_bucket{le="0.1",tenant="acme"} 4.0' in page


def test_a_tenant_with_many_adapters_cannot_grow_the_number_of_series():
    metrics = Metrics()
    for number in range(MAX_MODELS + 1):
        metrics.finished(row("hostile", f"a{number}@1", 1))
    before = num_series(metrics)
    for number in range(1000):
        metrics.finished(row("hostile", f"b{number}@{number}", number))
    assert num_series(metrics) == before
    # Another tenant's models still have series of their own.
    metrics.finished(row("acme", "pirate@1", 1))
    assert 'loraplex_gateway_model_requests_total{model="pirate",tenant="acme"} 1.0' in metrics.render().decode()


def test_the_number_of_tenants_with_series_is_bounded():
    metrics = Metrics()
    for number in range(MAX_TENANTS + 1):
        metrics.finished(row(f"t{number}"))
        metrics.refused(f"t{number}", "requests")
        metrics.golden_checked(f"t{number}", 2, 1)
    before = num_series(metrics)
    for number in range(100):
        metrics.finished(row(f"late{number}", f"model{number}@1", 1))
        metrics.refused(f"late{number}", "requests")
        metrics.golden_checked(f"late{number}", 2, 1)
    assert num_series(metrics) == before
    assert (
        f'loraplex_gateway_quota_refusals_total{{limit="requests",tenant="{OTHER}"}} 101.0' in metrics.render().decode()
    )


def test_invented_methods_share_a_label():
    metrics = Metrics()
    metrics.answered("INVENTED", "unmatched", 404, 0.1)
    before = num_series(metrics)
    for number in range(100):
        metrics.answered(f"M{number}", "unmatched", 404, 0.1)
    assert num_series(metrics) == before


async def test_a_running_gateways_metrics_follow_the_conventions(tmp_path: Path, model_dir: Path, upstream, redis_url):
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed: `apt-get install prometheus`")
    async with running(settings(tmp_path, model_dir, [upstream.url], redis_url)) as gateway:
        acme = await gateway.tenant("acme", requests_per_minute=2)
        assert [(await acme.chat(stream=stream)).status for stream in (True, False, False)] == [200, 200, 429]

        async def has_disks() -> bool:
            return b'disk_free_bytes{disk="journal"}' in (await gateway.admin.get("/metrics")).body

        await until(has_disks)
        page = (await gateway.admin.get("/metrics")).body
    assert b'tenant_time_to_first_token_seconds_count{tenant="acme"} 1.0' in page
    assert b"process_start_time_seconds" in page
    command = [promtool, "check", "metrics"]
    ran = await asyncio.to_thread(subprocess.run, command, input=page, capture_output=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
