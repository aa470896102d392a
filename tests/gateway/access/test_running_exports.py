"""Exports that run when their key, session or tenant becomes invalid."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import pytest

from gateway.pages.requests import export
from testing.gateway.running import Client, Gateway
from tests.gateway.access.test_sessions import tenants_key

# Many times the time in which a gateway reads a change.
SECONDS = 20


@pytest.fixture(autouse=True)
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make exports of the request log endless."""

    async def pages(_read: Any, _which: Any, page: Any) -> AsyncIterator[Sequence[Any]]:
        while True:
            yield page.entries
            await asyncio.sleep(0.05)

    monkeypatch.setattr(export, "_pages", pages)


async def read(client: Client, path: str, begun: asyncio.Event) -> None:
    """Read an export until its connection breaks."""
    async with client.session.get(client.url + path, headers=client.headers) as response:
        assert response.status == 200
        begun.set()
        with pytest.raises(aiohttp.ClientError):
            await response.read()


async def ends(client: Client, path: str, revoke: Any) -> None:
    """Check that an export runs until `revoke`, a request, and no longer."""
    begun = asyncio.Event()
    running = asyncio.create_task(read(client, path, begun))
    async with asyncio.timeout(SECONDS):
        await begun.wait()
        await asyncio.wait({running}, timeout=1)
        assert not running.done()
        assert (await revoke).status in (200, 303)
        await running


@pytest.mark.parametrize("by", ["key", "session", "tenant"])
async def test_a_tenants_export_ends(by: str, gateway: Gateway):
    key_id, key = await tenants_key(gateway)
    async with gateway.browser(key, "/console") as browser:
        [session] = (await gateway.admin.get("/admin/api/sessions")).json["data"]
        path = {"key": f"/admin/api/keys/{key_id}", "session": f"/admin/api/sessions/{session['id']}"}.get(by)
        revoke = (
            gateway.admin.call("PATCH", "/admin/api/tenants/acme", json={"suspended": True})
            if path is None
            else gateway.admin.call("DELETE", path)
        )
        await ends(browser, "/console/requests?format=csv", revoke)


async def test_an_operators_export_ends_with_the_log_out(gateway: Gateway):
    async with gateway.browser() as browser:
        await ends(browser, "/admin/requests?format=json", browser.submit("/admin/logout"))
