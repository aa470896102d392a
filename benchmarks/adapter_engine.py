"""A `loraplex engine` process on the demo model, of this or another checkout, with adapters and streams for it.

Nothing here depends on the engine's code, so that releases can be compared in one run.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import torch
from safetensors.torch import save_file

from adapters.checkpoint import CONFIG_NAME, WEIGHTS_NAME
from adapters.manifest import BaseShape
from adapters.store import DirectoryStore
from testing.many_adapters import make_scaled
from testing.ports import free_port
from testing.stack import CACHE, ROOT

MODEL = CACHE / "models" / "SmolLM2-135M-Instruct"
TOKEN = "benchmarks-internal-7d1f0c93b8e2465a"
BASE = "base"
START_SECONDS = 120.0


@dataclass(eq=False, slots=True)
class Stream:
    """A request and its times, in seconds of `perf_counter`. token_times: time of each delivery."""

    tenant: str
    digest: str
    sent: float = 0.0
    token_times: list[float] = field(default_factory=list)
    text: str = ""

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.sent

    @property
    def end(self) -> float:
        return self.token_times[-1]


class Adapters:
    """Adapters of rank 16 on all projections, made on request. They share one file of weights and differ in alpha, so
    that a thousand take the disk space of one.
    """

    def __init__(self, folder: Path, rank: int = 16) -> None:
        self.root = folder / "store"
        self._store = DirectoryStore(self.root)
        base = BaseShape.from_config_dir(MODEL)
        generator, tensors = torch.Generator().manual_seed(1), {}
        for layer in range(base.num_layers):
            for projection, (out_features, in_features) in base.projections.items():
                block = "self_attn" if projection in ("q_proj", "k_proj", "v_proj", "o_proj") else "mlp"
                name = f"base_model.model.model.layers.{layer}.{block}.{projection}"
                for side, shape in (("A", (rank, in_features)), ("B", (out_features, rank))):
                    values = torch.randn(shape, generator=generator) * 0.02
                    tensors[f"{name}.lora_{side}.weight"] = values.to(torch.bfloat16)
        source = folder / "adapter"
        source.mkdir()
        save_file(tensors, source / WEIGHTS_NAME)
        config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank}
        (source / CONFIG_NAME).write_text(json.dumps(config | {"target_modules": sorted(base.projections)}))
        self._first = self._store.put(source, base)
        self.num_bytes = self._first.num_bytes

    def make(self, count: int) -> list[str]:
        """Add `count` adapters to the store and return their digests."""
        return make_scaled(self._store, self._first.digest, count)

    def folder(self, digest: str) -> Path:
        """Return an adapter's folder, in PEFT's format."""
        path = self._store.path(digest)
        assert path is not None
        return path


class EngineClient:
    """Streams and state of an engine. A vLLM server serves streams too if its adapters are named by `model_of`."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self.url = session, url

    async def ready(self) -> None:
        async with asyncio.timeout(START_SECONDS):
            while True:
                try:
                    async with self._session.get(f"{self.url}/health") as response:
                        if response.status == 200:
                            return
                except OSError:
                    pass
                await asyncio.sleep(0.1)

    async def state(self) -> dict[str, Any]:
        async with self._session.get(f"{self.url}/state") as response:
            state: dict[str, Any] = await response.json()
            return state

    async def stream(self, tenant: str, digest: str, prompt: list[int], tokens: int) -> Stream:
        """Send a request and read its stream. Raises RuntimeError for an answer without tokens."""
        stream = Stream(tenant, digest)
        body = {"model": model_of(digest), "prompt": prompt, "max_tokens": tokens}
        body |= {"temperature": 0, "ignore_eos": True, "stream": True}
        stream.sent = time.perf_counter()
        async with self._session.post(
            f"{self.url}/v1/completions", json=body, headers={"x-loraplex-tenant": tenant}
        ) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    stream.token_times.append(time.perf_counter())
                    stream.text += "".join(c["text"] for c in json.loads(line[6:]).get("choices", ()))
            if response.status != 200 or not stream.token_times:
                raise RuntimeError(f"an answer failed with status {response.status}")
        return stream

    async def post(self, path: str, body: Mapping[str, Any]) -> None:
        async with self._session.post(f"{self.url}{path}", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"{path}: {await response.text()}")


def make_session() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=600)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, headers={"x-loraplex-internal-token": TOKEN})


def model_of(digest: str) -> str:
    """Return the name by which a request asks for an adapter, or with "" for the base model."""
    return f"sha256:{digest}" if digest else BASE


@contextmanager
def running_engine(store: Path, *flags: str, tree: Path = ROOT) -> Iterator[str]:
    """Run an engine and yield its URL. tree: the checkout whose code runs."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "loraplex.cli", "engine", "--model", str(MODEL), "--device", "cpu"]
    command += ["--port", str(port), "--served-model-name", BASE, "--adapter-store", str(store)]
    environment = os.environ | {"LORAPLEX_INTERNAL_TOKEN": TOKEN, "PYTHONPATH": str(tree)}
    process = subprocess.Popen(
        [*command, *flags], env=environment, cwd=tree, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield url
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def random_prompt(chance: random.Random, tokens: int) -> list[int]:
    """Return tokens that no prefix cache holds."""
    return [chance.randrange(1000, 40_000) for _ in range(tokens)]


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
