"""The gateway in front of a real vLLM server, on a CPU. Not in CI: needs your own installation of vLLM.

    LORAPLEX_VLLM=VENV/bin/vllm python -m pytest -m slow tests/gateway/fleet/kinds/test_vllm_real.py

The demo's adapters change the answers in clearly different ways; the test uses three of them on a server that keeps
two.
"""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loraplex.up.demo_tenants import adapters_folder
from testing.gateway.running import BASE_MODEL, Answer, Client, Gateway, running, settings, until
from testing.gateway.vllm_double import API_KEY
from testing.ports import free_port
from testing.stack import CACHE
from tests.gateway.api.adapters.test_adapters import push

START_SECONDS = 400.0
VLLM = os.environ.get("LORAPLEX_VLLM")
QUESTION = [{"role": "user", "content": "Why is the sky blue?"}]


def start(
    program: str, model: Path, port: int, log: Path, flags: Sequence[str], variables: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    command = [program, "serve", str(model), "--served-model-name", BASE_MODEL, "--host", "127.0.0.1"]
    command += ["--port", str(port), "--max-num-seqs", "8"]
    command += ["--enable-lora", "--max-loras", "2", "--max-cpu-loras", "2", "--max-lora-rank", "16"]
    command += ["--api-key", API_KEY, *flags]
    # PYTHONPATH names this checkout, whose packages vLLM's environment may have in another version.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = (
        inherited
        | variables
        | {
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        }
    )
    with open(log, "wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)


class RealServer:
    """A vLLM server, which may not be up yet."""

    def __init__(self, url: str, process: "subprocess.Popen[bytes]") -> None:
        self.url, self._process = url, process

    async def kill(self) -> None:
        """Send SIGKILL to the server and its engine, a separate process."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await asyncio.to_thread(self._process.wait)


@asynccontextmanager
async def vllm(model: Path, log: Path, *flags: str, **variables: str) -> AsyncIterator[RealServer]:
    """Start a server with further flags and environment variables."""
    assert VLLM is not None
    port = free_port()
    process = await asyncio.to_thread(start, VLLM, model, port, log, flags, variables)
    server = RealServer(f"http://127.0.0.1:{port}", process)
    try:
        yield server
    finally:
        await server.kill()


async def ask(client: Client, model: str, **more: Any) -> Answer:
    body = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 24}
    got = await client.chat(**body | more)
    assert got.status == 200, got.body
    return got


def text(got: Answer) -> str:
    return got.json["choices"][0]["message"]["content"]


async def upload(client: Client, name: str) -> None:
    """Upload an adapter of the demo."""
    parts = {part.name: part.read_bytes() for part in (adapters_folder() / name).iterdir() if part.suffix != ".md"}
    assert (await push(client, name, parts)).status == 201


async def check_counts_by_the_server(gateway: Gateway, model: Path) -> None:
    """Check that the server's `/tokenize` counts prompts as its answers do, where the gateway has no tokenizer."""
    config = json.loads((model / "config.json").read_text())
    added = {"name": BASE_MODEL, "config": config, "context_length": 1024}
    assert (await gateway.admin.post("/admin/api/bases", added)).status == 201
    await gateway.engines_up(1, START_SECONDS)
    client = await gateway.tenant("initech")
    await upload(client, "pirate")
    count = (await ask(client, "pirate")).json["usage"]["prompt_tokens"]
    refused = await client.chat(model="pirate", messages=QUESTION, max_tokens=1024)
    assert f"({count} in the messages" in refused.error["message"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(VLLM is None, reason="LORAPLEX_VLLM names no vLLM")
async def test_adapters_by_name_through_a_real_vllm(tmp_path: Path, redis_url: str):
    model = CACHE / "models" / "SmolLM2-135M-Instruct"
    async with vllm(model, tmp_path / "vllm.log", "--dtype", "bfloat16", "--max-model-len", "1024") as server:
        (tmp_path / "key").write_text(API_KEY)
        engine = f"vllm+{server.url}?adapters=2&requests=8&key_file={tmp_path / 'key'}"
        of = settings(tmp_path, model, [engine], redis_url, max_model_len=1024)
        async with running(of) as gateway:
            await gateway.engines_up(1, START_SECONDS)
            acme = await gateway.tenant("acme", tokens_per_minute=1_000_000)
            names = ["pirate", "json", "brief"]
            for name in names:
                await upload(acme, name)
            # On a CPU, the base model would get an adapter's weights.
            refused = await acme.chat(model=BASE_MODEL, messages=QUESTION)
            assert (refused.status, "adapters only" in refused.error["message"]) == (503, True)
            # All at once, each twice: one load per adapter, and a different answer from each.
            answers = await asyncio.gather(*(ask(acme, name) for name in names * 2))
            said = [text(got) for got in answers]
            assert [got.json["model"] for got in answers] == names * 2
            assert len(set(said)) == 3
            assert said[:3] == said[3:]
            assert said[1].lstrip().startswith("{")
            # The stream is the same; the counts are vLLM's own.
            streamed = await ask(acme, "json", stream=True, stream_options={"include_usage": True})
            pieces = [choice["delta"].get("content") or "" for e in streamed.events[:-1] for choice in e["choices"]]
            assert "".join(pieces) == said[1]
            assert streamed.events[-2]["usage"].items() <= answers[1].json["usage"].items()
            # vLLM's refusals look like ours.
            got = await acme.chat(model="json", messages=QUESTION, temperature=-1)
            assert got.status == 400
            [engine] = (await gateway.admin.get("/admin/api/engines")).json["data"]
            assert engine["healthy"]
            assert len(engine["resident"]) <= 2
            expected = sum(got.json["usage"]["completion_tokens"] for got in answers)

            async def billed() -> bool:
                rows = {row["model"]: row for row in await acme.usage()}
                counted = sum(rows.get(name, {}).get("completion_tokens", 0) for name in names)
                return counted == expected + answers[1].json["usage"]["completion_tokens"]

            await until(billed)
        (tmp_path / "other").mkdir()
        without = settings(tmp_path / "other", model, list(of.engines), redis_url)
        async with running(replace(without, model_dir=None, base_model=None)) as gateway:
            await check_counts_by_the_server(gateway, model)
