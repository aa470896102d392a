"""Slow calls of uploads to store and disk hold up no other work, nor another tenant's uploads for long."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from adapters.store import DirectoryStore
from adapters.upload_parts import DirectoryUploadParts
from gateway.api.requests.memory import OPERATOR
from gateway.api.uploads.blocking_calls import THREADS, BlockingCalls
from gateway.api.uploads.receiving import Workplace
from testing.gateway.running import Client, until
from tests.gateway.api.adapters.test_adapters import files, push
from tests.gateway.api.uploads.conftest import Start
from tests.gateway.api.uploads.test_resumable import ARCHIVE, PATH, begin, put


@pytest.fixture
def goes_on() -> Iterator[threading.Event]:
    """Return an event that ends the slow calls, at the latest with the test."""
    event = threading.Event()
    yield event
    event.set()


async def upload(acme: Client, call: str) -> int:
    """Send a request that makes a call of the store, and return the status of its answer."""
    if call in ("stage", "publish"):
        return (await push(acme, "a", files(1))).status
    id_ = (await begin(acme)).json["id"]
    if call == "remove_upload":
        return (await acme.call("DELETE", f"{PATH}/{id_}")).status
    return (await put(acme, id_, 0, ARCHIVE)).status


CALLS = {
    "stage": DirectoryStore,
    "publish": DirectoryStore,
    "save": DirectoryUploadParts,
    "remove_upload": DirectoryUploadParts,
}


@pytest.mark.parametrize(("call", "store"), CALLS.items())
async def test_slow_calls_take_no_thread_of_other_work(
    store: type, call: str, start: Start, monkeypatch: pytest.MonkeyPatch, goes_on: threading.Event
):
    do, begun = getattr(store, call), threading.Event()

    def slow(*arguments: Any) -> None:
        begun.set()
        assert goes_on.wait(60)
        do(*arguments)

    async with start() as gateway:
        acme = await gateway.tenant("acme")
        monkeypatch.setattr(store, call, slow)
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        uploading = asyncio.create_task(upload(acme, call))
        await until(lambda: asyncio.sleep(0, begun.is_set()))
        # The only thread of the default pool, which the gateway shares with this test.
        await asyncio.wait_for(asyncio.to_thread(int), 30)
        assert not uploading.done()
        goes_on.set()
        assert await uploading in (200, 201)


async def test_a_tenants_slow_writes_leave_threads_for_others(goes_on: threading.Event, tmp_path: Path):
    """The disk is slow for one tenant's uploads."""
    store = DirectoryStore(tmp_path)
    disk = BlockingCalls("test")
    slow, other = (Workplace(store.spool(), owner, disk) for owner in ("slow", "other"))
    waiting = [asyncio.create_task(slow.in_thread(goes_on.wait, 60)) for _ in range(2 * THREADS)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(other.in_thread(int, "7"), 30) == 7
    assert not any(each.done() for each in waiting)
    goes_on.set()
    assert await asyncio.gather(*waiting) == [True] * len(waiting)


async def test_a_tenants_slow_calls_leave_threads_for_others(goes_on: threading.Event):
    threads = BlockingCalls("test")
    slow = [asyncio.create_task(threads.run("slow", goes_on.wait, 60)) for _ in range(2 * THREADS)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(threads.run("other", int, "7"), 30) == 7
    # Two tenants hold all threads of tenants, and none of the operator's.
    slow += [asyncio.create_task(threads.run("slow too", goes_on.wait, 60)) for _ in range(2 * THREADS)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(threads.run(OPERATOR, int, "8"), 30) == 8
    assert not any(each.done() for each in slow)
    goes_on.set()
    assert await asyncio.gather(*slow) == [True] * len(slow)
