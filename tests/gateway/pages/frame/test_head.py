"""HEAD of streams: no byte after the head, which a proxy would take for its next client's answer."""

import asyncio
from urllib.parse import urlsplit

import pytest

from testing.gateway.running import Gateway


@pytest.mark.parametrize("path", ["/admin/events", "/admin/requests?format=csv", "/admin/requests?format=json"])
async def test_head_of_a_stream_has_no_body(gateway: Gateway, path: str):
    parts = urlsplit(gateway.url)
    async with gateway.browser() as browser:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        head = f" HTTP/1.1\r\nHost: gateway\r\nCookie: loraplex_session={browser.cookie()}\r\n\r\n"
        writer.write(f"HEAD {path}{head}GET /healthz{head}".encode())
        async with asyncio.timeout(30):
            first = await reader.readuntil(b"\r\n\r\n")
            assert b" 200 " in first
            following = await reader.readline()
        assert following == b"" or following.startswith(b"HTTP/1.1 200 ")
        writer.close()
        await writer.wait_closed()
