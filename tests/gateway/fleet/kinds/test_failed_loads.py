"""Adapters that a vLLM server refuses to load."""

import asyncio
from pathlib import Path

import pytest

from gateway.api.adapters.handlers import DEFAULT_MAX_RANK, engine_limits
from gateway.fleet.engines.engine import Address, EngineRecord, EngineState
from gateway.fleet.kinds.vllm import Vllm
from gateway.records.bases.base import FIRST
from testing.gateway.running import Gateway, becomes, running, settings, until
from testing.gateway.vllm_double import VllmDouble
from tests.gateway.api.adapters.test_adapters import files, push
from tests.gateway.fleet.kinds.test_vllm import adapters, billed, key_file, served
from tests.gateway.fleet.queueing.test_service_charged import record

__all__ = ["served"]

pytestmark = pytest.mark.usefixtures("quick_polls")

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


@pytest.mark.parametrize("reason", ["no space left\n" * 1000, f"greater than max_lora_rank {'9' * 5000}"])
async def test_another_failure_of_a_load_is_not_repeated_either(
    reason: str, both: tuple[Gateway, VllmDouble], caplog: pytest.LogCaptureFixture
):
    """A rank with more digits than Python parses was an internal error."""
    gateway, vllm = both
    acme = await gateway.tenant("acme")
    [name] = await adapters(acme, 1)
    vllm.fail_loads = reason
    for _ in range(2):
        got = await acme.complete(model=name)
        assert (got.status, got.error["code"]) == (502, "engine_error")
    assert len(vllm.loads) == 1
    [logged] = [each.getMessage() for each in caplog.records if "could not load adapter" in each.getMessage()]
    assert logged.isprintable()
    assert len(logged) < 1000


@pytest.mark.parametrize("both", ["?max_rank=2"], indirect=True)
async def test_a_rank_beyond_the_option_is_refused_at_upload(both: tuple[Gateway, VllmDouble]):
    gateway, _ = both
    acme = await gateway.tenant("acme")
    got = await push(acme, "pirate", files())
    assert (got.status, "rank" in got.error["message"]) == (400, True)


async def test_a_rank_is_refused_for_good_only_if_no_absent_server_may_take_it(
    tmp_path: Path, model_dir: Path, redis_url: str
):
    async with VllmDouble().serving() as narrow, VllmDouble().serving() as wide:
        narrow.fail_loads = REFUSED
        key = f"key_file={key_file(tmp_path)}"
        engines = [f"vllm+{narrow.url}?{key}", f"vllm+{wide.url}?{key}"]
        async with running(settings(tmp_path, model_dir, engines, redis_url, redis_timeout=30.0)) as gateway:
            await gateway.engines_up(2)
            acme = await gateway.tenant("acme", requests_per_minute=2)
            [name] = await adapters(acme, 1)
            wide.version = "0.20.0"
            await gateway.engines_up(1)
            for _ in range(3):
                got = await acme.complete(model=name)
                # The other server may come back, so the request is not at fault, and costs nothing.
                assert (got.status, got.error["code"]) == (503, "no_engine")
            wide.version = "0.32.0"
            await gateway.engines_up(2)
            assert (await acme.complete(model=name)).status == 200


async def test_a_refusal_that_is_known_already_is_no_success_of_the_server(
    both: tuple[Gateway, VllmDouble], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("gateway.fleet.kinds.runtime_adapters.FAILURE_SECONDS", 3600.0)
    for name in ("FIRST_PAUSE_SECONDS", "MAX_PAUSE_SECONDS"):
        monkeypatch.setattr(f"gateway.fleet.engines.breaker.{name}", 3600.0)
    gateway, vllm = both
    acme = await gateway.tenant("acme")
    [adapter] = await adapters(acme, 1)
    vllm.fail_loads = REFUSED
    assert (await acme.complete(model=adapter)).status == 400
    others = [await gateway.tenant(f"other-{number}") for number in range(3)]
    # The server is broken from now on.
    vllm.redirect = vllm.url
    for other in others:
        assert (await other.complete()).status == 502
        assert (await acme.complete(model=adapter)).status in (400, 503)
    got = await (await gateway.tenant("next")).complete()
    assert (got.status, got.error["code"]) == (503, "no_engine")


async def test_a_load_that_fails_or_is_left_is_no_service(
    both: tuple[Gateway, VllmDouble], monkeypatch: pytest.MonkeyPatch
):
    gateway, vllm = both
    acme = await gateway.tenant("acme")
    failing, slow = await adapters(acme, 2)
    expected: list[float] = []
    charges: list[float] = []
    record(monkeypatch, "expect", expected)
    record(monkeypatch, "add_service", charges)
    vllm.fail_loads = "no space left"
    assert (await acme.complete(model=failing)).status == 502
    assert (len(vllm.loads), sum(expected), charges) == (1, 0, [])
    vllm.fail_loads = None
    vllm.hold_loads.clear()
    try:
        left = asyncio.create_task(acme.complete(model=slow))
        await becomes(lambda: len(vllm.loads) == 2)
        assert sum(expected) > 0
        left.cancel()
        await becomes(lambda: sum(expected) == 0)
        assert charges == []
    finally:
        vllm.hold_loads.set()
    assert (await acme.complete(model=slow)).status == 200
    assert sum(charges) > 0


def test_a_server_that_names_no_rank_may_take_the_usual_ones_whatever_another_refuses():
    def server(max_rank: int, adapters: int = 64) -> EngineRecord:
        address = Address("http://vllm", Vllm.traits, adapters=adapters)
        return EngineRecord(address, state=EngineState(max_lora_rank=max_rank))

    def largest(*servers: EngineRecord, setting: int | None = None) -> int:
        return engine_limits(servers, setting, FIRST).max_rank

    assert largest(server(16), server(0)) == DEFAULT_MAX_RANK
    assert largest(server(16), server(128)) == 128
    assert largest(server(16)) == largest(server(16), server(0, adapters=0)) == 16
    assert largest(server(16), server(0), setting=8) == 8
    assert largest() == DEFAULT_MAX_RANK
