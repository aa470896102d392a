"""Share of a tenant that is spread over all engines, through two gateways with two workers each and real engines."""

import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from testing.engine import RunningServer
from testing.gateway.running import settings
from testing.gateway.spread_tenant import MODEL, SEATS, entitled, is_within, share, spread_tenant
from testing.gateway.upstream import TOKEN
from testing.tiny import save_model

NUM_ENGINES = 3
WARM_SECONDS = 2.0
# The share is that of the newest WINDOW slices of a second. A busy machine needs more time until it is that of the
# weights.
WINDOW = 4
LIMIT_SECONDS = 40.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_model(folder)
    return folder


@pytest.fixture(scope="module")
def engines(tiny: Path, starts_servers: None, takes_a_core: None) -> Iterator[list[str]]:
    with ExitStack() as stack:
        config = {"max_num_seqs": SEATS}
        servers = [RunningServer(tiny, config=config, internal_token=TOKEN) for _ in range(NUM_ENGINES)]
        for server in servers:
            stack.enter_context(closing(server))
        yield [server.url for server in servers]


async def test_a_tenant_spread_over_all_engines_has_one_share(
    tmp_path: Path, tiny: Path, engines: list[str], redis_url: str, migrated_postgres_url: str
):
    """Each engine has a tenant of its own, which asks it directly; the spread tenant comes through both gateways.

    By the engines' own counters alone it would get half of each engine.
    """
    of = settings(tmp_path, tiny, engines, redis_url, base_model=MODEL, database_url=migrated_postgres_url)
    expected, slices = entitled(engines, 1.0), deque[Counter[str]](maxlen=WINDOW)
    async with spread_tenant(of) as loops:
        await loops.run(WARM_SECONDS)
        deadline = time.monotonic() + LIMIT_SECONDS
        while not (len(slices) == WINDOW and is_within(share(sum(slices, Counter())), expected)):
            assert time.monotonic() < deadline, (expected, [share(tokens) for tokens in slices])
            slices.append(await loops.run(1.0))
