"""Models that a server lists for each tenant's key."""

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from loraplex.bench.run import BenchError, Server, shown_url
from loraplex.bench.scenario import Access

TIMEOUT = aiohttp.ClientTimeout(total=30)


async def list_models(server: Server, keys: Mapping[str, str | None]) -> dict[str, Access]:
    """Return each tenant's models: its adapters, or all models if none is an adapter. keys: by tenant.

    Raises BenchError if the server does not list models.
    """
    distinct = list(dict.fromkeys(keys.values()))
    lists = dict(zip(distinct, await asyncio.gather(*(_listed(server, key) for key in distinct)), strict=True))
    return {name: Access(key, *lists[key]) for name, key in keys.items()}


async def _listed(server: Server, key: str | None) -> tuple[list[str], list[str]]:
    """Return the names of all models, and of the adapters: the models with a `parent`. Raises BenchError."""
    url, shown = server.url + "/v1/models", shown_url(server.url) + "/v1/models"
    try:
        async with server.session.get(
            url, headers=server.headers(None, key), timeout=TIMEOUT, allow_redirects=False
        ) as response:
            body = await response.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise BenchError(f"cannot list the models of {shown}: {error or type(error).__name__}") from error
    if response.status != 200:
        raise BenchError(f"cannot list the models of {shown}: status {response.status}")
    try:
        models: list[dict[str, Any]] = msgspec.json.decode(body)["data"]
        return [model["id"] for model in models], [model["id"] for model in models if model.get("parent") is not None]
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
        raise BenchError(f"cannot list the models of {shown}: not an OpenAI server's answer") from error
