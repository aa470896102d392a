"""The demo's tenants are created once: a user's deletions and replacements survive a restart."""

import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from loraplex.client import GatewayClient
from loraplex.up import demo_tenants
from loraplex.up.datadir import DataDir
from loraplex.up.demo_tenants import DemoTenant
from testing.adapter_files import tensors, write
from testing.gateway.running import ADMIN_KEY, BASE_MODEL, Gateway
from wire.model_names import Reference

Provision = Callable[..., Awaitable[dict[str, DemoTenant]]]


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return adapters that fit the tests' model, in place of the demo's own."""
    for seed, name in enumerate(("pirate", "json", "brief")):
        write(tmp_path / "examples" / name, tensors(seed=seed))
    monkeypatch.setattr(demo_tenants, "adapters_folder", lambda: tmp_path / "examples")
    return tmp_path / "examples"


@pytest.fixture
def provision(gateway: Gateway, examples: Path, tmp_path: Path) -> Provision:
    """Provision as `loraplex up --demo` does at each start on one data directory."""
    data = DataDir.open(tmp_path / "data")

    async def start(database: str = "local") -> dict[str, DemoTenant]:
        tenants = await demo_tenants.provision(gateway.url, ADMIN_KEY, BASE_MODEL, data, database)
        stored = json.loads((data.root / "demo.json").read_text())
        assert [tenant["name"] for tenant in stored["tenants"]] == [tenant.name for tenant in tenants]
        return {tenant.name: tenant for tenant in tenants}

    return start


async def test_a_second_start_finds_what_the_first_has_made(provision: Provision):
    first = await provision()
    assert {name: tenant.models for name, tenant in first.items()} == {"acme": ("pirate", "json"), "globex": ("brief",)}
    assert await provision() == first


async def test_what_was_deleted_stays_deleted(provision: Provision, gateway: Gateway):
    first = await provision()
    async with GatewayClient(gateway.url, ADMIN_KEY) as admin:
        assert sorted(price["model"] for price in await admin.prices()) == ["*", BASE_MODEL]
        await admin.delete_price("*")
        await admin.delete_adapter("acme", Reference("pirate"))
        await admin.delete_tenant("globex")
        second = await provision()
        assert {name: tenant.models for name, tenant in second.items()} == {"acme": ("json",)}
        assert second["acme"].api_key == first["acme"].api_key
        assert [price["model"] for price in await admin.prices()] == [BASE_MODEL]
        await admin.delete_tenant("acme")
        assert await provision() == {}
    # A new database has not had them.
    assert set(await provision("elsewhere:5432/loraplex")) == {"acme", "globex"}


async def test_a_newer_example_replaces_its_own_older_one_only(
    provision: Provision, gateway: Gateway, examples: Path, tmp_path: Path
):
    await provision()
    async with GatewayClient(gateway.url, ADMIN_KEY) as admin:
        await admin.push_adapter("acme", "pirate", write(tmp_path / "mine", tensors(seed=7)))
        mine = {row["name"]: row["digest"] for row in await admin.adapters("acme")}
        for name in ("pirate", "json"):
            shutil.rmtree(examples / name)
            write(examples / name, tensors(seed=8))
        await provision()
        after = {row["name"]: row["digest"] for row in await admin.adapters("acme")}
    assert after["pirate"] == mine["pirate"]
    assert after["json"] != mine["json"]


async def test_a_suspended_demo_tenant_is_left_as_it_is(provision: Provision, gateway: Gateway):
    first = await provision()
    async with GatewayClient(gateway.url, ADMIN_KEY) as admin:
        await admin.update_tenant("acme", suspended=True)
        assert await provision() == first
        assert (await admin.tenant("acme"))["suspended"]
