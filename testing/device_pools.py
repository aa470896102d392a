"""Adapter pools of a small base model, for tests."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from adapters.tiers.adapter_reader import HostAdapter, LoraModule
from adapters.tiers.device_pool import AdapterPool, Residency
from testing.adapter_files import BASE

Make = Callable[..., AdapterPool]
T = TypeVar("T")


def wait_for(
    pool: AdapterPool, digest: str, wanted: Residency = Residency.READY, *, tenant_id: str = "", weight: float = 1.0
) -> None:
    deadline = time.perf_counter() + 60  # some tests stop the other clock
    while (found := pool.ensure(digest, tenant_id, weight)) is not wanted:
        assert time.perf_counter() < deadline, f"{found}, not {wanted}"
        time.sleep(0.002)
        pool.poll()


class EveryAdapter:
    """Host tier that holds every adapter."""

    def __init__(self, rank: int = 8) -> None:
        self._module = LoraModule(torch.zeros(rank, 16), torch.zeros(16, rank), 1.0)

    def refuse_beyond(self, **_: int) -> None: ...

    def keep_reserved(self, _: object) -> None: ...

    def get(self, digest: str) -> HostAdapter:
        return HostAdapter(digest, len(self._module.a), {(0, "q_proj"): self._module}, 1024)


def pool_of(host: Any, num_adapters: int, worker: "Worker") -> AdapterPool:
    """Return a pool with room for this number of adapters of rank 8, whose copies end when the worker finishes them."""
    options: Any = {"max_rank": 8, "dtype": torch.float32, "device": torch.device("cpu")}
    page_bytes = AdapterPool(BASE, host, memory=1 << 22, **options).page_bytes
    pool = AdapterPool(BASE, host, memory=num_adapters * page_bytes, **options)
    pool._copier.shutdown()
    pool._copier = worker
    return pool


class Worker(ThreadPoolExecutor):
    """Copy thread whose copies end when `finish` is called. It starts no thread."""

    def __init__(self) -> None:
        super().__init__(1)
        self.copies: list[Future[Any]] = []

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        self.copies.append(Future())
        return self.copies[-1]

    def finish(self) -> None:
        copies, self.copies = self.copies, []
        for copy in copies:
            copy.set_result(None)
