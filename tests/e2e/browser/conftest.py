"""A browser per process and a gateway per test. Tests are skipped where Chromium or Playwright is not installed.

The tests share an event loop, as the browser's connection does; each opens windows with their own cookies. A browser's
start and end take 1.1 s of CPU time, a window 0.25 s.
"""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from testing.browser import can_browse, chromium
from testing.gateway.running import Gateway
from testing.gateway.upstream import Upstream
from tests.gateway.conftest import migrated, model_dir, redis_url, serve  # noqa: F401  (fixtures)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser(starts_servers: None) -> AsyncIterator[Any]:
    if not can_browse():
        pytest.skip("Chromium or Playwright is not installed")
    async with chromium() as browser:
        yield browser


@pytest_asyncio.fixture(loop_scope="session")
async def upstream(starts_servers: None) -> AsyncIterator[Upstream]:
    async with Upstream().serving() as upstream:
        yield upstream


@pytest_asyncio.fixture(loop_scope="session")
async def gateway(serve: Any) -> AsyncIterator[Gateway]:  # noqa: F811
    async with serve() as gateway:
        yield gateway
