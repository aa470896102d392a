"""A browser and a gateway for the tests of pages. They are skipped where Chromium or Playwright is not installed."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from testing.browser import can_browse, chromium
from tests.gateway.conftest import (  # noqa: F401  (fixtures)
    gateway,
    migrated,
    model_dir,
    redis_url,
    serve,
    upstream,
)


@pytest.fixture
async def browser(starts_servers: None) -> AsyncIterator[Any]:
    if not can_browse():
        pytest.skip("Chromium or Playwright is not installed")
    async with chromium() as browser:
        yield browser
