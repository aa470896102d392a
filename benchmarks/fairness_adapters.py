"""Adapters of `benchmarks.fairness`: random ones of the demo adapters' shape, uploaded through the gateway.

All have the same weights and differ in alpha, so each has a digest of its own.
"""

import asyncio
import json
from collections.abc import Mapping
from functools import cache

import aiohttp

from adapters.checkpoint import CONFIG_NAME, WEIGHTS_NAME
from adapters.manifest import BaseShape
from loraplex.models import ensure_demo_model
from testing.adapter_files import safetensors, tensors
from testing.stack import CACHE, ROOT

DEMO = ROOT / "examples" / "adapters" / "brief"
UPLOAD_SECONDS = 120.0


def push_adapters(url: str, keys: Mapping[str, str], count: int) -> None:
    """Upload `count` adapters for each tenant, and wait until they are probed. keys: by tenant.

    Raises RuntimeError if one is not ready.
    """
    asyncio.run(_push_all(url, keys, count))


async def _push_all(url: str, keys: Mapping[str, str], count: int) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=UPLOAD_SECONDS)) as session:
        for number, (tenant, key) in enumerate(keys.items()):
            for i in range(count):
                form = aiohttp.FormData({"name": f"own-{i}"})
                form.add_field(CONFIG_NAME, _config(number * count + i), filename=CONFIG_NAME)
                form.add_field(WEIGHTS_NAME, _weights(), filename=WEIGHTS_NAME)
                headers = {"Authorization": f"Bearer {key}"}
                async with session.post(f"{url}/v1/adapters", data=form, headers=headers) as response:
                    if response.status != 201:
                        text = await response.text()
                        raise RuntimeError(f"adapter {i} of {tenant}: status {response.status}, {text}")


def _config(number: int) -> bytes:
    config = json.loads((DEMO / CONFIG_NAME).read_text())
    return json.dumps(config | {"lora_alpha": config["lora_alpha"] * (1 + number / 4096)}).encode()


@cache
def _weights() -> bytes:
    """Return the weights file of random tensors for the modules of the demo adapter."""
    config = json.loads((DEMO / CONFIG_NAME).read_text())
    modules = tuple((layer, name) for layer in config["layers_to_transform"] for name in config["target_modules"])
    return safetensors(tensors(modules, config["r"], base=BaseShape.from_config_dir(ensure_demo_model(CACHE))))
