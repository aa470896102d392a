from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from testing.gateway.check_servers import end_spare
from testing.gateway.running import Gateway, running_alone, settings
from testing.gateway.upstream import Upstream

Start = Callable[..., AbstractAsyncContextManager[Gateway]]


@pytest.fixture
def start(tmp_path: Path, model_dir: Path, upstream: Upstream, redis_url: str) -> Start:
    """Start a gateway with further settings."""
    return lambda **overrides: running_alone(settings(tmp_path, model_dir, [upstream.url], redis_url, **overrides))


@pytest.fixture(autouse=True)
def _kept_check_server() -> None:
    """Let each gateway have its own process for the checks."""
    end_spare()
