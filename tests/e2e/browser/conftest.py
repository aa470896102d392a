"""A browser per module and a gateway per test. Tests are skipped where Chromium or Playwright is not installed.

A module's tests share its event loop, as the browser's connection does; each opens windows with their own cookies.
"""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from testing.browser import can_browse, chromium
from testing.gateway.running import Gateway
from testing.gateway.upstream import Upstream
from tests.gateway.conftest import migrated, model_dir, redis_url, serve  # noqa: F401  (fixtures)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(starts_servers: None) -> AsyncIterator[Any]:
    if not can_browse():
        pytest.skip("Chromium or Playwright is not installed")
    async with chromium() as browser:
        yield browser


@pytest_asyncio.fixture(loop_scope="module")
async def upstream(starts_servers: None) -> AsyncIterator[Upstream]:
    async with Upstream().serving() as upstream:
        yield upstream


@pytest_asyncio.fixture(loop_scope="module")
async def gateway(serve: Any) -> AsyncIterator[Gateway]:  # noqa: F811
    async with serve() as gateway:
        yield gateway
