"""Adapters that a vLLM server refuses to load."""

import asyncio

import pytest

from testing.gateway.running import Gateway, until
from testing.gateway.vllm_double import VllmDouble
from tests.gateway.api.adapters.test_adapters import files, push
from tests.gateway.fleet.kinds.test_vllm import adapters, billed, served

__all__ = ["served"]

REFUSED = "Call to add_lora method failed: LoRA rank 4 is greater than max_lora_rank 2."


async def test_a_rank_that_the_server_refuses_is_the_requests_error_and_ends_larger_uploads(
    both: tuple[Gateway, VllmDouble],
):
    gateway, vllm = both
    acme = await gateway.tenant("acme")
    [name] = await adapters(acme, 1)
    vllm.fail_loads = REFUSED
    answers = [await acme.complete(model=name) for _ in range(3)]
    answers += await asyncio.gather(*(acme.complete(model=name) for _ in range(3)))
    for got in answers:
        assert (got.status, got.error["code"], got.error["param"]) == (400, "adapter_rank_not_served", "model")
        assert "rank is larger than 2" in got.error["message"]
    # The failed load is not repeated for each request.
    assert len(vllm.loads) == 1
    await until(lambda: billed(acme, (6, 0, 0)))

    async def is_refused() -> bool:
        got = await push(acme, "another", files(9))
        return got.status == 400 and "rank" in got.error["message"]

    await until(is_refused)


async def test_a_load_is_tried_again_after_some_time_and_a_restart_ends_the_limit(
    both: tuple[Gateway, VllmDouble], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("gateway.fleet.kinds.runtime_adapters.FAILURE_SECONDS", 0.05)
    gateway, vllm = both
    acme = await gateway.tenant("acme")
    [name] = await adapters(acme, 1)
    vllm.fail_loads = REFUSED
    assert (await acme.complete(model=name)).status == 400
    vllm.fail_loads = None

    async def is_served() -> bool:
        return (await acme.complete(model=name)).status == 200

    await until(is_served)
    vllm.version = "0.20.0"

    async def is_down() -> bool:
        return (await gateway.admin.get("/admin/api/engines")).json["data"][0]["health"] != "up"

    await until(is_down)
    vllm.version = "0.32.0"

    async def is_accepted() -> bool:
        return (await push(acme, "another", files(9))).status == 201

    await until(is_accepted)


async def test_another_failure_of_a_load_is_not_repeated_either(both: tuple[Gateway, VllmDouble]):
    gateway, vllm = both
    acme = await gateway.tenant("acme")
    [name] = await adapters(acme, 1)
    vllm.fail_loads = "no space left"
    for _ in range(2):
        got = await acme.complete(model=name)
        assert (got.status, got.error["code"]) == (502, "engine_error")
    assert len(vllm.loads) == 1


@pytest.mark.parametrize("both", ["?max_rank=2"], indirect=True)
async def test_a_rank_beyond_the_option_is_refused_at_upload(both: tuple[Gateway, VllmDouble]):
    gateway, _ = both
    acme = await gateway.tenant("acme")
    got = await push(acme, "pirate", files())
    assert (got.status, "rank" in got.error["message"]) == (400, True)
