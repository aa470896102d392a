"""Loads into host memory for waiting requests, and for those whose clients have left."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.tiers.adapter_reader import AdapterReader
from adapters.tiers.device_pool import MAX_FETCHING, MAX_FETCHING_OF_TENANT, AdapterPool
from adapters.tiers.host_cache import HostCache
from engine.scheduling.kv_cache import KVCache
from engine.scheduling.plan import StepLimits
from engine.scheduling.request import NewRequest, Request, SamplingParams
from engine.scheduling.scheduler import Scheduler
from testing.adapter_files import BASE, tensors, write

TIMEOUT = 60
# Loads that run at once; the host cache has more threads than a tenant may use.
AT_ONCE = 2


class World:
    """A scheduler with a pool and a host cache, whose loads read nothing before `open`. begun: adapters being read."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host = HostCache(None, BASE, 1 << 24, torch.float32)
        options: Any = {"memory": 1 << 22, "max_rank": 8, "dtype": torch.float32, "device": torch.device("cpu")}
        self.pool = AdapterPool(BASE, self.host, **options)
        self.scheduler = Scheduler(KVCache(64, 16), self.pool, StepLimits(8, 64))
        self.digests = [self.host.add_path(write(folder / str(i), tensors(seed=i))) for i in range(MAX_FETCHING)]
        self.begun: list[str] = []
        self._gate, self._arrivals = threading.Event(), 0
        read = AdapterReader.read

        def read_later(reader: AdapterReader, checkpoint: Any, size: int) -> Any:
            self.begun.append(checkpoint.digest)
            self._gate.wait(TIMEOUT)
            return read(reader, checkpoint, size)

        monkeypatch.setattr(AdapterReader, "read", read_later)

    def ask(self, adapter: str, tenant_id: str = "acme") -> Request:
        self._arrivals += 1
        new = NewRequest(str(self._arrivals), [1, 2], SamplingParams(max_tokens=1), adapter, tenant_id)
        request = Request(new, arrival_number=self._arrivals)
        self.scheduler.add(request)
        return request

    def begin(self) -> None:
        """Let the scheduler ask for the adapters, and wait until as many loads run as may."""
        self.scheduler.schedule()
        self.wait_for(lambda: len(self.begun) == AT_ONCE)

    def wait_for(self, is_done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT
        while not is_done():
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def open(self) -> None:
        self._gate.set()

    def close(self) -> None:
        self.open()
        self.pool.close()
        self.host.close()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World(tmp_path, monkeypatch)
    yield made
    made.close()


def test_nothing_is_loaded_for_clients_that_have_left(world: World) -> None:
    asked = [world.ask(digest) for digest in world.digests]
    world.begin()
    for request in asked:
        world.scheduler.abort(request.request_id)
    assert world.host._threads.num_pending == 0
    assert not world.pool._fetching
    world.open()
    world.wait_for(lambda: world.host.stats().loads == AT_ONCE)
    assert sorted(world.begun) == sorted(world.digests[:AT_ONCE])
    assert not world.pool.is_loading


def test_a_load_goes_on_for_the_request_that_still_waits(world: World) -> None:
    asked = [world.ask(digest) for digest in world.digests]
    stays = world.ask(world.digests[-1])
    world.begin()
    arriving = world.host.fetch(world.digests[-2], "")  # a request that has not entered the engine yet
    for request in asked:
        world.scheduler.abort(request.request_id)
    world.open()
    assert arriving.result(TIMEOUT).digest == world.digests[-2]

    def is_served() -> bool:
        world.scheduler.schedule()
        return bool(stays.seat >= 0)

    world.wait_for(is_served)


def test_a_tenants_slow_loads_leave_one_for_the_others(world: World) -> None:
    for digest in world.digests[1:]:
        world.ask(digest, "slow")
    world.ask(world.digests[0], "slow")
    world.begin()
    assert len(world.pool._fetching) == MAX_FETCHING_OF_TENANT < MAX_FETCHING
    world.ask(world.digests[0], "other")
    world.scheduler.schedule()
    assert world.digests[0] in world.pool._fetching


def test_one_that_comes_back_has_its_adapter_loaded(world: World) -> None:
    asked = [world.ask(digest) for digest in world.digests]
    world.begin()
    for request in asked:
        world.scheduler.abort(request.request_id)
    again = world.ask(world.digests[-1])

    def is_served() -> bool:
        world.scheduler.schedule()
        return bool(again.seat >= 0)

    world.open()
    world.wait_for(is_served)
