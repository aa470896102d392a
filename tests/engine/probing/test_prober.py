"""Probes of adapters in a running engine, beside other requests."""

import asyncio
import hashlib
import itertools
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from adapters.manifest import BaseShape
from adapters.store import DirectoryStore
from engine.answering import duty_cycle
from engine.answering.duty_cycle import DutyCycle
from engine.probing import prober
from engine.probing.base_digest import base_digest
from engine.probing.prober import MAX_OF_TENANT, NUM_PROMPTS, SHARE, Prober, compare, fixed_prompts
from testing.engine import SLOW, Client, RunningServer
from testing.tiny import save_adapter, save_model

TOKEN, TIMEOUT = "internal", 60
HEADERS = {"x-loraplex-internal-token": TOKEN, "x-loraplex-tenant": "acme"}


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    running = RunningServer(model, tmp_path_factory.mktemp("store"), internal_token=TOKEN)
    yield running
    running.close()


@pytest.fixture
def put(server: RunningServer, model: Path, tmp_path: Path):
    """Return a function that stores an adapter and returns its name for the engine."""

    def put(seed: int = 1, b_factor: float = 1.0, **config: Any) -> str:
        folder = tmp_path / f"adapter-{seed}-{b_factor}"
        save_adapter(folder, seed=seed)
        weights = folder / "adapter_model.safetensors"
        tensors = {key: value * b_factor if "lora_B" in key else value for key, value in load_file(weights).items()}
        save_file(tensors, weights)
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | config))
        store = DirectoryStore(server.store)
        return "sha256:" + store.put(folder, BaseShape.from_config_dir(model)).digest

    return put


async def test_a_usable_adapter_is_measured(client: Client, put, model: Path):
    name = put()
    found = await client.ok("/probe", {"model": name}, headers=HEADERS)
    assert (found["digest"], found["reasons"]) == (name, [])
    assert (found["rank"], found["num_modules"], found["device_pages"]) == (4, 2, 1)
    assert found["largest_difference"] > 0.01
    assert found["divergence"] > 0
    assert found["device_bytes"] > found["host_bytes"] > 0
    assert found["base_digest"] == base_digest(model)
    again = await client.ok("/probe", {"model": name}, headers=HEADERS)
    assert again == found, "the prompts are fixed"
    state = await client.state(headers=HEADERS)
    assert state["probes"]
    assert state["base_digest"] == found["base_digest"]
    assert state["ended_requests"] == 0, "a probe is not billed"


async def test_an_untrained_adapter_and_a_scale_of_zero_are_refused(client: Client, put):
    for name in (put(2, 0.0), put(3, lora_alpha=0)):
        [reason] = (await client.ok("/probe", {"model": name}, headers=HEADERS))["reasons"]
        assert reason["code"] == "adapter_without_effect"
        assert "has not been trained" in reason["message"]


async def test_a_difference_below_the_precision_is_refused(client: Client, put):
    found = await client.ok("/probe", {"model": put(4, 1e-30)}, headers=HEADERS)
    assert [reason["code"] for reason in found["reasons"]] == ["adapter_without_effect"]
    assert found["largest_difference"] == 0


async def test_weights_that_overflow_are_refused_and_disturb_nobody(client: Client, put):
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
    headers = HEADERS | {"x-loraplex-tenant": "globex"}
    alone = await client.ok("/v1/completions", body, headers=headers)
    beside = asyncio.create_task(client.ok("/v1/completions", body, headers=headers))
    found = await client.ok("/probe", {"model": put(5, 5e37)}, headers=HEADERS)
    assert found["reasons"][0]["code"] == "adapter_not_finite"
    assert "prompt 1 of 3" in found["reasons"][0]["message"]
    assert found["largest_difference"] is None
    assert (await beside)["choices"] == alone["choices"]


async def test_an_activated_adapter_is_probed_with_its_invocation(client: Client, put):
    found = await client.ok("/probe", {"model": put(6, alora_invocation_tokens=[5, 6])}, headers=HEADERS)
    assert found["reasons"] == []
    assert found["largest_difference"] > 0.01


async def test_wrong_probes(client: Client):
    status, answer = await client.post("/probe", {"model": "tiny"}, headers=HEADERS)
    assert (status, answer["error"]["param"]) == (400, "model")
    status, answer = await client.post("/probe", {"model": "sha256:" + "0" * 64}, headers=HEADERS)
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert (await client.post("/probe", {"model": "sha256:" + "0" * 64}))[0] == 401


async def test_a_tenant_has_few_probes_at_once_and_others_take_turns(
    client: Client, put, monkeypatch: pytest.MonkeyPatch
):
    name, gate, plain = put(7), threading.Event(), Prober._probe

    async def held(*given: Any) -> Any:
        assert await asyncio.to_thread(gate.wait, 60)
        return await plain(*given)

    monkeypatch.setattr(Prober, "_probe", held)
    many = [
        asyncio.create_task(client.post("/probe", {"model": name}, headers=HEADERS)) for _ in range(MAX_OF_TENANT + 4)
    ]
    try:
        # Probes beyond the limit are refused while the first ones are held.
        await client.wait_for(lambda _: sum(each.done() for each in many) == 4, headers=HEADERS)
        other = client.post("/probe", {"model": name}, headers=HEADERS | {"x-loraplex-tenant": "globex"})
        of_globex = asyncio.create_task(other)
    finally:
        gate.set()
    assert (await of_globex)[0] == 200
    statuses = sorted(status for status, _ in await asyncio.gather(*many))
    assert statuses == [200] * MAX_OF_TENANT + [429] * 4
    await client.wait_for(lambda state: state["running"] == 0, headers=HEADERS)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Return a gate that opens at the test's end, so that a failed test leaves no probe behind in the server."""
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize("number", [0, 1], ids=["load", "pass"])
async def test_a_probe_that_waits_leaves_the_turn_to_others(
    client: Client, put, monkeypatch: pytest.MonkeyPatch, gate: threading.Event, number: int
):
    """A heavy tenant's load rests, and its passes wait behind its own requests."""
    begun, plain, jobs = threading.Event(), prober._Turn.job, itertools.count()
    of_heavy, of_light = (put(seed + 10 * number) for seed in (10, 11))

    def wait() -> None:
        begun.set()
        assert gate.wait(TIMEOUT)

    @asynccontextmanager
    async def held(self: prober._Turn) -> AsyncIterator[None]:
        async with plain(self):
            if self.tenant_id == "heavy" and next(jobs) == number:
                await asyncio.to_thread(wait)
            yield

    monkeypatch.setattr(prober._Turn, "job", held)
    monkeypatch.setattr(prober, "TURN_S", 0.2)
    monkeypatch.setattr(prober, "PROBE_S", 10.0 * TIMEOUT)
    heavy, light = (HEADERS | {"x-loraplex-tenant": tenant_id} for tenant_id in ("heavy", "light"))
    waiting = asyncio.create_task(client.ok("/probe", {"model": of_heavy}, headers=heavy))
    assert await asyncio.to_thread(begun.wait, TIMEOUT)
    async with asyncio.timeout(TIMEOUT / 2):
        assert (await client.ok("/probe", {"model": of_light}, headers=light))["reasons"] == []
    assert not waiting.done()
    gate.set()
    assert (await waiting)["reasons"] == []
    assert next(jobs) == 2 + NUM_PROMPTS, "it goes on in a later turn"


async def test_a_turn_is_left_once_and_taken_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prober, "TURN_S", 0.0)
    monkeypatch.setattr("engine.answering.duty_cycle.MAX_PAUSE_S", 0.0)
    entry, lock, order = asyncio.Lock(), asyncio.Lock(), list[str]()
    duty_cycle = DutyCycle(SHARE, asyncio.Event().wait)

    def turn(tenant_id: str) -> prober._Turn:
        return prober._Turn(tenant_id, entry, lock, duty_cycle)

    async def go_on(slow: prober._Turn) -> None:
        async with slow.job():
            order.append("slow")

    async def come(tenant_id: str) -> None:
        async with turn(tenant_id):
            order.append(tenant_id)

    async with asyncio.timeout(TIMEOUT):
        async with turn("slow") as slow, slow.job():
            await asyncio.sleep(0.05)
            async with turn("next"):
                tasks = [asyncio.create_task(come(f"later-{number}")) for number in range(3)]
                await asyncio.sleep(0.05)
                tasks.append(asyncio.create_task(go_on(slow)))
                await asyncio.sleep(0.05)
                assert order == [], "the next probe has the turn"
            await tasks[-1]
        await asyncio.gather(*tasks)
    assert order == ["later-0", "slow", "later-1", "later-2"]
    assert not lock.locked()


async def test_a_turn_that_was_left_is_not_left_twice(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prober, "TURN_S", 0.0)
    monkeypatch.setattr("engine.answering.duty_cycle.MAX_PAUSE_S", 0.0)
    entry, lock = asyncio.Lock(), asyncio.Lock()
    duty_cycle = DutyCycle(SHARE, asyncio.Event().wait)
    async with asyncio.timeout(TIMEOUT):
        slow, after = (prober._Turn(tenant_id, entry, lock, duty_cycle) for tenant_id in ("slow", "after"))
        await slow.__aenter__()
        async with slow.job():
            await asyncio.sleep(0.05)
            await after.__aenter__()
        await slow.__aexit__()
        assert lock.locked(), "the other probe still has its turn"
        await after.__aexit__()
        assert not lock.locked()
        monkeypatch.setattr(prober, "TURN_S", 0.05)
        async with prober._Turn("quick", entry, lock, duty_cycle) as quick:
            with pytest.raises(ValueError, match="broken"):
                async with quick.job():
                    raise ValueError("broken")
            await asyncio.sleep(0.1)
            assert lock.locked(), "the time of a job that has ended leaves no turn"


@pytest.mark.usefixtures("slow_steps")
async def test_probes_beside_a_running_request_pause_between_them(client: Client, put, monkeypatch: pytest.MonkeyPatch):
    """A pause is nine times as long as the job before it: by a clock that moves on by a second with each reading."""
    name, limits = put(8), list[float]()

    @asynccontextmanager
    async def timeout(seconds: float) -> AsyncIterator[None]:
        """Record the longest pause, which is over at once."""
        limits.append(seconds)
        async with asyncio.timeout(0):
            yield

    # Later than the pauses of the server's probes before this test.
    clock = itertools.count(int(time.monotonic()) + 10)
    monkeypatch.setattr(duty_cycle, "time", SimpleNamespace(monotonic=clock.__next__))
    monkeypatch.setattr(duty_cycle, "asyncio", SimpleNamespace(timeout=timeout))
    monkeypatch.setattr(duty_cycle, "MAX_PAUSE_S", 3600.0)
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 3500, "ignore_eos": True} | SLOW
    running = asyncio.create_task(client.ok("/v1/completions", body, headers=HEADERS | {"x-loraplex-tenant": "globex"}))
    await client.wait_for(lambda state: state["running"] == 1, headers=HEADERS)
    for tenant_id in ("acme", "initech"):
        await client.ok("/probe", {"model": name}, headers=HEADERS | {"x-loraplex-tenant": tenant_id})
    # The load, the first pass, and one for each prompt. A second of the pause is over when it is waited for.
    assert len(limits) == 2 * (2 + NUM_PROMPTS)
    assert limits[1:] == pytest.approx([1 / SHARE - 1 - 1] * (len(limits) - 1)), "tenants share the pauses"
    running.cancel()
    await client.wait_for(lambda state: state["running"] == 0, headers=HEADERS)


@pytest.mark.usefixtures("slow_steps")
async def test_a_probe_pauses_after_each_of_its_passes(
    server: RunningServer, model: Path, put, monkeypatch: pytest.MonkeyPatch
):
    """A request beside it is delayed by one pass, not by all of them."""
    monkeypatch.setattr("engine.probing.prober.SHARE", 1e-9)
    monkeypatch.setattr("engine.answering.duty_cycle.MAX_PAUSE_S", 36_000.0)
    name = put(9)
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 3500, "ignore_eos": True} | SLOW
    with closing(RunningServer(model, server.store, internal_token=TOKEN)) as other:
        async with aiohttp.ClientSession() as session:
            client = Client(session, other.url)
            running = asyncio.create_task(client.ok("/v1/completions", body, headers=HEADERS))
            await client.wait_for(lambda state: state["running"] == 1, headers=HEADERS)
            monkeypatch.setattr("engine.probing.prober.PROBE_S", 600.0)
            probing = asyncio.create_task(client.ok("/probe", {"model": name}, headers=HEADERS))
            for _ in range(20):
                is_probed = probing.done()
                assert (await client.state(headers=HEADERS))["running"], "the request outlasts the checks"
                assert not is_probed
            running.cancel()
            assert (await probing)["reasons"] == []


def test_prompts_are_valid_for_any_vocabulary():
    for vocab_size in (1, 2, 300, 151_936):
        assert all(0 <= token < vocab_size for prompt in fixed_prompts(vocab_size) for token in prompt)
    assert len({token for prompt in fixed_prompts(300) for token in prompt}) == 12


def test_differences_of_logits():
    row = np.array([1.0, 2.0, 3.0])
    assert compare(row, row).largest == 0
    assert compare(row, row + 5).divergence == pytest.approx(0, abs=1e-12)
    assert compare(row, row * 2).divergence > 0.01
    assert compare(row, np.array([1.0, float("inf"), 0])).largest is None


def test_a_base_is_known_by_its_weights_and_not_by_its_folder(model: Path, tmp_path: Path):
    for name in ("same", "renamed", "retrained"):
        save_model(tmp_path / name)
    config = tmp_path / "renamed" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"transformers_version": "0.1"}, indent=7))
    weights = tmp_path / "retrained" / "model.safetensors"
    save_file({key: value + 1e-3 for key, value in load_file(weights).items()}, weights, {"format": "pt"})
    assert base_digest(tmp_path / "same") == base_digest(tmp_path / "renamed")
    assert base_digest(tmp_path / "same") != base_digest(tmp_path / "retrained")
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    assert base_digest(file) != base_digest(tmp_path / "same")
    assert len(base_digest(file)) == hashlib.sha256().digest_size * 2
