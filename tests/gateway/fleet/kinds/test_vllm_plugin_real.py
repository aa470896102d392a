"""Two real vLLM servers with Loraplex's plugin behind two gateways. Not in CI: needs your own vLLM, with the plugin.

    VENV/bin/pip install --no-deps -e .
    LORAPLEX_VLLM=VENV/bin/vllm python -m pytest -m slow tests/gateway/fleet/kinds/test_vllm_plugin_real.py

The first server runs the model in one process. The other has two processes, which split each tensor or have a copy each
(data parallel). On the CPU, vLLM serves no smaller heads than the tiny model's, and two processes must be bound to CPUs
by hand.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.probing.base_digest import base_digest
from testing.engine import RunningServer
from testing.gateway.running import BASE_MODEL, Client, Gateway, running, settings, until
from testing.gateway.upstream import TOKEN
from testing.gateway.vllm_double import API_KEY
from testing.tiny import save_adapter, save_model
from tests.gateway.api.adapters.test_adapters import push
from tests.gateway.fleet.kinds.test_vllm_real import START_SECONDS, VLLM, RealServer, vllm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(VLLM is None, reason="LORAPLEX_VLLM names no vLLM"),
]
ASK = {"prompt": "The quick brown fox", "max_tokens": 12, "temperature": 0, "return_token_ids": True}
CONTEXT = 4096
# A stream that is still running when its server is killed, also if the other server keeps all cores busy for seconds.
LONG = {"prompt": "Hello", "max_tokens": 4000, "ignore_eos": True, "stream": True}


class Bench:
    """Two gateways of one deployment, two servers, and the answers of our own engine by model's name."""

    def __init__(self, gateways: list[Gateway], servers: list[RealServer], folder: Path) -> None:
        self.gateways, self.servers, self.folder = gateways, servers, folder
        self.expected: dict[str, list[int]] = {}
        self.digests: dict[str, str] = {}

    async def direct(self, server: RealServer, model: str) -> list[int]:
        """Return a server's own answer, without a gateway."""
        headers = {"Authorization": f"Bearer {API_KEY}"}
        session = self.gateways[0].session
        async with session.post(f"{server.url}/v1/completions", json=ASK | {"model": model}, headers=headers) as got:
            assert got.status == 200, await got.text()
            return (await got.json())["choices"][0]["token_ids"]

    async def engines(self, gateway: Gateway) -> dict[str, Any]:
        return {row["url"]: row for row in (await gateway.admin.get("/admin/api/engines")).json["data"]}


TENSORS = ("--tensor-parallel-size", "2")
# vLLM refuses its variable for adapters at run time with as many HTTP servers as copies, its default.
COPIES = ("--data-parallel-size", "2", "--api-server-count", "1")


@pytest.fixture(params=[TENSORS, COPIES], ids=["tensors", "copies"])
async def bench(request: pytest.FixtureRequest, tmp_path: Path, redis_url: str) -> AsyncIterator[Bench]:
    model, store = tmp_path / "tiny", tmp_path / "adapters"
    save_model(model, CONTEXT, head_dim=64)
    store.mkdir()
    (tmp_path / "key").write_text(API_KEY)
    flags = ("--dtype", "float32", "--max-model-len", str(CONTEXT))
    plugin = {"LORAPLEX_ADAPTER_STORE": str(store), "LORAPLEX_BASE_DIGEST": base_digest(model)}
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(vllm(model, tmp_path / "one.log", *flags, **plugin))
        split = (*flags, *request.param)
        bound = plugin | {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
        two = await stack.enter_async_context(vllm(model, tmp_path / "two.log", *split, **bound))
        engines = [f"vllm+{each.url}?adapters=2&requests=8&key_file={tmp_path / 'key'}" for each in (one, two)]
        gateways = []
        for number in range(2):
            journal = tmp_path / f"journal-{number}"
            of = settings(tmp_path, model, engines, redis_url, journal_dir=journal, adapter_store=str(store))
            gateways.append(await stack.enter_async_context(running(of)))
        bench = Bench(gateways, [one, two], tmp_path)
        for gateway in gateways:
            await gateway.engines_up(2, START_SECONDS)
        yield bench


async def upload(bench: Bench, client: Client, name: str, seed: int) -> None:
    folder = bench.folder / name
    save_adapter(folder, seed=seed, outputs=256)
    pushed = await push(client, name, {part.name: part.read_bytes() for part in folder.iterdir()})
    assert pushed.status == 201, pushed.body
    bench.digests[name] = pushed.json["digest"]


async def ask_our_engine(bench: Bench) -> None:
    """Record our own engine's greedy answers."""
    config = {"served_model_name": BASE_MODEL}
    server = await asyncio.to_thread(
        RunningServer, bench.folder / "tiny", bench.folder / "adapters", config, internal_token=TOKEN
    )
    try:
        for name in (BASE_MODEL, *bench.digests):
            body = ASK | {"model": bench.digests.get(name, name)}
            headers = {"x-loraplex-internal-token": TOKEN}
            async with bench.gateways[0].session.post(
                f"{server.url}/v1/completions", json=body, headers=headers
            ) as got:
                assert got.status == 200, await got.text()
                bench.expected[name] = (await got.json())["choices"][0]["token_ids"]
    finally:
        await asyncio.to_thread(server.close)


async def read_events(client: Client, body: dict[str, Any], begun: asyncio.Event) -> list[Any]:
    """Return a stream's events; `begun` is set after the fifth."""
    asked = {"stream_options": {"include_usage": True}} | body
    events: list[Any] = []
    async with client.session.post(f"{client.url}/v1/completions", json=asked, headers=client.headers) as response:
        assert response.status == 200
        async for line in response.content:
            if line.startswith(b"data: {"):
                events.append(json.loads(line[6:]))
                if len(events) == 5:
                    begun.set()
    return events


def counts(answer: Any) -> tuple[int, int]:
    return answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]


async def is_exact(client: Client, used: list[tuple[int, int]]) -> bool:
    """Return whether the ledger has `used`: the prompt and completion tokens of each request."""
    rows = await client.usage()
    found = [sum(row[name] for row in rows) for name in ("requests", "prompt_tokens", "completion_tokens")]
    return found == [len(used), sum(prompt for prompt, _ in used), sum(completion for _, completion in used)]


async def test_two_servers_behind_two_gateways_answer_as_our_engine_and_a_killed_one_is_billed_exactly(bench: Bench):
    first, second = bench.gateways
    acme, globex = await first.tenant("acme"), await second.tenant("globex")
    await upload(bench, acme, "red", 1)
    await upload(bench, globex, "blue", 2)
    await ask_our_engine(bench)
    assert len({tuple(tokens) for tokens in bench.expected.values()}) == 3
    # Each server finds both adapters itself, and the one of two processes computes the same.
    for server in bench.servers:
        for name, tokens in bench.expected.items():
            assert await bench.direct(server, bench.digests.get(name) or name) == tokens
    used: dict[str, list[tuple[int, int]]] = {"acme": [], "globex": []}

    async def ask_all() -> None:
        """Ask for both tenants' adapters at both gateways, all at once.

        The base model is left out: vLLM-CPU 0.32 gives its requests an adapter's weights in a batch with adapters.
        """
        clients = {"acme": acme, "globex": globex}
        asked = [
            (owner, name, gateway.client(clients[owner].key or ""))
            for gateway in bench.gateways
            for owner, name in (("acme", "red"), ("globex", "blue"))
        ]
        answers = await asyncio.gather(*(client.complete(**ASK | {"model": name}) for _, name, client in asked * 2))
        for (owner, name, _), answer in zip(asked * 2, answers, strict=True):
            assert (answer.status, answer.json["choices"][0]["token_ids"]) == (200, bench.expected[name])
            used[owner].append(counts(answer.json))

    await ask_all()
    loaded = (bench.folder / "one.log").read_text() + (bench.folder / "two.log").read_text()
    assert ("Resolved and loaded LoRA adapter" in loaded, "Loaded new LoRA adapter" in loaded) == (True, False)
    state = (await bench.engines(first))[bench.servers[0].url]["state"]
    assert (state["finds_adapters"], state["base_digest"]) == (True, base_digest(bench.folder / "tiny"))

    # Both tenants' streams run on the first server when it is killed.
    killed, left = bench.servers
    assert (await first.admin.post("/admin/api/engines/drain", {"url": left.url})).status == 200

    async def is_drained(drained: bool) -> bool:
        rows = [await bench.engines(gateway) for gateway in bench.gateways]
        return all((row[left.url]["drained"] is not None) is drained for row in rows)

    await until(lambda: is_drained(True))
    begun = [asyncio.Event(), asyncio.Event()]
    asked = ((acme, "red", begun[0]), (globex, "blue", begun[1]))
    streams = [asyncio.create_task(read_events(who, LONG | {"model": name}, at)) for who, name, at in asked]
    await asyncio.wait_for(asyncio.gather(*(each.wait() for each in begun)), 120)
    await killed.kill()
    for owner, events in zip(used, await asyncio.gather(*streams), strict=True):
        assert "error" in events[-1], events[-1]
        prompt, completion = counts(events[-2])
        assert 5 <= completion < 4000
        used[owner].append((prompt, completion))
    assert (await first.admin.post("/admin/api/engines/resume", {"url": left.url})).status == 200
    await until(lambda: is_drained(False))
    await ask_all()

    await until(partial(is_exact, acme, used["acme"]))
    await until(partial(is_exact, globex, used["globex"]))
