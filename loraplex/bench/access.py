"""Answers of a server about its tenants' keys: the models of each, and at a Loraplex gateway their weights."""

import asyncio
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import quote

import aiohttp
import msgspec

from loraplex.bench.run import BenchError, Server, shown_url
from loraplex.bench.scenario import Access
from loraplex.client import reason

TIMEOUT = aiohttp.ClientTimeout(total=30)
# Maximum concurrent requests for weights.
AT_ONCE = 16
T = TypeVar("T")


class KeyRefused(BenchError):
    """The server refuses a tenant's key, or requests without one."""

    def __init__(self, text: str, tenant: str) -> None:
        super().__init__(text)
        self.tenant = tenant


class _Model(msgspec.Struct):
    id: str
    parent: Any = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Key(msgspec.Struct):
    tenant: str


class _Tenant(msgspec.Struct):
    weight: float


async def list_models(server: Server, keys: Mapping[str, str | None]) -> dict[str, Access]:
    """Return each tenant's models: its adapters, or all models if none is an adapter. keys: by tenant.

    Raises BenchError if the server does not list models, KeyRefused if it refuses a key.
    """
    first: dict[str | None, str] = {}
    for tenant, key in keys.items():
        first.setdefault(key, tenant)
    lists = await asyncio.gather(*(_get(server, "/v1/models", key, tenant, _Models) for key, tenant in first.items()))
    models = {
        key: ([model.id for model in listed.data], [model.id for model in listed.data if model.parent is not None])
        for key, listed in zip(first, lists, strict=True)
    }
    return {tenant: Access(key, *models[key]) for tenant, key in keys.items()}


async def tenants_weights(server: Server, keys: Mapping[str, str | None], admin_key: str) -> dict[str, float]:
    """Return the weight that a Loraplex gateway gives to each key's tenant. Raises BenchError."""
    free = asyncio.Semaphore(AT_ONCE)

    async def weight(tenant: str, key: str | None) -> float:
        async with free:
            own = await _get(server, "/v1/key", key, tenant, _Key)
            path = "/admin/api/tenants/" + quote(own.tenant, safe="")
            return (await _get(server, path, admin_key, tenant, _Tenant)).weight

    weights = await asyncio.gather(*(weight(tenant, key) for tenant, key in keys.items()))
    return dict(zip(keys, weights, strict=True))


async def _get(server: Server, path: str, key: str | None, tenant: str, kind: type[T]) -> T:
    """Return the answer to a GET. tenant: the scenario's, for errors. Raises BenchError, KeyRefused."""
    shown = shown_url(server.url) + path
    try:
        async with server.session.get(
            server.url + path, headers=server.headers(None, key), timeout=TIMEOUT, allow_redirects=False
        ) as response:
            body = await response.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise BenchError(f"cannot read {shown}: {reason(error)}") from error
    if response.status in (401, 403):
        asked = "the key" if key else "requests without a key (see --tenants, --api-key and key_env)"
        raise KeyRefused(f"{shown} refuses {asked}: status {response.status}", tenant)
    if response.status != 200:
        raise BenchError(f"cannot read {shown}: status {response.status}")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise BenchError(f"cannot read {shown}: not the answer of an OpenAI server") from error
