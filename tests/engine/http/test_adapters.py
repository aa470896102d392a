"""Adapters by name and by digest: loading, replacement, unloading, and every refusal."""

import asyncio
import errno
import json
import os
import random
import re
import shutil
import threading
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from adapters.checkpoint import AdapterCheckpoint
from adapters.manifest import BaseShape
from adapters.store import DirectoryStore
from adapters.tiers.adapter_reader import AdapterReader
from adapters.tiers.device_pool import Residency
from testing.engine import SLOW, Client, RunningServer
from testing.tiny import save_adapter

FIELDS = {"prompt": "The quick brown fox", "max_tokens": 12, "ignore_eos": True}


async def names(client: Client) -> list[str]:
    return [model["id"] for model in (await client.get("/v1/models"))[1]["data"]]


async def said(client: Client, model: str) -> str:
    answer = await client.complete(**FIELDS, model=model)
    assert answer["model"] == model
    return answer["choices"][0]["text"]


async def test_a_loaded_name_answers_differently_until_it_is_unloaded(client, adapter):
    assert await names(client) == ["tiny"]
    loaded = await client.ok("/v1/load_lora_adapter", {"lora_name": "mine", "lora_path": str(adapter)})
    assert loaded["lora_name"] == "mine"
    assert await client.ok("/v1/load_lora_adapter", {"lora_name": "mine", "lora_path": str(adapter)}) == loaded
    models = (await client.get("/v1/models"))[1]["data"]
    assert [(m["id"], m["parent"]) for m in models] == [("tiny", None), ("mine", "tiny")]
    assert models[1]["root"] == loaded["digest"]
    assert models[1]["created"] >= models[0]["created"]
    assert await said(client, "mine") != await said(client, "tiny")
    assert await said(client, loaded["digest"]) == await said(client, "mine")
    assert (await client.state())["adapters_resident"] == [loaded["digest"].removeprefix("sha256:")]

    await client.ok("/v1/unload_lora_adapter", {"lora_name": "mine"})
    assert await names(client) == ["tiny"]
    assert (await client.state())["adapters_resident"] == []
    for model in ("mine", loaded["digest"]):
        status, answer = await client.post("/v1/completions", FIELDS | {"model": model})
        assert (status, answer["error"]["code"]) == (404, "model_not_found")


@pytest.mark.usefixtures("slow_steps")
async def test_requests_in_flight_and_in_the_queue_end_with_the_adapter_they_began_with(
    session, model, adapter, tmp_path
):
    save_adapter(tmp_path / "other", seed=9)
    running = RunningServer(model, config={"max_num_seqs": 1})
    try:
        client = Client(session, running.url)
        load = {"lora_name": "mine", "lora_path": str(adapter)}
        digest = (await client.ok("/v1/load_lora_adapter", load))["digest"]
        expected = await said(client, "mine")
        for change in ("unload_lora_adapter", "load_lora_adapter"):
            await client.ok("/v1/load_lora_adapter", load)
            # The only seat is taken for the whole test.
            long = {"model": "tiny", "prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True} | SLOW
            async with session.post(running.url + "/v1/completions", json=long) as stream:
                await stream.content.readany()
                answered = asyncio.gather(*(said(client, "mine") for _ in range(3)))
                await client.wait_for(lambda state: state["waiting"] == 3)
                body = {"lora_name": "mine", "lora_path": str(tmp_path / "other"), "load_inplace": True}
                await client.ok(f"/v1/{change}", body)
                stream.close()
            assert await answered == [expected] * 3
            if change == "unload_lora_adapter":
                assert await names(client) == ["tiny"]
            else:
                assert await said(client, "mine") != expected
            # After the last use, the adapter is removed.
            await client.wait_for(lambda state: digest.removeprefix("sha256:") not in state["adapters_resident"])
            status, _ = await client.post("/v1/completions", FIELDS | {"model": digest})
            assert status == 404
    finally:
        running.close()


async def test_names_that_change_under_load_harm_no_request_and_leave_nothing_behind(session, model, tmp_path):
    for i in range(4):
        save_adapter(tmp_path / str(i), rank=(4, 8, 16, 8)[i], seed=i)
    # Room for some of them, on the device and on the host.
    running = RunningServer(model, config={"adapter_memory": 1 << 20, "host_adapter_memory": 400_000})
    rng = random.Random(0)
    client = Client(session, running.url)

    async def change_names() -> None:
        for _ in range(40):
            name = {"lora_name": rng.choice("xyz")}
            path = str(tmp_path / str(rng.randrange(4)))
            if rng.random() < 0.5:
                status, answer = await client.post("/v1/unload_lora_adapter", name)
                assert status in (200, 404), answer
            else:
                body = name | {"lora_path": path, "load_inplace": rng.random() < 0.5}
                status, answer = await client.post("/v1/load_lora_adapter", body)
                assert status == 200 or answer["error"]["param"] == "lora_name", answer

    async def ask() -> None:
        for _ in range(20):
            body = {
                "prompt": "hello " * rng.randrange(1, 20),
                "max_tokens": rng.randrange(1, 30),
                "n": rng.choice((1, 2)),
            }
            status, answer = await client.post("/v1/completions", body | {"model": rng.choice(["tiny", *"xyz"])})
            assert status == 200 or answer["error"]["code"] == "model_not_found", answer

    try:
        await asyncio.gather(*(change_names() for _ in range(3)), *(ask() for _ in range(10)))
        for name in "xyz":
            await client.post("/v1/unload_lora_adapter", {"lora_name": name})
        state = await client.wait_for(lambda state: not state["running"] and not state["adapters_resident"])
        assert state["kv_blocks_free"] == state["kv_blocks_total"]
        assert state["adapter_pages_free"] == state["adapter_pages_total"]
        await client.wait_for(lambda _: running.core.host_cache.stats().num_bytes == 0)
    finally:
        running.close()


async def test_one_model_by_its_name(client, adapter):
    await client.ok("/v1/load_lora_adapter", {"lora_name": "team/mine", "lora_path": str(adapter)})
    listed = (await client.get("/v1/models"))[1]["data"]
    for model in listed:
        assert await client.get(f"/v1/models/{model['id']}") == (200, model)
    status, answer = await client.get("/v1/models/nobody's")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    await client.ok("/v1/unload_lora_adapter", {"lora_name": "team/mine"})


async def test_the_store_serves_any_digest_by_itself(client, server, model, tmp_path):
    save_adapter(tmp_path / "a", rank=8, seed=3)
    store = DirectoryStore(server.store)
    digest = store.put(tmp_path / "a", BaseShape.from_config_dir(model)).digest
    assert await said(client, f"sha256:{digest}") != await said(client, "tiny")
    assert digest in (await client.state())["adapters_resident"]
    assert await names(client) == ["tiny"]


async def test_a_damaged_adapter_in_the_store_is_refused_with_the_reason(client, server, model, tmp_path):
    save_adapter(tmp_path / "a", seed=4)
    store = DirectoryStore(server.store)
    checkpoint = store.put(tmp_path / "a", BaseShape.from_config_dir(model))
    weights = checkpoint.folder / "adapter_model.safetensors"
    weights.chmod(0o644)
    weights.write_bytes(weights.read_bytes()[:-5])
    for stream in (False, True):
        body = FIELDS | {"model": f"sha256:{checkpoint.digest}", "stream": stream}
        status, answer = await client.post("/v1/completions", body)
        assert (status, answer["error"]["code"]) == (400, "adapter_refused")
        assert "adapter_model.safetensors" in answer["error"]["message"]


async def test_a_name_stays_with_its_adapter(client, adapter, tmp_path):
    save_adapter(tmp_path / "other", seed=9)
    await client.ok("/v1/load_lora_adapter", {"lora_name": "taken", "lora_path": str(adapter)})
    for name in ("taken", "tiny"):
        body = {"lora_name": name, "lora_path": str(tmp_path / "other")}
        status, answer = await client.post("/v1/load_lora_adapter", body)
        assert (status, answer["error"]["param"]) == (400, "lora_name")
    await client.ok("/v1/unload_lora_adapter", {"lora_name": "taken"})
    status, answer = await client.post("/v1/unload_lora_adapter", {"lora_name": "taken"})
    assert (status, answer["error"]["code"]) == (404, "adapter_not_found")


def spoil_config(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{")


def spoil_weights(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"not tensors")


def spoil_shapes(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file({k: v[:, :32].contiguous() for k, v in tensors.items()}, folder / "adapter_model.safetensors")


def spoil_kind(folder: Path) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"peft_type": "IA3"}))


@pytest.mark.parametrize("spoil", [spoil_config, spoil_weights, spoil_shapes, spoil_kind, shutil.rmtree])
async def test_what_is_no_adapter_for_this_model_is_refused(client, tmp_path, spoil):
    save_adapter(tmp_path / "bad")
    spoil(tmp_path / "bad")
    status, answer = await client.post(
        "/v1/load_lora_adapter", {"lora_name": "bad", "lora_path": str(tmp_path / "bad")}
    )
    assert status == (404 if spoil is shutil.rmtree else 400)
    assert answer["error"]["param"] == "lora_path"
    assert "bad" not in await names(client)


async def test_a_rank_over_the_engines_limit_is_refused(client, tmp_path):
    save_adapter(tmp_path / "wide", rank=32)
    status, answer = await client.post(
        "/v1/load_lora_adapter", {"lora_name": "wide", "lora_path": str(tmp_path / "wide")}
    )
    assert status == 400
    assert "rank is 32, the limit is 16" in answer["error"]["message"]


async def test_modules_named_at_the_start_are_served(session, model, adapter):
    running = RunningServer(model, lora_modules=(("first", adapter),))
    try:
        client = Client(session, running.url)
        assert await names(client) == ["tiny", "first"]
        assert await said(client, "first") != await said(client, "tiny")
    finally:
        running.close()


async def test_an_adapter_that_no_page_holds_is_refused_each_time(client, server, model, tmp_path):
    save_adapter(tmp_path / "wide", rank=32, seed=5)
    store = DirectoryStore(server.store)
    digest = store.put(tmp_path / "wide", BaseShape.from_config_dir(model)).digest
    for stream in (False, True, False):
        body = FIELDS | {"model": f"sha256:{digest}", "stream": stream}
        status, answer = await client.post("/v1/completions", body)
        assert (status, answer["error"]["code"]) == (400, "adapter_refused")
        assert "rank is 32, the limit is 16" in answer["error"]["message"]


def damage(checkpoint: AdapterCheckpoint, _: pytest.MonkeyPatch) -> None:
    weights = checkpoint.folder / "adapter_model.safetensors"
    weights.chmod(0o644)
    weights.write_bytes(weights.read_bytes()[:-5])


def remove(checkpoint: AdapterCheckpoint, _: pytest.MonkeyPatch) -> None:
    shutil.rmtree(checkpoint.folder)


def break_store(_: AdapterCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(DirectoryStore, "use", fail)


@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        (damage, (400, "adapter_refused")),
        (remove, (404, "model_not_found")),
        (break_store, (503, "adapter_files_unreadable")),
    ],
)
async def test_an_adapter_lost_while_its_request_waits_is_the_error_of_its_first_load(
    session, model, tmp_path, monkeypatch, harm, expected
):
    """An adapter in host memory at the request's arrival, then evicted, cannot be read again for the device."""
    store = DirectoryStore(tmp_path / "store")
    save_adapter(tmp_path / "a", seed=6)
    checkpoint = store.put(tmp_path / "a", BaseShape.from_config_dir(model))
    running = RunningServer(model, tmp_path / "store", config={"max_num_seqs": 1})
    try:
        client = Client(session, running.url)
        body = FIELDS | {"model": f"sha256:{checkpoint.digest}"}
        long = {"model": "tiny", "prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        async with session.post(running.url + "/v1/completions", json=long) as stream:
            await stream.content.readany()
            # The device is asked for the adapter before a request is placed, also when `max_num_seqs` is reached.
            running.core.engine.adapters.ensure = lambda *_: Residency.LOADING
            waiting = [
                asyncio.create_task(client.post("/v1/completions", body | {"stream": is_stream}))
                for is_stream in (False, True)
            ]
            await client.wait_for(lambda state: state["waiting"] == 2)
            running.core.host_cache.drop(checkpoint.digest)
            harm(checkpoint, monkeypatch)
            del running.core.engine.adapters.ensure
            answers = [await each for each in waiting]
            stream.close()
        # The error is that of a request whose adapter is not even loaded once.
        answers.append(await client.post("/v1/completions", body))
        assert [(status, answer["error"]["code"]) for status, answer in answers] == [expected] * 3, answers
        assert answers[0] == answers[1] == answers[2]
    finally:
        running.close()


async def test_requests_that_wait_for_a_load_count_among_those_that_wait(session, model, tmp_path, monkeypatch):
    gate = threading.Event()
    read = AdapterReader.read
    monkeypatch.setattr(AdapterReader, "read", lambda *call: gate.wait(60) and read(*call))
    store = DirectoryStore(tmp_path / "store")
    save_adapter(tmp_path / "a", seed=7)
    digest = store.put(tmp_path / "a", BaseShape.from_config_dir(model)).digest
    running = RunningServer(model, tmp_path / "store", config={"max_num_seqs": 1}, max_waiting=2)
    try:
        client = Client(session, running.url)
        asked = [
            asyncio.create_task(client.post("/v1/completions", FIELDS | {"model": f"sha256:{digest}"})) for _ in "abc"
        ]
        await client.wait_for(lambda _: running.server._in_flight._places.held == 3)
        status, answer = await client.post("/v1/completions", FIELDS | {"model": "tiny"})
        assert (status, answer["error"]["code"]) == (503, "engine_overloaded")
        gate.set()
        assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 3
        assert (await client.post("/v1/completions", FIELDS | {"model": "tiny"}))[0] == 200
        # An answer's places are free once it has been sent, which its client may notice first.
        await client.wait_for(lambda _: running.server._in_flight._places.held == 0)
    finally:
        gate.set()
        running.close()


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.EIO, "adapter_files_unreadable"), (None, "adapter_files_unreadable"), (errno.ENOMEM, "engine_overloaded")],
)
async def test_files_that_cannot_be_read_are_an_error_of_the_store(session, model, tmp_path, monkeypatch, number, code):
    def fail(*_):
        raise OSError("no JSON") if number is None else OSError(number, os.strerror(number), "/a/hidden/path")

    store = DirectoryStore(tmp_path / "store")
    save_adapter(tmp_path / "a", seed=7)
    digest = store.put(tmp_path / "a", BaseShape.from_config_dir(model)).digest
    running = RunningServer(model, tmp_path / "store")
    monkeypatch.setattr(AdapterReader, "read", fail)
    try:
        body = FIELDS | {"model": f"sha256:{digest}"}
        async with session.post(running.url + "/v1/completions", json=body) as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"], response.headers["Retry-After"]) == (503, code, "1")
        assert not re.search("None|path", error["message"])
        assert (await Client(session, running.url).post("/v1/completions", FIELDS | {"model": "tiny"}))[0] == 200
    finally:
        running.close()
