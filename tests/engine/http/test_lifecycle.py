"""Clients that disconnect, full queues, failing steps, stopping servers."""

import asyncio
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter

import aiohttp
import pytest

from adapters.tiers.state import EVICTION_REASONS
from engine.config import EngineConfig, ServerConfig
from engine.core.messages import Loading
from engine.core.service import CoreService
from engine.program import run
from testing.engine import SLOW, Client, RunningServer
from testing.gateway.running import until
from testing.ports import free_port
from wire.errors import ConfigError

LONG = {"model": "tiny", "prompt": "go on", "max_tokens": 3500, "ignore_eos": True, "temperature": 0} | SLOW


def is_idle(state: dict) -> bool:
    return not state["running"] and not state["waiting"] and state["kv_blocks_free"] == state["kv_blocks_total"]


@pytest.mark.usefixtures("slow_steps")
async def test_a_stream_whose_client_leaves_frees_its_request(client):
    async with client.session.post(client.url + "/v1/completions", json=LONG | {"stream": True}) as response:
        await response.content.readline()
        assert (await client.state())["running"] == 1
        response.close()
    state = await client.wait_for(is_idle)
    assert state["generated_tokens"] < 3500


@pytest.mark.usefixtures("slow_steps")
async def test_a_client_that_leaves_without_a_stream_frees_its_requests(client):
    before = (await client.state())["generated_tokens"]
    asking = asyncio.create_task(client.post("/v1/completions", LONG | {"n": 3}))
    await client.wait_for(lambda state: state["running"] == 3)
    asking.cancel()
    state = await client.wait_for(is_idle)
    assert state["generated_tokens"] - before < 3 * 3500


@pytest.mark.usefixtures("slow_steps")
async def test_a_client_that_leaves_while_waiting_leaves_the_queue(client):
    running = [asyncio.create_task(client.post("/v1/completions", LONG | {"stream": True})) for _ in range(8)]
    await client.wait_for(lambda state: state["running"] == 8)
    waiting = asyncio.create_task(client.post("/v1/completions", LONG))
    await client.wait_for(lambda state: state["waiting"] == 1)
    waiting.cancel()
    await client.wait_for(lambda state: state["waiting"] == 0)
    for task in running:
        task.cancel()
    await client.wait_for(is_idle)


@pytest.mark.usefixtures("slow_steps")
async def test_a_full_queue_refuses_and_says_when_to_come_back(session, model):
    server = RunningServer(model, config={"max_num_seqs": 1}, max_waiting=1)
    try:
        client = Client(session, server.url)
        asking = [asyncio.create_task(client.post("/v1/completions", LONG)) for _ in range(2)]
        await client.wait_for(lambda state: (state["running"], state["waiting"]) == (1, 1))
        async with session.post(server.url + "/v1/completions", json=LONG) as response:
            assert response.status == 503
            assert response.headers["Retry-After"] == "1"
            assert (await response.json())["error"]["code"] == "engine_overloaded"
        for task in asking:
            task.cancel()
        await client.wait_for(is_idle)
        assert (await client.post("/v1/completions", LONG | {"max_tokens": 1}))[0] == 200
    finally:
        server.close()


@pytest.mark.usefixtures("slow_steps")
async def test_a_failing_step_fails_all_in_flight_and_the_health(session, model, monkeypatch, caplog):
    server = RunningServer(model)
    try:
        client = Client(session, server.url)
        stream = await session.post(server.url + "/v1/completions", json=LONG | {"stream": True})
        await stream.content.readline()
        whole = asyncio.create_task(client.post("/v1/completions", LONG))
        await client.wait_for(lambda state: state["running"] == 2)

        def fail(*_: object) -> None:
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(server.core.engine.runner, "forward", fail)
        status, answer = await whole
        assert (status, answer["error"]["type"]) == (503, "server_error")
        events = (await stream.text()).split("\n\n")
        # The cause may hold paths or another tenant's input: it is in the log only.
        assert json.loads(events[-3][6:])["error"]["message"] == "The engine failed; send the request again."
        assert "the device is gone" in caplog.text
        assert events[-2] == "data: [DONE]"
        status, health = await client.get("/health")
        assert (status, health["status"]) == (503, "unhealthy")
        assert "the device is gone" not in health["reason"]
        for path, body in (("/v1/completions", LONG), ("/v1/completions", LONG | {"stream": True})):
            assert (await client.post(path, body))[0] == 503
        assert (await client.get("/state"))[0] == 503
        async with session.get(server.url + "/metrics") as response:
            assert response.status == 200
        failures = [record for record in caplog.records if record.exc_info]
        assert len(failures) == 1
    finally:
        server.close()


async def test_no_work_wakes_neither_the_engine_nor_its_event_loop(client, server, monkeypatch):
    await client.complete(prompt="hi", max_tokens=2)
    await client.wait_for(is_idle)
    engine, looks, turns = server.core.engine, Counter(), Counter()
    has_work, select = engine.has_work, server._event_loop._selector.select

    def looked() -> bool:
        looks["engine"] += 1
        return has_work()

    def selected(timeout: float | None = None) -> object:
        turns["loop"] += 1
        return select(timeout)

    monkeypatch.setattr(engine, "has_work", looked)
    monkeypatch.setattr(server._event_loop._selector, "select", selected)
    began = time.monotonic()
    await asyncio.sleep(0.5)
    # A log line, a follower's news and what is left of the requests before take a few; a poll would take hundreds.
    most = 20 + 10 * (time.monotonic() - began)
    assert turns["loop"] <= most
    assert looks["engine"] <= most


async def is_answered(client: Client, path: str, expected: tuple[int, dict[str, str]]) -> bool:
    return await client.get(path) == expected


async def test_the_health_says_loading_until_the_model_is_there(session, model, monkeypatch):
    loading = threading.Event()
    make = CoreService._make_engine

    def slow(self, load):
        self.send(Loading("warming up", 12, 40))
        loading.wait()
        return make(self, load)

    monkeypatch.setattr(CoreService, "_make_engine", slow)
    started: list[RunningServer] = []
    port = free_port()
    thread = threading.Thread(target=lambda: started.append(RunningServer(model, port=port)))
    thread.start()
    try:
        client = Client(session, f"http://127.0.0.1:{port}")
        status, health = await until_listening(client)
        assert (status, health["status"]) == (503, "loading")
        warming = (503, {"status": "loading", "reason": "warming up: 12 of 40"})
        await until(lambda: is_answered(client, "/readyz", warming))
        assert (await client.post("/v1/completions", LONG))[0] == 503
    finally:
        loading.set()
        await asyncio.to_thread(thread.join)
    try:
        assert await client.get("/health") == (200, {"status": "ok", "reason": None})
    finally:
        started[0].close()


async def test_the_internal_token_guards_every_route_but_two(session, model):
    server = RunningServer(model, internal_token="secret")
    try:
        client = Client(session, server.url)
        for headers in ({}, {"x-loraplex-internal-token": "wrong"}, {"x-loraplex-internal-token": "s\u00e9cret"}):
            status, answer = await client.post("/v1/completions", LONG, headers=headers)
            assert (status, answer["error"]["code"]) == (401, "invalid_internal_token")
            assert (await client.get("/state", headers=headers))[0] == 401
        assert (await client.get("/health"))[0] == 200
        headers = {"x-loraplex-internal-token": "secret", "x-loraplex-tenant": "acme", "x-loraplex-weight": "2"}
        body = LONG | {"max_tokens": 9, "stream_options": {"include_usage": True}}
        *chunks, last = await client.events("/v1/completions", body, headers=headers)
        counts = [chunk["loraplex"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == last["usage"]["completion_tokens"] == 9
        assert chunks[0]["loraplex"]["prompt_tokens"] == last["usage"]["prompt_tokens"]
        assert set(last["loraplex"]) == {"completion_tokens", "prompt_tokens", "cached_tokens", "adapter_digest"}
        weights = [{"x-loraplex-weight": weight} for weight in ("heavy", "nan", "0", "-1")]
        for bad in [
            *weights,
            {"x-loraplex-priority": "1.5"},
            {"x-loraplex-priority": "9" * 400},
            {"x-loraplex-ttft-target": "0"},
            {"x-loraplex-ttft-target": "soon"},
            *({"x-loraplex-age": age} for age in ("-1", "old", "inf", "9" * 400)),
            {"x-loraplex-tenant": "\u00e9"},
        ]:
            status, answer = await client.post("/v1/completions", LONG, headers=headers | bad)
            assert (status, answer["error"]["param"]) == (400, next(iter(bad)))
    finally:
        server.close()


async def test_metrics_count_what_was_done(client, session):
    async def read() -> dict[str, float]:
        async with session.get(client.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    await client.wait_for(is_idle)
    before = await read()
    answer = await client.complete(prompt="count this", max_tokens=7, ignore_eos=True)
    after = await read()
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert grown["loraplex_engine_generation_tokens_total"] == 7
    assert grown["loraplex_engine_prompt_tokens_total"] == answer["usage"]["prompt_tokens"]
    assert grown["loraplex_engine_time_to_first_token_seconds_count"] == 1
    assert grown["loraplex_engine_inter_token_latency_seconds_count"] <= 6
    assert grown["loraplex_engine_step_seconds_count"] >= 7
    assert grown['loraplex_engine_requests_finished_total{finish_reason="length"}'] == 1
    assert after["loraplex_engine_requests_running"] == 0
    state = await client.state()
    assert after["loraplex_engine_preemptions_total"] == state["preemptions"]
    assert after["loraplex_engine_adapter_loads_total"] == state["adapter_loads"]
    evictions = [after[f'loraplex_engine_adapter_evictions_total{{reason="{reason}"}}'] for reason in EVICTION_REASONS]
    assert sum(evictions) == state["adapter_evictions"]
    assert after["loraplex_engine_kv_blocks"] == (await client.state())["kv_blocks_total"]


@pytest.mark.usefixtures("slow_steps")
async def test_stopping_lets_requests_end_and_aborts_the_rest(session, model):
    server = RunningServer(model)
    client = Client(session, server.url)
    long = asyncio.create_task(session.post(client.url + "/v1/completions", json=LONG | {"n": 8}))
    await client.wait_for(lambda state: state["running"] == 8)
    await asyncio.to_thread(server.close)
    response = await long
    answer = await response.json()
    assert (response.status, answer["error"]["message"]) == (503, "The engine is shutting down.")
    assert response.headers["Retry-After"] == "1"
    assert answer["error"]["code"] == "engine_unavailable"
    with pytest.raises(aiohttp.ClientConnectionError):
        await client.get("/health")


PROGRAM = """
import sys
from engine.config import EngineConfig, ServerConfig
from engine.program import run
config = EngineConfig(model=sys.argv[1], device="cpu", kv_cache_memory=8 << 20, adapter_memory=4 << 20,
                      max_lora_rank=16, max_num_seqs=8)
server = ServerConfig(port=int(sys.argv[2]), drain_seconds=float(sys.argv[3]))
sys.exit(run(config, server, ready=lambda port: print("ready", port, flush=True)))
"""


def program(model: object, port: int, drain_s: float = 30.0) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", PROGRAM, str(model), str(port), str(drain_s)]
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


async def test_a_signal_stops_the_program_cleanly(session, model):
    process = program(model, 0)
    assert process.stdout is not None
    port = int((await asyncio.to_thread(process.stdout.readline)).split()[1])
    answer = await Client(session, f"http://127.0.0.1:{port}").ok(
        "/v1/completions", {"model": model.name, "prompt": "hi"}
    )
    assert answer["usage"]["completion_tokens"] > 0
    process.send_signal(signal.SIGTERM)
    _, stderr = await asyncio.to_thread(process.communicate, timeout=100)
    assert process.returncode == 0
    assert " draining 0 requests, up to 30 s" in stderr
    assert "Traceback" not in stderr


async def test_a_second_signal_ends_the_drain(session, model):
    """A second signal ends a drain with more work than a test's time allows."""
    process = program(model, 0, drain_s=100_000.0)
    assert process.stdout is not None
    assert process.stderr is not None
    client = Client(session, f"http://127.0.0.1:{(await asyncio.to_thread(process.stdout.readline)).split()[1]}")
    asked = LONG | {"model": model.name, "prompt": ["go on"] * 60, "n": 16, "stream": True}
    try:
        async with session.post(client.url + "/v1/completions", json=asked) as stream:
            await stream.content.readline()
            process.send_signal(signal.SIGINT)
            line = "?"
            while line and " draining " not in line:
                line = await asyncio.to_thread(process.stderr.readline)
            assert " requests, up to 100000 s" in line
            process.send_signal(signal.SIGTERM)
            await stream.read()
        _, stderr = await asyncio.to_thread(process.communicate, timeout=100)
        assert process.returncode == 0
        assert " aborting " in stderr
    finally:
        process.kill()


def run_to_its_end(model: object, port: int, capsys: pytest.CaptureFixture[str]) -> str:
    """Run the program in this process until it ends with 1, and return the line that it prints."""
    config = EngineConfig(
        model=str(model), device="cpu", kv_cache_memory=8 << 20, adapter_memory=4 << 20, max_num_seqs=8
    )
    assert run(config, ServerConfig(port=port)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_port_in_use_is_one_line(model, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "address already in use" in run_to_its_end(model, taken.getsockname()[1], capsys)


@pytest.mark.parametrize(("name", "says"), [("nowhere", "no such folder"), ("cut.gguf", "is damaged or cut off: ")])
def test_a_model_that_is_none_is_one_line(tmp_path, capsys, starts_servers, name, says):
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\0\0\0")
    line = run_to_its_end(tmp_path / name, 0, capsys)
    assert name in line
    assert says in line


@pytest.mark.parametrize("content", [None, "{"])
def test_a_tokenizer_that_is_none_is_found_before_the_weights_are_read(
    model, tmp_path, capsys, starts_servers, content
):
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "tokenizer.json").unlink()
    if content is not None:
        (folder / "tokenizer.json").write_text(content)
    assert "tokenizer.json" in run_to_its_end(folder, 0, capsys)


async def test_a_named_adapter_that_cannot_be_served_ends_the_start(model, tmp_path):
    with pytest.raises(ConfigError, match=r"lora_modules: bad: .*no such folder"):
        RunningServer(model, lora_modules=(("bad", tmp_path / "nowhere"),))


@pytest.mark.parametrize("field", ["kv_cache_memory", "adapter_memory"])
def test_more_memory_than_there_is_ends_the_start(model, field):
    with pytest.raises(
        ConfigError, match=rf"^{field}: expected at most the \d+ MiB that this machine has, got 1073741824"
    ):
        RunningServer(model, config={field: 1 << 50})


async def test_what_nobody_foresaw_is_a_plain_500_and_logged_with_the_request_id(client, monkeypatch, caplog):
    def fail(*_: object) -> None:
        raise RuntimeError("private words")

    monkeypatch.setattr("engine.http.routes.decode", fail)
    status, answer = await client.post("/tokenize", {"prompt": "x"}, headers={"x-request-id": "req-7"})
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert "private" not in answer["error"]["message"]
    (record,) = caplog.records
    assert "req-7" in record.getMessage()


async def until_listening(client: Client) -> tuple[int, dict]:
    for _ in range(6000):
        try:
            return await client.get("/health")
        except aiohttp.ClientConnectionError:
            await asyncio.sleep(0.01)
    raise AssertionError("nothing listens")


@pytest.fixture(autouse=True)
def _errors_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
