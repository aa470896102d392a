"""The core in a thread and in a process: the same answers to the bit, the same errors, the same state afterwards."""

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from adapters.manifest import BaseShape
from adapters.store import DirectoryStore
from engine.config import EngineConfig
from engine.core import process
from engine.core.process import core_mode
from kernels.devices import DeviceKind
from testing.engine import SLOW, Client, RunningServer
from testing.tiny import save_adapter

INTERNAL = {"x-loraplex-internal-token": "secret", "x-loraplex-tenant": "acme"}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"], "additionalProperties": False}
COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": "The quick brown", "temperature": 0},
    {"prompt": ["The quick", "brown fox"], "n": 3, "seed": 7, "temperature": 1.3, "top_p": 0.9, "top_k": 40},
    {"model": "one", "prompt": "The quick brown", "temperature": 0},
    {"model": "one*0.5+two*0.7", "prompt": "The quick brown", "seed": 3},
    {"model": "called", "prompt": [60, 61, 62, 40, 41, 63, 64], "temperature": 0},
    {"prompt": "It is", "response_format": {"type": "json_object"}, "max_tokens": 40, "seed": 1},
    {"prompt": "It is", "guided_regex": "[a-f]{3}-[0-9]{2}", "n": 2, "seed": 5},
    {"prompt": "It is", "guided_json": SCHEMA, "model": "two", "temperature": 0, "max_tokens": 40},
    {"prompt": "x", "bad_words": ["fox", "the lazy"], "allowed_token_ids": list(range(20, 200)), "seed": 9},
    {"prompt": "x", "logprobs": 5, "prompt_logprobs": 3, "n": 2, "seed": 2, "echo": True},
    {"prompt": "x", "logit_bias": {"65": 4.5}, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "seed": 4},
    {"prompt": "x", "min_tokens": 5, "stop": ["e"], "stop_token_ids": [80], "seed": 6, "cache_salt": "😀"},
    # Errors of the core: of a grammar, of token ids, of an adapter.
    {"prompt": "x", "guided_regex": "[a"},
    {"prompt": "x", "allowed_token_ids": [2**31 - 1]},
    {"prompt": "x", "model": "sha256:" + "0" * 64},
    {"prompt": "x", "model": "one*0.5+sha256:" + "0" * 64 + "*0.5"},
]


def lasting(answer: Any) -> Any:
    """Return an answer without its id and its times."""
    kept = {key: value for key, value in answer.items() if key not in ("id", "created")}
    if "loraplex" in kept:
        kept["loraplex"] = {key: value for key, value in kept["loraplex"].items() if key != "queue_ms"}
    return kept


def joined(events: list[Any]) -> dict[int, list[str]]:
    """Return each choice's text and reason. Tokens that arrive together share an event, so the events differ by run."""
    choices: dict[int, list[str]] = {0: ["", ""], 1: ["", ""]}
    for choice in (choice for event in events for choice in event["choices"]):
        choices[choice["index"]][0] += choice["delta"].get("content") or ""
        choices[choice["index"]][1] += choice["finish_reason"] or ""
    return choices


async def tell(url: str, session: aiohttp.ClientSession, digest: str) -> list[Any]:
    """Send every request and return the answers."""
    client, found = Client(session, url), []
    for fields in COMPLETIONS:
        body = {"model": "tiny", "max_tokens": 12} | fields
        status, answer = await client.post("/v1/completions", body, headers=INTERNAL)
        found.append((status, lasting(answer)))
    chat = {"model": "one", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20, "seed": 1, "n": 2}
    found.append(joined(await client.events("/v1/chat/completions", chat, headers=INTERNAL)))
    found.append(await client.ok("/probe", {"model": digest}, headers=INTERNAL))
    found.append(await client.ok("/prefetch", {"adapter": digest, "tenant": "acme"}, headers=INTERNAL))
    found.append(await client.ok("/pins", {"adapters": [digest]}, headers=INTERNAL))
    found.append(await client.ok("/service", {"tenants": {"acme": 5.0}}, headers=INTERNAL))
    found.append(await client.post("/v1/unload_lora_adapter", {"lora_name": "two"}, headers=INTERNAL))
    found.append(await client.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "/no"}, headers=INTERNAL))
    return found


async def leave(url: str, session: aiohttp.ClientSession) -> dict[str, Any]:
    """Leave a stream, and return the state once it is over."""
    body = {"model": "tiny", "prompt": "x", "max_tokens": 3500, "ignore_eos": True, "stream": True} | SLOW
    async with session.post(url + "/v1/completions", data=json.dumps(body), headers=INTERNAL) as response:
        await response.content.readline()
        response.close()
    client = Client(session, url)
    state = await client.wait_for(lambda state: not state["running"] + state["waiting"], headers=INTERNAL)
    assert state["generated_tokens"] < 3500
    assert state["kv_blocks_free"] == state["kv_blocks_total"]
    return {key: state[key] for key in ("adapters_resident", "adapters_host", "adapter_loads", "max_adapter_bytes")}


@pytest.mark.usefixtures("slow_steps")
async def test_both_modes_answer_alike(
    session: aiohttp.ClientSession, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(process, "CHILD", "testing.broken_core")  # its steps are slow too for the request that is left
    modules = {}
    for seed, name in enumerate(("one", "two", "called"), 1):
        config = {"alora_invocation_tokens": [40, 41]} if name == "called" else {}
        save_adapter(tmp_path / name, seed=seed)
        file = tmp_path / name / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | config))
        modules[name] = tmp_path / name
    store = DirectoryStore(tmp_path / "store")
    digest = "sha256:" + store.put(modules["one"], BaseShape.from_config_dir(model)).digest
    results = {}
    for mode in ("thread", "process"):
        server = RunningServer(
            model,
            tmp_path / "store",
            {"engine_core_mode": mode},
            internal_token="secret",
            lora_modules=tuple(modules.items()),
        )
        try:
            answers = await tell(server.url, session, digest)
            results[mode] = (answers, await leave(server.url, session))
            metrics = await (await session.get(server.url + "/metrics", headers=INTERNAL)).text()
            # Three named adapters, the mixture, the prober's; a fourth load failed.
            assert 'loraplex_engine_adapter_host_loads_total{result="missing"}' in metrics
            assert ("core_process_cpu_seconds_total" in metrics) == (mode == "process")
            assert 'loraplex_engine_requests_finished_total{finish_reason="abort"} 1.0' in metrics
        finally:
            server.close()
    for plain, fast in zip(results["thread"][0], results["process"][0], strict=True):
        assert fast == plain
    assert results["process"][1] == results["thread"][1]
    statuses = [answer[0] for answer in results["process"][0][: len(COMPLETIONS)]]
    assert statuses == [200] * 12 + [400, 400, 404, 404]


@pytest.mark.parametrize("mode", ["thread", "process"])
async def test_an_unknown_store_and_a_wrong_model_are_one_error(mode: str, model: Path, tmp_path: Path):
    with pytest.raises(ValueError, match=r"^kv_cache_memory: 0 bytes hold 0 tokens"):
        RunningServer(model, config={"engine_core_mode": mode, "kv_cache_memory": 1})
    with pytest.raises(ValueError, match=r"^model: no such folder: .*nowhere"):
        RunningServer(tmp_path / "nowhere", config={"engine_core_mode": mode})


def test_the_mode_follows_the_device(monkeypatch: pytest.MonkeyPatch):
    def mode(**fields: Any) -> str:
        return core_mode(EngineConfig(model="m", **fields))

    for has_gpu in (True, False):
        monkeypatch.setattr(DeviceKind, "may_exist", lambda kind, has_gpu=has_gpu: kind.is_host or has_gpu)
        modes = {device: mode(device=device) for device in ("auto", "cpu", "cuda", "simulated:1,0")}
        assert modes == {
            "auto": "process" if has_gpu else "thread", "cpu": "thread", "cuda": "process", "simulated:1,0": "process"
        }  # fmt: skip
        assert mode(device="cpu", engine_core_mode="process") == "process"
        assert mode(device="cuda", engine_core_mode="thread") == "thread"
