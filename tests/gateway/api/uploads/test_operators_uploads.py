"""The operator's uploads wait for no tenant's: neither for a check nor for the disk."""

import asyncio
import threading

import pytest

from adapters.spool import Spool
from gateway.api.uploads.blocking_calls import MAX_PER_TENANT, THREADS
from gateway.api.uploads.checking import QUICK_CHECKS, CheckClient
from testing.gateway.running import Gateway, until
from tests.gateway.api.adapters.test_adapters import files, push
from tests.gateway.api.uploads.test_resumable import ARCHIVE, begin, put

OF_ACME = "/admin/api/tenants/acme"


async def test_the_operators_check_waits_for_no_tenants(gateway: Gateway, monkeypatch: pytest.MonkeyPatch):
    run, goes_on, held = CheckClient.run, asyncio.Event(), 0

    async def hold(self: CheckClient, job: bytes, seconds: float) -> tuple[int, bytes]:
        nonlocal held
        if held < QUICK_CHECKS:
            held += 1
            await goes_on.wait()
        return await run(self, job, seconds)

    async def all_places_are_held() -> bool:
        return held == QUICK_CHECKS

    monkeypatch.setattr(CheckClient, "run", hold)
    tenants = [await gateway.tenant(name) for name in ("acme", "globex", "initech")]
    waiting = [asyncio.create_task(push(tenant, "theirs", files())) for tenant in tenants]
    try:
        await until(all_places_are_held)
        mine = push(gateway.admin, "mine", files(), f"{OF_ACME}/adapters")
        assert (await asyncio.wait_for(mine, 30)).status == 201
        assert not any(task.done() for task in waiting)
    finally:
        goes_on.set()
    assert [answer.status for answer in await asyncio.gather(*waiting)] == [201] * 3


async def test_the_operators_files_wait_for_no_tenants(gateway: Gateway, monkeypatch: pytest.MonkeyPatch):
    """All threads that write tenants' files are blocked, as by a slow disk."""
    make, free, blocked = Spool.make, threading.Event(), list[Spool]()

    def block(spool: Spool) -> None:
        if len(blocked) < THREADS:
            blocked.append(spool)
            assert free.wait(120)
        make(spool)

    async def all_are_blocked() -> bool:
        return len(blocked) == THREADS

    monkeypatch.setattr(Spool, "make", block)
    acme, globex, initech = [await gateway.tenant(name) for name in ("acme", "globex", "initech")]
    admin, parts = gateway.admin, f"{OF_ACME}/adapter-uploads"
    writing = [
        asyncio.create_task(push(tenant, f"number-{number}", files()))
        for tenant in (globex, initech)
        for number in range(MAX_PER_TENANT)
    ]
    try:
        await until(all_are_blocked)
        waiting = asyncio.create_task(push(acme, "theirs", files()))
        async with asyncio.timeout(60):
            assert (await push(admin, "mine", files(), f"{OF_ACME}/adapters")).status == 201
            upload = (await begin(admin, path=parts)).json["id"]
            assert (await put(admin, upload, 0, ARCHIVE, path=parts)).status == 200
            assert (await admin.post(f"{parts}/{upload}/complete")).status == 201
        assert not waiting.done()
    finally:
        free.set()
    assert [answer.status for answer in await asyncio.gather(waiting, *writing)] == [201] * (1 + len(writing))
