"""Adapter pools of a small base model, for tests."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from adapters.tiers.device_pool import AdapterPool, Residency

Make = Callable[..., AdapterPool]


def wait_for(pool: AdapterPool, digest: str, wanted: Residency = Residency.READY) -> None:
    deadline = time.monotonic() + 60
    while (found := pool.ensure(digest)) is not wanted:
        assert time.monotonic() < deadline, f"{found}, not {wanted}"
        time.sleep(0.002)
        pool.poll()


class Worker:
    """Copy thread whose copies end when `finish` is called."""

    def __init__(self) -> None:
        self.copies: list[Future[None]] = []

    def submit(self, *_: Any) -> Future[None]:
        self.copies.append(Future())
        return self.copies[-1]

    def finish(self) -> None:
        copies, self.copies = self.copies, []
        for copy in copies:
            copy.set_result(None)

    def shutdown(self, **_: Any) -> None: ...
