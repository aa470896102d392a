"""Pools of vLLM servers behind the double of an llm-d router."""

import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from adapters.store import DirectoryStore
from testing.gateway.foreign_double import PROMPT_TOKENS
from testing.gateway.llmd_double import LlmdDouble
from testing.gateway.running import Gateway, running_alone, settings, until
from testing.gateway.vllm_double import VllmDouble
from tests.gateway.fleet.kinds.test_vllm import adapters, billed

pytestmark = pytest.mark.usefixtures("quick_polls")


class Pool(NamedTuple):
    gateway: Gateway
    router: LlmdDouble
    servers: list[VllmDouble]


@pytest.fixture
async def pool(tmp_path: Path, model_dir: Path, redis_url: str, migrated: Path) -> AsyncIterator[Pool]:
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(VllmDouble(api_key="").serving()) for _ in range(2)]
        for server in servers:
            server.store, server.base_digest = DirectoryStore(tmp_path / "store"), "a" * 64
        router = await stack.enter_async_context(LlmdDouble(servers).serving())
        shutil.copy(migrated, tmp_path / "gateway.db")
        of = settings(
            tmp_path, model_dir, [f"llmd+{router.url}?adapters=1"], redis_url, migrate_on_start=False,
            adapter_store=str(tmp_path / "store"), redis_timeout=30.0,
        )  # fmt: skip
        yield Pool(await stack.enter_async_context(running_alone(of)), router, servers)


async def test_the_router_finds_adapters_by_digest_and_tenants_by_their_fairness_id(pool: Pool):
    acme, globex = await pool.gateway.tenant("acme"), await pool.gateway.tenant("globex")
    [mine, also_mine], [theirs] = await adapters(acme, 2), await adapters(globex, 1)
    for name in (mine, also_mine, mine, also_mine):
        assert (await acme.complete(model=name, max_tokens=2)).status == 200
    got = await globex.complete(model=theirs, max_tokens=2, stream=True)
    assert (got.status, got.events[-1]) == (200, "[DONE]")
    # Each adapter was loaded by one server, for its request; a call of the gateway would reach a random server.
    resolved = [name for server in pool.servers for name in server.resolved]
    assert (len(resolved), all(name.startswith("sha256:") for name in resolved)) == (2, True)
    assert [server.loads + server.unloads for server in pool.servers] == [[], []]
    first, second = pool.router.fairness[0], pool.router.fairness[-1]
    assert pool.router.fairness == [first] * 4 + [second]
    assert first != second
    await until(lambda: billed(acme, (4, 4 * PROMPT_TOKENS, 8)))
    await until(lambda: billed(globex, (1, PROMPT_TOKENS, 2)))


@pytest.mark.parametrize(
    "drop", [(429, "rejected-saturated"), (503, "rejected-ttl-expired"), (429, "evicted-queue-pressure")]
)
async def test_a_dropped_request_may_be_sent_again_and_costs_nothing(pool: Pool, drop: tuple[int, str]):
    acme = await pool.gateway.tenant("acme")
    pool.router.drop = drop
    got = await acme.complete(max_tokens=2)
    assert (got.status, "Retry-After" in got.headers) == (503, True)
    assert "10.0.0.7" not in got.error["message"]
    pool.router.drop = None
    assert (await acme.complete(max_tokens=2)).status == 200
    # The dropped request is on record, with no tokens.
    await until(lambda: billed(acme, (2, PROMPT_TOKENS, 2)))


async def test_a_pool_with_one_server_on_a_cpu_gets_no_base_model_requests(pool: Pool):
    acme = await pool.gateway.tenant("acme")
    [name] = await adapters(acme, 1)
    for server in pool.servers:
        server.device = "cpu"

    async def is_limited() -> bool:
        [engine] = (await pool.gateway.admin.get("/admin/api/engines")).json["data"]
        return "up, for adapters only" in str(engine["reason"])

    await until(is_limited)
    # The limit stays while the router sends polls to servers on a GPU.
    for server in pool.servers:
        server.device = "cuda"
    polls = sum(server.polls for server in pool.servers)

    async def are_polled() -> bool:
        return sum(server.polls for server in pool.servers) >= polls + 2

    await until(are_polled)
    assert (await acme.complete(max_tokens=1)).status == 503
    assert (await acme.complete(model=name, max_tokens=1)).status == 200


async def test_a_pool_without_the_plugin_gets_no_requests(pool: Pool):
    for server in pool.servers:
        server.store = None

    async def is_refused() -> bool:
        [engine] = (await pool.gateway.admin.get("/admin/api/engines")).json["data"]
        return "a server of this pool lacks Loraplex's plugin" in str(engine["reason"])

    await until(is_refused)
