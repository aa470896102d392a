"""Live updates: the strip is sent when it changes, streams are limited, and end with their session."""

import asyncio
import re
from typing import Any

from gateway.pages.frame import live
from gateway.pages.frame.live import encode
from testing.gateway.running import ADMIN_KEY, Browser


async def read_until(response: Any, text: bytes, seconds: float = 20.0) -> bytes:
    read = b""
    async with asyncio.timeout(seconds):
        while text not in read:
            chunk = await response.content.readany()
            assert chunk, read
            read += chunk
    return read


async def test_a_page_learns_that_an_engine_is_gone(gateway, upstream):
    async with Browser(gateway.url, "/admin") as browser:
        await browser.log_in(ADMIN_KEY)
        async with browser.session.get(gateway.url + "/admin/events") as response:
            assert response.headers["Content-Type"].startswith("text/event-stream")
            assert b"1/1 engines up" in await read_until(response, b"event: tick")
            upstream.healthy = False
            await read_until(response, b"0/1 engines up")


async def test_a_stream_ends_with_its_session(gateway, monkeypatch):
    monkeypatch.setattr(live, "CHECK_SECONDS", 1)
    async with Browser(gateway.url, "/admin") as browser:
        await browser.log_in(ADMIN_KEY)
        async with browser.session.get(gateway.url + "/admin/events") as response:
            await read_until(response, b"event: tick")
            [session] = (await gateway.admin.get("/admin/api/sessions")).json["data"]
            assert (await gateway.admin.call("DELETE", f"/admin/api/sessions/{session['id']}")).status in (200, 204)
            await read_until(response, b"event: end\ndata: session\n")


async def test_a_page_can_say_that_its_session_has_ended(gateway):
    async with gateway.browser() as browser:
        page = (await browser.get("/admin/tenants?q=a&sort=-name")).body.decode()
        [note] = re.findall(r'<div [^>]*id="session-ended"[^>]* hidden>.*?</div></div>', page)
        [link] = re.findall(r'href="([^"]+)"', note)
        assert link == "/admin/login?next=/admin/tenants%3Fq%3Da%26sort%3D-name"
        assert b'value="/admin/tenants?q=a&amp;sort=-name"' in (await gateway.nobody.get(link)).body
        assert b"session-ended" not in (await gateway.nobody.get("/admin/login")).body


async def test_a_session_has_a_limited_number_of_streams(gateway, monkeypatch):
    monkeypatch.setattr(live, "MAX_OF_SESSION", 2)
    async with Browser(gateway.url, "/admin") as browser:
        await browser.log_in(ADMIN_KEY)
        first = await browser.session.get(gateway.url + "/admin/events")
        second = await browser.session.get(gateway.url + "/admin/events")
        assert (await browser.get("/admin/events")).error["code"] == "too_many_streams"
        first.close()
        second.close()


async def test_streams_of_tenants_leave_operators_theirs(gateway, monkeypatch):
    monkeypatch.setattr(live, "MAX_OF_TENANTS", 2)
    streams, keys = [], [(await gateway.tenant(name)).key for name in ("acme", "globex", "initech")]
    async with gateway.browser() as operator:
        for key in keys:
            async with gateway.browser(key, "/console") as tenant:
                stream = await gateway.session.get(
                    gateway.url + "/console/events", headers={"Cookie": f"loraplex_session={tenant.cookie()}"}
                )
                streams.append(stream)
        assert [stream.status for stream in streams] == [200, 200, 429]
        async with operator.session.get(gateway.url + "/admin/events") as response:
            assert response.status == 200
            await read_until(response, b"event: tick")
    for stream in streams:
        stream.close()


async def test_without_a_session_there_is_no_stream(gateway):
    for path in ("/admin/events", "/console/events"):
        assert (await gateway.nobody.get(path, allow_redirects=False)).status == 303


def test_a_line_break_cannot_end_an_event():
    assert encode("strip", "a\nevent: end\n\nb") == b"event: strip\ndata: a\ndata: event: end\ndata: \ndata: b\n\n"
