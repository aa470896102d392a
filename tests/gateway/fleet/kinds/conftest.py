"""A gateway before the double of one foreign server."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from testing.gateway.foreign_double import ForeignDouble
from testing.gateway.running import Gateway


@pytest.fixture
async def both(
    tmp_path: Path, model_dir: Path, redis_url: str, migrated: Path, request: pytest.FixtureRequest
) -> AsyncIterator[tuple[Gateway, ForeignDouble]]:
    """Start the gateway and the double by the test module's `served`. Parameter: options of the engine's address."""
    async with request.module.served(tmp_path, model_dir, redis_url, migrated, getattr(request, "param", "")) as pair:
        yield pair
