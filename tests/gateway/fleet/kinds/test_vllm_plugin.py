"""vLLM servers with Loraplex's plugin behind the gateway: no loads, a known base model, pairs that split a request."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from adapters.store import DirectoryStore
from testing.gateway.foreign_double import PROMPT_TOKENS
from testing.gateway.running import Client, Gateway, running, settings, until
from testing.gateway.vllm_double import VllmDouble
from tests.gateway.fleet.kinds.test_vllm import adapters, billed

DIGEST = "a" * 64


@asynccontextmanager
async def served(
    folder: Path, model_dir: Path, redis_url: str, migrated: Path, options: str = ""
) -> AsyncIterator[tuple[Gateway, VllmDouble]]:
    async with VllmDouble(api_key="").serving() as vllm:
        vllm.store = DirectoryStore(folder / "store")
        shutil.copy(migrated, folder / "gateway.db")
        of = settings(
            folder, model_dir, [f"vllm+{vllm.url}{options}"], redis_url, migrate_on_start=False,
            adapter_store=str(folder / "store"), redis_timeout=30.0,
        )  # fmt: skip
        async with running(of) as gateway:
            yield gateway, vllm


@pytest.mark.parametrize("both", ["?adapters=2"], indirect=True)
async def test_a_server_with_the_plugin_finds_adapters_itself(both: tuple[Gateway, VllmDouble]):
    gateway, vllm = both
    vllm.base_digest = DIGEST
    acme = await gateway.tenant("acme")
    names = await adapters(acme, 3)
    answers = await asyncio.gather(*(acme.complete(model=name, max_tokens=2) for name in names * 2))
    assert [(got.status, got.json["model"]) for got in answers] == [(200, name) for name in names * 2]
    assert (vllm.loads, len(set(vllm.resolved))) == ([], 3)
    # The gateway still bounds the names that the server lists.
    await until(lambda: no_more_than(vllm, acme, names[0], 2))

    async def is_known() -> bool:
        [engine] = (await gateway.admin.get("/admin/api/engines")).json["data"]
        return (engine["state"]["base_digest"], engine["state"]["finds_adapters"]) == (DIGEST, True)

    await until(is_known)


async def no_more_than(vllm: VllmDouble, client: Client, name: str, number: int) -> bool:
    assert (await client.complete(model=name, max_tokens=1)).status == 200
    return len(vllm.names) <= number


async def test_an_adapter_that_the_plugins_store_lacks_is_loaded(both: tuple[Gateway, VllmDouble], tmp_path: Path):
    gateway, vllm = both
    acme = await gateway.tenant("acme")
    [name] = await adapters(acme, 1)
    vllm.store = DirectoryStore(tmp_path / "another")
    assert (await acme.complete(model=name, max_tokens=2)).status == 200
    assert (len(vllm.loads), vllm.resolved) == (1, [])


class Pair:
    """A gateway with a pair of servers, and a tenant's client."""

    def __init__(self, gateway: Gateway, first: VllmDouble, second: VllmDouble) -> None:
        self.gateway, self.first, self.second = gateway, first, second


@pytest.fixture
async def pair(tmp_path: Path, model_dir: Path, redis_url: str, migrated: Path) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        first, second = [await stack.enter_async_context(VllmDouble(api_key="").serving()) for _ in range(2)]
        second.prefill = first
        for server in (first, second):
            server.store, server.base_digest = DirectoryStore(tmp_path / "store"), DIGEST
        shutil.copy(migrated, tmp_path / "gateway.db")
        engine = f"vllm+{second.url}?prefill={first.url}"
        of = settings(
            tmp_path, model_dir, [engine], redis_url, migrate_on_start=False,
            adapter_store=str(tmp_path / "store"), redis_timeout=30.0,
        )  # fmt: skip
        gateway = await stack.enter_async_context(running(of))
        yield Pair(gateway, first, second)


async def test_a_pair_reads_the_prompt_on_one_server_and_answers_on_the_other(pair: Pair):
    acme = await pair.gateway.tenant("acme")
    [name] = await adapters(acme, 1)
    for body in ({}, {"model": name}, {"stream": True, "min_tokens": 2, "stop": ["x"], "logprobs": 1}):
        got = await acme.complete(max_tokens=3, **body)
        assert got.status == 200
        # Neither the request of one token nor the blocks' addresses reach the client.
        assert (b"kv_transfer_params" in got.body, b"10.0.0.1" in got.body) == (False, False)
    assert (pair.second.fetched, pair.first.kept) == (3, {})
    assert pair.first.loads == pair.second.loads == []
    assert {body["max_tokens"] for _, body in pair.first.requests} == {1}
    # Only the server that answers counts: a prompt is billed once.
    await until(lambda: billed(acme, (3, 3 * PROMPT_TOKENS, 9)))


async def test_clients_cannot_name_blocks_and_several_sequences_are_not_split(pair: Pair):
    acme = await pair.gateway.tenant("acme")
    refused = await acme.complete(kv_transfer_params={"do_remote_prefill": True, "remote_host": "evil"})
    assert (refused.status, refused.error["param"]) == (400, "kv_transfer_params")
    for body in ({"prompt": ["a", "b"]}, {"n": 2}, {"echo": True}):
        assert (await acme.complete(max_tokens=1, **body)).status == 200
    assert pair.first.requests == []


async def test_a_pair_fails_with_its_first_server(pair: Pair):
    acme = await pair.gateway.tenant("acme")
    pair.first.has_connector = False
    got = await acme.complete(max_tokens=1)
    assert (got.status, pair.second.requests) == (502, [])
    pair.first.has_connector = True
    pair.first.device = "cpu"

    async def is_refused(words: str) -> bool:
        [engine] = (await pair.gateway.admin.get("/admin/api/engines")).json["data"]
        return words in str(engine)

    await until(lambda: is_refused("up, for adapters only"))
    assert (await acme.complete(max_tokens=1)).status == 503
    pair.first.base_digest = "b" * 64

    await until(lambda: is_refused("different base models"))
    pair.first.base_digest, pair.first.store = DIGEST, None
    await until(lambda: is_refused("lacks Loraplex's plugin"))


@pytest.mark.parametrize(
    "listed",
    [
        "sglang+http://a:1?prefill=http://b:1",
        "vllm+http://a:1?prefill=b:1",
        "vllm+http://a:1?prefill=http://user:secret@b:1",
    ],
)
def test_a_bad_pair_is_one_clear_line(listed: str):
    from gateway.fleet.discovery.addresses import parse_address

    def read_key(name: str, value: str) -> str:
        raise AssertionError

    with pytest.raises(ValueError) as refused:
        parse_address(listed, read_key)
    assert "\n" not in str(refused.value)
    assert "secret" not in str(refused.value)


def test_an_announcement_names_no_second_server():
    from gateway.fleet.discovery.addresses import parse_address

    with pytest.raises(ValueError, match="prefill"):
        parse_address("vllm+http://a:1?prefill=http://b:1")
