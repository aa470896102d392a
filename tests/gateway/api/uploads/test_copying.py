"""Long copies: one of an owner at once, and none outlives its caller by more than a piece."""

import asyncio
import itertools
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from adapters.store import DirectoryStore
from gateway.api.requests.memory import OPERATOR
from gateway.api.uploads.blocking_calls import BlockingCalls
from gateway.api.uploads.copying import COPIES, Copies, until_stopped
from gateway.api.uploads.receiving import Workplace


async def test_a_copy_ends_with_its_caller_and_owners_take_turns(tmp_path: Path):
    copies, disk = Copies(), BlockingCalls("test")
    store, running = DirectoryStore(tmp_path), threading.Semaphore(0)

    def pieces() -> Iterator[bytes]:
        running.release()
        for _ in itertools.count():
            threading.Event().wait(0.01)
            yield b"x"

    async def endless(owner: str) -> None:
        async with Workplace.open(store.spool(), owner, disk) as place:
            await copies.run(place, owner, lambda stop: sum(len(each) for each in until_stopped(pieces(), stop)))

    async with asyncio.timeout(30):
        tasks = [asyncio.create_task(endless("busy")) for _ in range(COPIES)]
        assert await asyncio.to_thread(running.acquire, timeout=10)
        async with Workplace.open(store.spool(), "other", disk) as place:
            assert await copies.run(place, "other", lambda stop: "done") == "done"
        assert not running.acquire(blocking=False)  # the others of the busy owner wait
        for task in tasks:
            task.cancel()
        for task in tasks:
            with pytest.raises(asyncio.CancelledError):
                await task
    assert [each for each in os.listdir(tmp_path) if each.startswith(".")] == []


async def test_the_operator_waits_for_no_tenants_copy(tmp_path: Path):
    copies, disk, store = Copies(), BlockingCalls("test"), DirectoryStore(tmp_path)
    running, free = threading.Semaphore(0), threading.Event()

    def copy(_: threading.Event) -> bool:
        running.release()
        return free.wait(60)

    async def held(owner: str) -> bool:
        async with Workplace.open(store.spool(), owner, disk) as place:
            return await copies.run(place, owner, copy)

    tasks = [asyncio.create_task(held(f"tenant-{number}")) for number in range(COPIES + 1)]
    try:
        for _ in range(COPIES):
            assert await asyncio.to_thread(running.acquire, timeout=30)
        async with asyncio.timeout(30), Workplace.open(store.spool(), OPERATOR, disk) as place:
            assert await copies.run(place, OPERATOR, lambda stop: "done") == "done"
        assert not any(task.done() for task in tasks)
        assert not running.acquire(blocking=False)  # a tenant's copy takes no place of the operator's
    finally:
        free.set()
    assert await asyncio.gather(*tasks) == [True] * len(tasks)
