from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from testing.gateway.running import Gateway, running, settings
from testing.gateway.upstream import Upstream

Start = Callable[..., AbstractAsyncContextManager[Gateway]]


@pytest.fixture
def start(tmp_path: Path, model_dir: Path, upstream: Upstream, redis_url: str) -> Start:
    """Start a gateway with further settings."""
    return lambda **overrides: running(settings(tmp_path, model_dir, [upstream.url], redis_url, **overrides))
