"""The demo's two tenants and its prices, created once through the admin API; later runs find them and their keys."""

import sysconfig
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adapters.checkpoint import open_checkpoint
from loraplex.client import GatewayClient, GatewayError
from loraplex.up.datadir import DataDir, read_json, write_private_json
from wire.digests import digest_name
from wire.error_codes import TENANT_SUSPENDED

# The owner of each adapter in examples/adapters.
OWNERS = {"acme": ("pirate", "json"), "globex": ("brief",)}
# High enough for a load test on a laptop, low enough to stop a runaway script.
LIMITS: dict[str, Any] = {"requests_per_minute": 6_000, "tokens_per_minute": 2_000_000, "max_concurrent": 256}

# Prices in micro-units per million tokens, so that the demo's usage has a cost: of the base model, and of adapters.
BASE_PRICE: dict[str, Any] = {"input": 200_000, "cached": 20_000, "output": 600_000}
ADAPTER_PRICE: dict[str, Any] = {"input": 400_000, "cached": 40_000, "output": 1_200_000}


@dataclass(frozen=True)
class DemoTenant:
    name: str
    api_key: str
    models: tuple[str, ...]


def adapters_folder() -> Path:
    """Return the demo adapters' folder: examples/adapters of a checkout, or the one installed with the wheel.

    Raises FileNotFoundError naming both places.
    """
    places = (
        Path(__file__).resolve().parents[2] / "examples" / "adapters",
        Path(sysconfig.get_path("data")) / "share" / "loraplex" / "adapters",
    )
    for place in places:
        if place.is_dir():
            return place
    raise FileNotFoundError("the demo's adapters are in neither " + " nor ".join(map(str, places)))


class Made:
    """Record of the demo adapters and prices that `loraplex up --demo` has created in a database.

    Adapters and prices that the user deletes or replaces are not created again.

    made.json   {"database", "made": {tenant: {adapter: digest}}, "has_prices"}
    """

    def __init__(self, data: DataDir, database: str) -> None:
        self._path = data.root / "made.json"
        self._database = database
        stored = read_json(self._path) or {}
        is_same = stored.get("database") == database
        self._made: dict[str, dict[str, str]] = stored["made"] if is_same else {}
        self.has_prices: bool = is_same and stored.get("has_prices", False)

    def has(self, tenant: str) -> bool:
        return tenant in self._made

    def digest(self, tenant: str, adapter: str) -> str | None:
        return self._made[tenant].get(adapter)

    def note(self, tenant: str, **digests: str) -> None:
        self._made.setdefault(tenant, {}).update(digests)
        self._write()

    def note_prices(self) -> None:
        self.has_prices = True
        self._write()

    def _write(self) -> None:
        stored = {"database": self._database, "made": self._made, "has_prices": self.has_prices}
        write_private_json(self._path, stored)


async def provision(
    gateway: str, admin_key: str, base_model: str, data: DataDir, database: str
) -> Sequence[DemoTenant]:
    """Create the missing tenants, adapters and prices and write demo.json; keep an earlier run's valid keys.

    database: name of the gateway's database, without secrets. Raises GatewayError.
    """
    path = data.root / "demo.json"
    before = {tenant["name"]: tenant["api_key"] for tenant in (read_json(path) or {"tenants": []})["tenants"]}
    made = Made(data, database)
    async with GatewayClient(gateway, admin_key) as admin:
        if not made.has_prices:
            await _set_prices(admin, base_model)
            made.note_prices()
        existing = {tenant["name"] for tenant in await admin.tenants()}
        tenants = []
        for name, models in OWNERS.items():
            if name not in existing:
                if made.has(name):
                    continue
                await admin.create_tenant(name, **LIMITS)
            made.note(name)
            key = before.get(name)
            if key is None or not await _accepted(gateway, key):
                key = (await admin.create_key(name))["key"]
            await _push_new(admin, name, models, made)
            present = {adapter["name"] for adapter in await admin.adapters(name)}
            tenants.append(DemoTenant(name, key, tuple(model for model in models if model in present)))
    write_private_json(
        path,
        {
            "gateway": gateway,
            "admin_key": admin_key,
            "base_model": base_model,
            "tenants": [asdict(tenant) for tenant in tenants],
        },
    )
    return tenants


async def _set_prices(admin: GatewayClient, base_model: str) -> None:
    """Set the demo's prices, unless the user has set some."""
    if not await admin.prices():
        await admin.set_price(base_model, **BASE_PRICE)
        await admin.set_price("*", **ADAPTER_PRICE)


async def _accepted(gateway: str, key: str) -> bool:
    async with GatewayClient(gateway, key) as tenant:
        try:
            await tenant.call("GET", "/v1/models")
        except GatewayError as error:
            if error.status == 401:
                return False
            if error.code != TENANT_SUSPENDED:
                raise
    return True


async def _push_new(admin: GatewayClient, tenant: str, names: Sequence[str], made: Made) -> None:
    """Push adapters that were never pushed, and changed ones that the user has not replaced since the last push."""
    present = {adapter["name"]: adapter["digest"] for adapter in await admin.adapters(tenant)}
    for name in names:
        folder = adapters_folder() / name
        digest, before = digest_name(open_checkpoint(folder).digest), made.digest(tenant, name)
        if before is None or (before != digest and before == present.get(name)):
            await admin.push_adapter(tenant, name, folder)
            made.note(tenant, **{name: digest})
