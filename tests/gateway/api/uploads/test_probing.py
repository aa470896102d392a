"""Uploads that are probed in a real engine, and in engines that die or cannot probe."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from click.testing import CliRunner

from gateway.api.adapters.probes import changes
from gateway.api.uploads import validating
from gateway.records.events.events import MAX_PER_HOUR
from gateway.records.version_state import READY
from loraplex.cli import main
from testing.adapter_files import upload_form
from testing.engine import RunningServer
from testing.gateway.running import ADMIN_KEY, BASE_MODEL, Answer, Client, Gateway, running_alone, settings, until
from testing.gateway.upstream import TOKEN, Upstream
from testing.tiny import save_adapter, save_model
from wire.probes import AdapterProbe

TENANT = "/admin/api/tenants/acme"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_model(folder)
    return folder


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def engine(tiny: Path, store: Path, starts_servers: None) -> Iterator[str]:
    with closing(RunningServer(tiny, store, internal_token=TOKEN)) as server:
        yield server.url


@pytest.fixture
async def probing(engine: str, tiny: Path, store: Path, tmp_path: Path, redis_url: str) -> AsyncIterator[Gateway]:
    of = settings(tmp_path, tiny, [engine], redis_url, adapter_store=str(store), base_model="tiny")
    async with running_alone(of) as gateway:
        yield gateway


def form(folder: Path, name: str = "pirate", seed: int = 1, b_factor: float = 1.0) -> aiohttp.FormData:
    """Return an upload of an adapter whose B is multiplied by a factor."""
    place = folder / f"{name}-{seed}-{b_factor}"
    if not place.exists():
        from safetensors.torch import load_file, save_file  # not at collection

        save_adapter(place, seed=seed)
        weights = place / "adapter_model.safetensors"
        save_file({key: w * b_factor if "lora_B" in key else w for key, w in load_file(weights).items()}, weights)
    return upload_form(place, name)


async def versions(client: Client) -> list[dict[str, Any]]:
    return (await client.get("/v1/adapters/pirate/versions")).json["data"]


async def test_a_rejection_is_an_event_by_the_check_as_by_the_probe(probing: Gateway, tmp_path: Path):
    """Only a rejection by the probe was an event. Each kind is limited in number for a tenant."""
    acme, globex = await probing.tenant("acme"), await probing.tenant("globex")
    form(tmp_path, seed=2)
    broken = tmp_path / "pirate-2-1.0"
    weights = broken / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    assert (await acme.call("POST", "/v1/adapters", data=form(tmp_path, seed=3, b_factor=0.0))).status == 400
    for _ in range(MAX_PER_HOUR + 1):
        assert (await acme.call("POST", "/v1/adapters", data=upload_form(broken, "pirate"))).status == 400
    assert (await globex.call("POST", "/v1/adapters", data=upload_form(broken, "pirate"))).status == 400
    found = (await probing.admin.get("/admin/api/events?type=adapter.rejected")).json["data"]
    assert [(each["tenant"], each["data"]) for each in found] == [
        ("globex", {"adapter": "pirate@1"}),
        *(("acme", {"adapter": f"pirate@{version}"}) for version in range(MAX_PER_HOUR, 0, -1)),
    ]


async def test_an_upload_is_ready_after_its_probe(probing: Gateway, engine: str, tmp_path: Path):
    acme, globex = await probing.tenant("acme"), await probing.tenant("globex")
    pushed = await acme.call("POST", "/v1/adapters", data=form(tmp_path))
    assert (pushed.status, pushed.json["state"]) == (201, READY)
    assert (await acme.complete(model="pirate", max_tokens=2)).status == 200

    found = (await acme.get("/v1/adapters/pirate/versions/1/probe")).json
    assert (found["rank"], found["modules"], found["reasons"]) == (4, 2, [])
    assert found["largest_difference"] > 0.01
    assert found["device_bytes"] > 0
    assert found["base"].startswith("sha256:")
    assert found["bound_to"] == found["base"]
    assert (await probing.admin.get(TENANT + "/adapters/pirate/versions/1/probe")).json == found
    for path in ("/v1/adapters/pirate/versions/1/probe", "/v1/adapters/none/versions/1/probe"):
        assert (await globex.get(path)).status == 404

    again = (await acme.post("/v1/adapters/pirate/versions/1/probe")).json
    assert again.pop("changes") == []
    assert again == {name: value for name, value in found.items() if name not in ("probed_at", "bound_to")}
    assert (await globex.post("/v1/adapters/pirate/versions/1/probe")).status == 404

    untrained = await acme.call("POST", "/v1/adapters", data=form(tmp_path, seed=2, b_factor=0.0))
    assert (untrained.status, untrained.error["code"]) == (400, "adapter_without_effect")
    assert "has not been trained" in untrained.error["message"]
    overflowing = await acme.call("POST", "/v1/adapters", data=form(tmp_path, seed=3, b_factor=5e37))
    assert (overflowing.status, overflowing.error["code"]) == (400, "adapter_not_finite")
    assert [each["state"] for each in await versions(acme)] == ["ready", "rejected", "rejected"]
    assert (await acme.get("/v1/adapters/pirate/versions/3/probe")).json["reasons"][0]["code"] == "adapter_not_finite"
    assert (await acme.complete(model="pirate", max_tokens=2)).status == 200, "latest stays at the version before"
    assert await probing.engine_faults() == []

    [base] = (await probing.admin.get("/admin/api/bases")).json["data"]
    assert {name: base[name] for name in ("name", "digest", "engines", "versions")} == {
        "name": "tiny",
        "digest": found["base"],
        "engines": [engine],
        "versions": [{"name": "acme/pirate@1", "state": "ready"}],
    }
    assert (await acme.get("/admin/api/bases")).status == 403

    await check_commands(probing, acme, base, engine)


async def check_commands(probing: Gateway, acme: Client, base: dict[str, Any], engine: str) -> None:
    """Check by the command line what the test above made: one version that is ready and a rejected one."""

    async def run(*arguments: str, code: int = 0) -> Any:
        env = {"LORAPLEX_GATEWAY": probing.url, "LORAPLEX_ADMIN_KEY": ADMIN_KEY}
        result = await asyncio.to_thread(CliRunner().invoke, main, [*arguments, "--json"], env=env)
        assert result.exit_code == code, result.output
        return json.loads(result.stdout)

    assert await run("base", "list") == [base]
    left = await run("base", "retire", base["digest"][:20], code=1)
    assert [(each["uses"], each["name"]) for each in left] == [("engine", engine), ("adapter", "acme/pirate@1")]
    for which in ("pirate@1", "--all"):
        [verified] = await run("adapter", "verify", which, "--tenant", "acme")
        assert (verified["version"], verified["changes"], verified["reasons"]) == (1, [], [])
    prompts = [{"messages": [{"role": "user", "content": "a b"}], "max_tokens": 8}, {"prompt": "b a"}]
    asked = await acme.call("PUT", "/v1/adapters/pirate/versions/1/golden", json={"prompts": prompts})
    assert asked.status == 200, asked.json
    made = asked.json["prompts"][0]["engine"]
    assert (made["kind"], made["version"], made["base"]) == ("loraplex", version("loraplex"), base["digest"])
    assert all(each["answer"] for each in asked.json["prompts"])
    checked = (await acme.post("/v1/adapters/pirate/versions/1/golden/check")).json["checks"]
    assert [(each["engine"], each["agreement"]) for each in checked] == [(made, 1.0)], "a real engine repeats itself"
    [verified] = await run("adapter", "verify", "pirate@1", "--tenant", "acme", "--engine", engine)
    assert (verified["engine"], verified["changes"], len(verified["golden"])) == (engine, [], 1)
    [refused] = await run("adapter", "verify", "pirate@3", "--tenant", "acme", code=1)
    assert refused["reasons"][0]["code"] == "adapter_not_finite"


async def test_a_version_waits_for_an_engine(
    tiny: Path, store: Path, engine: str, tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(validating, "SEARCH_SECONDS", 0.05)
    given = {"adapter_store": str(store), "base_model": "tiny", "adapter_probe": "required"}
    async with running_alone(settings(tmp_path, tiny, ["http://127.0.0.1:1"], redis_url, **given)) as gateway:
        acme = await gateway.tenant("acme")
        pushed = await acme.call("POST", "/v1/adapters", data=form(tmp_path))
        assert (pushed.status, pushed.json["state"]) == (202, "validating")
        assert (await acme.complete(model="pirate")).status == 404
        assert (await acme.get("/v1/adapters/pirate/versions/1/probe")).status == 404
        key = acme.key
    # Another gateway, because engines of the settings are fixed.
    async with running_alone(settings(tmp_path, tiny, [engine], redis_url, **given)) as gateway:
        acme = gateway.client(key)

        async def is_ready() -> bool:
            return [each["state"] for each in await versions(acme)] == [READY]

        await until(is_ready)
        assert (await acme.complete(model="pirate", max_tokens=2)).status == 200


async def test_a_waiting_version_is_ready_once_the_probe_is_off(
    tiny: Path, store: Path, tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(validating, "SEARCH_SECONDS", 0.05)
    given = {"adapter_store": str(store), "base_model": "tiny"}
    engines = ["http://127.0.0.1:1"]
    of = settings(tmp_path, tiny, engines, redis_url, adapter_probe="required", **given)
    async with running_alone(of) as gateway:
        acme = await gateway.tenant("acme")
        assert (await acme.call("POST", "/v1/adapters", data=form(tmp_path))).status == 202
        key = acme.key
    async with running_alone(settings(tmp_path, tiny, engines, redis_url, adapter_probe="off", **given)) as gateway:
        acme = gateway.client(key)

        async def is_ready() -> bool:
            return [each["state"] for each in await versions(acme)] == [READY]

        await until(is_ready)


async def test_engines_that_cannot_probe_leave_a_version_ready(serve: Any, upstream: Upstream, tmp_path: Path):
    async with serve() as gateway:
        acme = await gateway.tenant("acme")
        pushed = await acme.call("POST", "/v1/adapters", data=upload_form(tmp_path / "small"))
        assert (pushed.status, pushed.json["state"]) == (201, READY)
        assert (await acme.complete(model="pirate")).status == 200
    async with serve(adapter_probe="required") as gateway:
        acme = await gateway.tenant("umbrella")
        assert (await acme.call("POST", "/v1/adapters", data=upload_form(tmp_path / "small"))).status == 202


async def test_probes_of_some_tenants_that_wait_leave_places_to_others(serve: Any, upstream: Upstream, tmp_path: Path):
    upstream.probe_status, upstream.waiting_probes = 200, 8
    async with serve() as gateway:
        await until(lambda: _probes(gateway))

        async def push(name: str) -> Answer:
            tenant = await gateway.tenant(name)
            return await tenant.call("POST", "/v1/adapters", data=upload_form(tmp_path / "small"))

        heavy = [asyncio.create_task(push(f"heavy-{number}")) for number in range(upstream.waiting_probes)]

        async def all_wait() -> bool:
            return upstream.probed >= upstream.waiting_probes

        await until(all_wait)
        pushed = await push("acme")
        assert (pushed.status, pushed.json["state"]) == (201, READY)
        assert not any(each.done() for each in heavy)
        upstream.probes_go_on.set()
        assert [(await each).status for each in heavy] == [201] * len(heavy)


async def test_an_adapter_that_kills_engines_is_refused(
    serve: Any, upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(validating, "SEARCH_SECONDS", 0.05)
    monkeypatch.setattr(validating, "CLAIM_SECONDS", 0.05)
    # The attempts follow each other faster than two deaths of an engine, and its double keeps its instance.
    monkeypatch.setattr("gateway.fleet.failures.deaths.ONE_DEATH_SECONDS", 0.0)
    monkeypatch.setattr("gateway.fleet.failures.deaths.LATE_SECONDS", 0.0)
    upstream.probe_status = 0
    async with serve() as gateway:
        acme, globex = await gateway.tenant("acme"), await gateway.tenant("globex")
        await until(lambda: _probes(gateway))
        pushed = await acme.call("POST", "/v1/adapters", data=upload_form(tmp_path / "small"))
        assert pushed.status in (202, 400)

        async def is_rejected() -> bool:
            return [each["state"] for each in await versions(acme)] == ["rejected"]

        await until(is_rejected)
        [version] = await versions(acme)
        assert version["reasons"][0]["code"] == "adapter_probe_crashed"
        assert upstream.probed == 2
        await until(lambda: _is_up(gateway))
        assert (await globex.complete(model=BASE_MODEL)).status == 200, "no breaker is open"
        # Another tenant's equal content is probed for itself.
        upstream.probe_status = 503
        assert (
            await globex.call("POST", "/v1/adapters", data=upload_form(tmp_path / "small"), timeout=60)
        ).status == 202
        assert upstream.probed >= 3


def test_changes_of_a_probe():
    sizes = {"rank": 4, "num_modules": 2, "host_bytes": 1, "device_bytes": 2, "device_pages": 1}
    measured = {"largest_difference": 1.0, "divergence": 0.1, "base_digest": "a", "engine_version": "1"}
    before = AdapterProbe(digest="d", reasons=(), **sizes, **measured)
    assert changes(before, msgspec.structs.replace(before, divergence=0.1004)) == []
    now = msgspec.structs.replace(before, divergence=0.2, base_digest="b", largest_difference=None)
    assert [change.field for change in changes(before, now)] == ["base", "largest_difference", "divergence"]


async def _probes(gateway: Gateway) -> bool:
    engines = (await gateway.admin.get("/admin/api/engines")).json["data"]
    return all(engine["state"].get("probes") for engine in engines)


async def _is_up(gateway: Gateway) -> bool:
    return not await gateway.engine_faults()
