"""Prometheus metrics of an engine that no other test covers."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.metrics.metrics import Metrics
from engine.scheduling.policies.tenants import FairShareSnapshot
from engine.speculative_config import SpeculativeConfig
from testing.engine import SLOW, Client, RunningServer
from testing.tiny import save_adapter

ENDLESS = {"model": "tiny", "prompt": "Hi", "max_tokens": 4000, "ignore_eos": True} | SLOW


TOKEN = "internal"
TENANTS, SEATS, SHOWN = 25, 8, 20
FIELDS = ("counter", "waiting", "oldest_wait", "share", "entitled", "goodput")


async def reading(client: Client, name: str) -> float:
    """Return a metric's value, 0 if it was never counted."""
    async with client.session.get(f"{client.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith(name + " ")), 0.0)


async def test_refused_loads_by_path_are_counted(client: Client, tmp_path: Path):
    failures = "loraplex_engine_adapter_load_failures_total"
    save_adapter(tmp_path / "wide", rank=32)
    for path in ("nowhere", "wide"):
        before = await reading(client, failures)
        load = {"lora_name": "mine", "lora_path": str(tmp_path / path)}
        assert (await client.post("/v1/load_lora_adapter", load))[0] in (400, 404)
        assert await reading(client, failures) == before + 1


@pytest.mark.usefixtures("slow_steps")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_is_an_abort(client: Client, stream: bool):
    ended = 'loraplex_engine_requests_finished_total{finish_reason="abort"}'
    before = await reading(client, ended)
    asking = asyncio.create_task(
        client.session.post(f"{client.url}/v1/completions", data=json.dumps(ENDLESS | {"stream": stream}))
    )
    await client.wait_for(lambda state: state["running"] > 0)
    if stream:
        (await asking).close()
    else:
        asking.cancel()
    deadline = time.monotonic() + 60
    while await reading(client, ended) != before + 1:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_an_answer_that_a_stop_string_ends_is_counted_once(client: Client):
    ended = "loraplex_engine_requests_finished_total"
    asked = {"prompt": "The quick", "max_tokens": 12, "ignore_eos": True}
    text = (await client.complete(**asked))["choices"][0]["text"]
    reasons = ("stop", "length", "abort", "error")
    before = [await reading(client, f'{ended}{{finish_reason="{reason}"}}') for reason in reasons]
    await client.complete(**asked, stop=text[2:4])
    after = [await reading(client, f'{ended}{{finish_reason="{reason}"}}') for reason in reasons]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 0, 0, 0]


async def test_adapters_that_cannot_be_loaded_are_counted(
    client: Client, session: aiohttp.ClientSession, server: RunningServer
):
    async def failures() -> float:
        async with session.get(f"{server.url}/metrics") as response:
            page = await response.text()
        [line] = [line for line in page.splitlines() if line.startswith("loraplex_engine_adapter_load_failures_total ")]
        return float(line.split()[1])

    before = await failures()
    status, _ = await client.post("/v1/completions", {"model": f"sha256:{'0' * 64}", "prompt": "Hi"})
    assert status == 404
    assert await failures() == before + 1
    await client.complete(prompt="Hi", max_tokens=1)
    assert await failures() == before + 1


async def test_vllms_names_on_request(model: Path, tmp_path: Path, session: aiohttp.ClientSession):
    """Read as llm-d's router does: by name, the newest series of the adapters, numbers in labels."""
    save_adapter(tmp_path / "mine")
    server = await asyncio.to_thread(RunningServer, model, None, {}, metrics_names="vllm")
    try:
        client = Client(session, server.url)
        load = {"lora_name": "mine", "lora_path": str(tmp_path / "mine")}
        assert (await client.post("/v1/load_lora_adapter", load))[0] == 200
        await client.complete(model="mine", prompt="Hi", max_tokens=1)
        async with session.get(f"{server.url}/metrics") as response:
            page = await response.text()
    finally:
        await asyncio.to_thread(server.close)
    families = {each.name: each.samples for each in text_string_to_metric_families(page)}
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        [sample] = families[f"vllm:{name}"]
        assert (sample.labels["engine"], 0 <= sample.value <= 1) == ("0", True)
    [adapters] = families["vllm:lora_requests_info"]
    digest, given = adapters.labels["running_lora_adapters"].split(",")[::-1]
    assert (digest.startswith("sha256:"), given) == (True, "mine")
    assert int(adapters.labels["max_lora"]) > 1
    assert abs(adapters.value - time.time()) < 60
    [cache] = families["vllm:cache_config_info"]
    assert (cache.labels["block_size"], int(cache.labels["num_gpu_blocks"]) > 0) == ("16", True)


@pytest.mark.parametrize("drafts", [False, True])
async def test_steps_are_counted_by_what_became_of_drafts(model: Path, session: aiohttp.ClientSession, drafts: bool):
    config = {"speculative_config": SpeculativeConfig("ngram", 3)} if drafts else None
    server = await asyncio.to_thread(RunningServer, model, None, config)
    try:
        client = Client(session, server.url)
        await client.complete(prompt="Hi", max_tokens=8, ignore_eos=True)
        async with session.get(f"{server.url}/metrics") as response:
            page = await response.text()
    finally:
        await asyncio.to_thread(server.close)
    families = {each.name: each.samples for each in text_string_to_metric_families(page)}
    samples = [each for each in families["loraplex_engine_draft_steps"] if each.name.endswith("_total")]
    drafted = sum(each.value for each in families["loraplex_engine_draft_tokens"] if each.name.endswith("_total"))
    counted = {each.labels["outcome"]: each.value for each in samples}
    assert bool(counted) == drafts
    if drafts:
        assert counted["measuring"] >= 1, "the first step with decodes"
        assert bool(drafted) == ("drafted" in counted)
        assert drafted or sum(counted.values()) == 7


def by_tenant(page: str) -> dict[str, dict[str, float]]:
    """Return the values of the gauges with a tenant's label, by gauge and tenant."""
    families = {each.name: each.samples for each in text_string_to_metric_families(page)}
    samples = {name: families[f"loraplex_engine_tenant_{name}"] for name in FIELDS}
    return {name: {each.labels["tenant"]: each.value for each in found} for name, found in samples.items()}


def test_each_gauge_of_a_tenant_has_its_own_value_and_only_shown_tenants_have_one():
    metrics = Metrics()
    acme = FairShareSnapshot("acme", 2.0, 30.5, 3, 4, 5.25, 0.625, 0.75, 0.875)
    metrics.show_tenants([acme, FairShareSnapshot("globex", 1.0, 0.0, 0, 0, 0.0, 0.0, 0.0, None)])
    assert by_tenant(metrics.render().decode()) == {
        "counter": {"acme": 30.5, "globex": 0},
        "waiting": {"acme": 4, "globex": 0},
        "oldest_wait": {"acme": 5.25, "globex": 0},
        "share": {"acme": 0.625, "globex": 0},
        "entitled": {"acme": 0.75, "globex": 0},
        "goodput": {"acme": 0.875},
    }
    metrics.show_tenants([FairShareSnapshot("initech", 1.0, 1.0, 1, 0, 0.0, 1.0, 1.0, 0.0)])
    shown = by_tenant(metrics.render().decode())
    assert shown == {name: {"initech": float(name in ("counter", "share", "entitled"))} for name in FIELDS}


def waiting_in(state: dict[str, Any]) -> int:
    """Return the requests that wait in the scheduler. `waiting` counts those too that it does not have yet."""
    return sum(share["waiting"] for share in state["tenants"])


@pytest.mark.usefixtures("slow_steps")
async def test_at_most_twenty_tenants_are_shown(model: Path, session: aiohttp.ClientSession):
    """The 25 tenants have a request each in eight seats, and two of them have two more: one request of `met` has its
    first token in time, one of `missed` cannot. Those that wait are shown first.
    """
    server = await asyncio.to_thread(RunningServer, model, internal_token=TOKEN)
    token, began = {"x-loraplex-internal-token": TOKEN}, time.monotonic()
    client, asked = Client(session, server.url), list[asyncio.Task[aiohttp.ClientResponse]]()

    def ask(tenant: str, **fields: float) -> None:
        headers = token | {"x-loraplex-tenant": tenant, "x-loraplex-weight": "2" if tenant == "met" else "1"}
        body = json.dumps(ENDLESS | {"stream": True} | fields)
        asked.append(asyncio.create_task(session.post(f"{server.url}/v1/completions", data=body, headers=headers)))

    try:
        for tenant, target in (("met", 3600), ("missed", 1e-6)):
            ask(tenant, ttft_target=target)
            await (await asked[-1]).content.readline()
        # The seats are taken before the requests come that are to wait.
        for number in range(TENANTS - 2):
            ask(f"tenant-{number}")
        await client.wait_for(lambda state: waiting_in(state) == TENANTS - SEATS, headers=token)
        for tenant in ("met", "missed") * 2:
            ask(tenant)
        num_waiting = len(asked) - SEATS
        state = await client.wait_for(lambda state: waiting_in(state) == num_waiting, headers=token)
        async with session.get(f"{server.url}/metrics") as response:
            page = await response.text()
        elapsed = time.monotonic() - began
    finally:
        for task in asked:
            task.cancel()
        for response in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(response, aiohttp.ClientResponse):
                response.close()
        await asyncio.to_thread(server.close)

    for name in ("met", "missed"):
        assert f"\nloraplex_engine_ttft_target_{name}_total 1.0\n" in page
    gauges = by_tenant(page)
    for name in FIELDS[:-1]:
        assert len(gauges[name]) == SHOWN
    assert gauges["goodput"] == {"met": 1, "missed": 0}
    assert sum(gauges["waiting"].values()) == num_waiting
    assert min(gauges["waiting"][name] for name in ("met", "missed")) > 0
    for tenant, wait in gauges["oldest_wait"].items():
        assert 0 < wait < elapsed if gauges["waiting"][tenant] else wait == 0
    assert gauges["entitled"] == pytest.approx({name: (1 + (name == "met")) / 26 for name in gauges["entitled"]})
    assert 0 < sum(gauges["share"].values()) <= 1 + 1e-9
    assert all(gauges["counter"][tenant] > 0 for tenant, share in gauges["share"].items() if share > 0)

    shares = state["tenants"]
    assert len({share["tenant"] for share in shares}) == len(shares) == SHOWN
    assert sum(share["waiting"] for share in shares) == num_waiting
    assert {"met", "missed"} < {share["tenant"] for share in shares}
    assert {share["tenant"]: share["entitled"] for share in shares} == pytest.approx(
        {share["tenant"]: share["weight"] / 26 for share in shares}
    )
