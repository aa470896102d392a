"""Shares of tenants that are spread over all engines, through two gateways with two workers each and real engines."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import fmean

import pytest

from testing.engine import RunningServer
from testing.gateway.running import settings
from testing.gateway.spread_tenant import MODEL, entitled, is_within, share, spread_tenants, until_all_have_waited
from testing.gateway.upstream import TOKEN
from testing.tiny import save_model

NUM_ENGINES = 3
WEIGHTS = {"one": 1.0, "two": 2.0}
# With four seats an engine has at times no request of a tenant that is due two thirds of a seat. Its share is then 7 %
# too small.
SEATS = 8
# Requests of a spread tenant for each engine: more than its seats, and so few that none waits 30 s on a busy machine.
AT_ONCE = 8
# Windows have so many tokens, because a busy machine generates fewer in a time.
WINDOWS, WINDOW_TOKENS = 4, 3000
WARM_SECONDS, LIMIT_SECONDS = 60.0, 120.0


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


@pytest.mark.timeout(300)
async def test_tenants_spread_over_all_engines_have_one_share_each(
    tmp_path: Path, tiny: Path, engines: list[str], redis_url: str, migrated_postgres_url: str
):
    """Each engine has a tenant of its own, which asks it directly; the spread tenants come through both gateways.

    By the engines' own counters alone they would get a quarter and a half of each engine, and its own tenant a quarter.
    The mean of all windows counts, so no window passes by luck.
    """
    of = settings(tmp_path, tiny, engines, redis_url, base_model=MODEL, database_url=migrated_postgres_url)
    expected, found = entitled(engines, WEIGHTS), list[dict[str, float]]()
    async with spread_tenants(of, WEIGHTS, AT_ONCE) as loops:
        await until_all_have_waited(loops, engines, len(WEIGHTS) + 1, WARM_SECONDS)
        deadline = time.monotonic() + LIMIT_SECONDS
        for _ in range(WINDOWS):
            tokens = Counter[str]()
            while tokens.total() < WINDOW_TOKENS:
                assert time.monotonic() < deadline, (expected, found)
                tokens += await loops.run(0.5)
            found.append({name: share(tokens, name) for name in WEIGHTS})
    for name in WEIGHTS:
        assert is_within(fmean(window[name] for window in found), expected[name]), (expected, found)
