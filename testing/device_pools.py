"""Adapter pools of a small base model, for tests."""

import time
from collections.abc import Callable

from adapters.tiers.device_pool import AdapterPool, Residency

Make = Callable[..., AdapterPool]


def wait_for(pool: AdapterPool, digest: str, wanted: Residency = Residency.READY) -> None:
    deadline = time.monotonic() + 60
    while (found := pool.ensure(digest)) is not wanted:
        assert time.monotonic() < deadline, f"{found}, not {wanted}"
        time.sleep(0.002)
        pool.poll()
