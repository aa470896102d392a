"""Clients that leave in the middle of a change: what belongs to the change is done nevertheless."""

import asyncio
import threading
import uuid
from collections.abc import Coroutine, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from adapters.spool import PREFIX
from adapters.store import DirectoryStore
from gateway.access.throttle import WrongKeyThrottle
from gateway.api.idempotency import Idempotency
from gateway.fleet.discovery.drains import Drains
from gateway.records.adapters.catalog import Catalog
from gateway.records.bases.records import BaseRecords
from gateway.records.tenants import bulk
from testing.gateway.running import MODEL_CONFIG, Gateway, until
from testing.gateway.upstream import Upstream
from tests.gateway.api.adapters.test_adapters import files, push
from tests.gateway.records.maintenance.test_collect import COLLECT, make_old, stored


class Held:
    """Calls of a function that wait at their end. began: set once there is one. goes_on: ends the wait."""

    def __init__(self) -> None:
        self.began, self.goes_on = asyncio.Event(), asyncio.Event()

    async def leave(self, gateway: Gateway, call: Coroutine[Any, Any, Any]) -> None:
        """Make a call, and leave as soon as it waits. It goes on once the gateway has noticed."""
        leaving = asyncio.create_task(call)
        await asyncio.wait_for(self.began.wait(), 30)
        leaving.cancel()
        await asyncio.wait({leaving})

        async def is_cancelled() -> bool:
            """Return whether the handler is being cancelled, or only the request of the metrics runs."""
            page = (await gateway.admin.get("/metrics")).body.decode()
            is_alone = "loraplex_gateway_http_in_flight 1.0" in page
            return is_alone or any(task.cancelling() for task in asyncio.all_tasks())

        try:
            await until(is_cancelled)
        finally:
            self.goes_on.set()


def hold(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, number: int = 1) -> Held:
    """Make the calls of a coroutine function wait at their end. number: ordinal of the first call that waits."""
    held, real, calls = Held(), getattr(owner, name), 0

    async def held_up(*given: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        is_held, result = calls >= number, await real(*given, **options)
        if is_held:
            held.began.set()
            await held.goes_on.wait()
        return result

    monkeypatch.setattr(owner, name, held_up)
    return held


async def is_on_record(gateway: Gateway, action: str) -> bool:
    return bool((await gateway.admin.get(f"/admin/api/audit?action={action}")).json["data"])


async def test_a_call_with_an_idempotency_key_may_be_repeated(gateway: Gateway, monkeypatch: pytest.MonkeyPatch):
    """The client leaves while Redis stores that the call is in progress."""
    held, headers = hold(monkeypatch, Idempotency, "_call"), {"Idempotency-Key": uuid.uuid4().hex}

    async def create() -> int:
        return (await gateway.admin.post("/admin/api/tenants", {"name": "acme"}, headers=headers)).status

    async def is_created() -> bool:
        return await create() == 201

    await held.leave(gateway, create())
    await until(is_created)


@pytest.mark.parametrize("act", ["drain", "resume"])
async def test_a_drain_is_on_record(act: str, gateway: Gateway, upstream: Upstream, monkeypatch: pytest.MonkeyPatch):
    path, body = "/admin/api/engines/", {"url": upstream.url}
    if act == "resume":
        assert (await gateway.admin.post(f"{path}drain", body)).status == 200
    held = hold(monkeypatch, Drains, act)
    await held.leave(gateway, gateway.admin.post(path + act, body))
    await until(lambda: is_on_record(gateway, f"engine.{act}"))
    # Drains have no lifetime, and the tests share a Redis.
    assert (await gateway.admin.post(f"{path}resume", body)).status == 200


async def test_a_new_base_model_has_its_price(gateway: Gateway, monkeypatch: pytest.MonkeyPatch):
    held, config = hold(monkeypatch, BaseRecords, "add"), MODEL_CONFIG | {"max_position_embeddings": 128}
    base = {"name": "second", "digest": "b" * 64, "config": config, "price": {"input": 1, "output": 2}}
    await held.leave(gateway, gateway.admin.post("/admin/api/bases", base))

    async def has_price() -> bool:
        prices = (await gateway.admin.get("/admin/api/prices")).json["data"]
        return "second" in [price["model"] for price in prices]

    await until(has_price)


async def test_content_in_use_comes_back_to_the_store(
    gateway: Gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The client of a collection leaves while content is set aside that gets a version meanwhile."""
    acme = await gateway.tenant("acme")
    assert (await push(acme, "a", files())).status == 201
    before = stored(tmp_path)
    await make_old(tmp_path)
    held, goes_on, loop = Held(), threading.Event(), asyncio.get_running_loop()
    set_aside, check, checks = DirectoryStore.set_aside, Catalog.referenced, []

    def held_up(store: DirectoryStore, digest: str, unused_seconds: float) -> Any:
        aside = set_aside(store, digest, unused_seconds)
        loop.call_soon_threadsafe(held.began.set)
        assert goes_on.wait(60)
        return aside

    async def referenced(catalog: Catalog, digests: Sequence[str], since: datetime) -> set[str]:
        checks.append(digests)
        return set() if len(checks) == 1 else await check(catalog, digests, since)

    async def is_back() -> bool:
        return stored(tmp_path) == before and not list((tmp_path / "adapters").glob(f"{PREFIX}*"))

    monkeypatch.setattr(DirectoryStore, "set_aside", held_up)
    monkeypatch.setattr(Catalog, "referenced", referenced)
    try:
        await held.leave(gateway, gateway.admin.post(COLLECT))
        assert stored(tmp_path) == set()
    finally:
        goes_on.set()
    await until(is_back)


async def test_a_failed_log_in_is_on_record(gateway: Gateway, monkeypatch: pytest.MonkeyPatch):
    held = hold(monkeypatch, WrongKeyThrottle, "count_form")
    async with gateway.browser(None) as browser:
        await held.leave(gateway, browser.log_in("a guess"))
        await until(lambda: is_on_record(gateway, "login.failed"))


async def test_a_confirmed_change_of_many_tenants_reaches_all(gateway: Gateway, monkeypatch: pytest.MonkeyPatch):
    for name in ("one", "two", "three"):
        await gateway.tenant(name)
    monkeypatch.setattr(bulk, "AT_ONCE", 1)
    held = hold(monkeypatch, bulk, "change_tenant", number=2)
    body = {"filter": {}, "suspended": True, "expect": 3}
    await held.leave(gateway, gateway.admin.post("/admin/api/tenants/bulk", body))

    async def are_suspended() -> bool:
        tenants = (await gateway.admin.get("/admin/api/tenants")).json["data"]
        return all(tenant["suspended"] for tenant in tenants)

    await until(are_suspended)
