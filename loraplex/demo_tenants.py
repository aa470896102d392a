"""The demo's two tenants, made through the admin API as an operator would; a second run finds them and their keys."""

import sysconfig
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adapters.checkpoint import open_checkpoint
from loraplex.client import GatewayClient, GatewayError
from loraplex.datadir import DataDir, read_json, write_private_json

# Who owns which of examples/adapters.
OWNERS = {"acme": ("pirate", "json"), "globex": ("brief",)}
# Wide enough for a load test on a laptop, narrow enough that a runaway script meets them.
LIMITS: dict[str, Any] = {"requests_per_minute": 6_000, "tokens_per_minute": 2_000_000, "max_concurrent": 256}


@dataclass(frozen=True)
class DemoTenant:
    name: str
    api_key: str
    models: tuple[str, ...]


def adapters_folder() -> Path:
    """The demo adapters: examples/adapters of a checkout, or what the wheel installed.

    Raises FileNotFoundError naming both places.
    """
    places = (
        Path(__file__).resolve().parent.parent / "examples" / "adapters",
        Path(sysconfig.get_path("data")) / "share" / "loraplex" / "adapters",
    )
    for place in places:
        if place.is_dir():
            return place
    raise FileNotFoundError("the demo's adapters are in neither " + " nor ".join(map(str, places)))


async def provision(gateway: str, admin_key: str, base_model: str, data: DataDir) -> Sequence[DemoTenant]:
    """Makes what is missing and writes demo.json; keys of an earlier run that are still valid are kept."""
    path = data.root / "demo.json"
    before = {tenant["name"]: tenant["api_key"] for tenant in (read_json(path) or {"tenants": []})["tenants"]}
    async with GatewayClient(gateway, admin_key) as admin:
        existing = {tenant["name"] for tenant in await admin.tenants()}
        tenants = []
        for name, models in OWNERS.items():
            if name not in existing:
                await admin.create_tenant(name, **LIMITS)
            key = before.get(name)
            if key is None or not await _accepted(gateway, key):
                key = (await admin.create_key(name))["key"]
            await _push_missing(admin, name, models)
            tenants.append(DemoTenant(name, key, models))
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


async def _accepted(gateway: str, key: str) -> bool:
    async with GatewayClient(gateway, key) as tenant:
        try:
            await tenant.call("GET", "/v1/models")
        except GatewayError as error:
            if error.status == 401:
                return False
            raise
    return True


async def _push_missing(admin: GatewayClient, tenant: str, names: Sequence[str]) -> None:
    present: dict[str, Any] = {adapter["name"]: adapter.get("digest") for adapter in await admin.adapters(tenant)}
    for name in names:
        folder = adapters_folder() / name
        if present.get(name) != f"sha256:{open_checkpoint(folder).digest}":
            await admin.push_adapter(tenant, name, folder)
