"""Two engines with different weights under one model name: a version runs only on the base that it was probed on."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from testing.engine import RunningServer
from testing.gateway.running import Gateway, running_alone, settings, until
from testing.gateway.upstream import TOKEN
from testing.ports import free_port
from testing.tiny import save_adapter, save_model
from tests.gateway.api.adapters.test_adapters import push

NAMES = [f"bound-{seed}" for seed in range(4)]


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    """Return two model folders of one shape and tokenizer, with different weights."""
    from safetensors.torch import load_file, save_file  # not at collection

    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        save_model(folder)
    weights = new / "model.safetensors"
    save_file({name: 1.25 * tensor for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    return old, new


@pytest.fixture
def engines(starts_servers: None) -> Iterator[ExitStack]:
    with ExitStack() as engines:
        yield engines


async def state(gateway: Gateway, url: str) -> dict[str, Any]:
    async with gateway.session.get(f"{url}/state", headers={"x-loraplex-internal-token": TOKEN}) as response:
        return await response.json()


@pytest.mark.usefixtures("takes_a_core")
async def test_a_version_never_reaches_an_engine_of_another_base(
    tmp_path: Path, models: tuple[Path, Path], engines: ExitStack, redis_url: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("gateway.fleet.routing.pinning.SECONDS", 0.1)
    store, port = tmp_path / "store", free_port()

    def start(model: Path, port: int = 0) -> RunningServer:
        return engines.enter_context(closing(RunningServer(model, store, port=port, internal_token=TOKEN)))

    old = await asyncio.to_thread(start, models[0])
    urls = [old.url, f"http://127.0.0.1:{port}"]
    of = settings(
        tmp_path, models[0], urls, redis_url, adapter_store=str(store), base_model="tiny", adapter_probe="required"
    )
    async with running_alone(of) as gateway:
        acme = await gateway.tenant("acme")
        await gateway.engines_up(1)
        for seed, name in enumerate(NAMES):
            folder = tmp_path / name
            save_adapter(folder, seed=seed)
            parts = {file.name: file.read_bytes() for file in folder.iterdir()}
            pushed = await push(acme, name, parts)
            assert (pushed.status, pushed.json["state"]) == (201, "ready"), pushed.body
        new = await asyncio.to_thread(start, models[1], port)
        await gateway.engines_up(2)
        path = f"/admin/api/tenants/acme/adapters/{NAMES[0]}/versions/1"
        assert (await gateway.admin.call("PATCH", path, json={"pinned": True})).status == 200

        async def served(model: str) -> bool:
            return (await acme.complete(model=model, max_tokens=2)).status == 200

        # Without bases, half of the adapters would go to the new engine.
        mixture = f"{NAMES[0]}*0.5+{NAMES[1]}*0.5"
        assert all(await asyncio.gather(*(served(model) for model in (*NAMES, mixture) for _ in range(3))))
        seen = await state(gateway, new.url)
        assert (seen["adapter_loads"], seen["adapters_resident"], seen["ended_requests"]) == (0, [], 0)
        assert (await state(gateway, old.url))["ended_requests"] == 15

        await asyncio.to_thread(old.close)
        for model in (*NAMES, mixture):

            async def is_refused(model: str = model) -> bool:
                answer = await acme.complete(model=model, max_tokens=2)
                return (answer.status, answer.error["code"]) == (503, "base_unavailable")

            await until(is_refused)
        assert await served("tiny"), "the new base serves its own requests"
        assert (await state(gateway, new.url))["adapter_loads"] == 0
        # A probe on the new base binds a version to it.
        assert (await acme.post(f"/v1/adapters/{NAMES[0]}/versions/1/probe")).status == 200
        assert await served(NAMES[0])
        assert not await served(NAMES[1])
