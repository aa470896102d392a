"""Bodies of refused requests, whose rest is dropped."""

import asyncio
import time
from typing import Any

import pytest

from gateway.api.requests.refused_bodies import UnreadBodies, _owner
from gateway.caller import CALLER, Caller
from testing.gateway.running import Client, Gateway
from tests.gateway.api.requests.test_bodies import answered, connected, head

# More than the system's buffers of a connection take.
SIZE = 48 * 2**20


async def refused(gateway: Gateway, client: Client) -> tuple[int, float]:
    """Send a body that is too large, and read the answer afterwards. Return its status and the seconds of sending."""
    async with connected(gateway) as (reader, writer):
        began = time.monotonic()
        kind = "Content-Type: application/json"
        writer.write(head(client, "/v1/completions", f"Content-Length: {SIZE}", kind) + bytes(SIZE))
        await writer.drain()
        sent = time.monotonic() - began
        status, top, _ = await answered(reader)
        assert b"connection: close" in top.lower()
        return status, sent


def rate(monkeypatch: pytest.MonkeyPatch, bytes_per_second: float) -> None:
    monkeypatch.setattr(UnreadBodies.__init__, "__defaults__", (bytes_per_second,))


async def test_a_client_that_reads_after_sending_gets_its_answer(serve: Any, monkeypatch: pytest.MonkeyPatch):
    rate(monkeypatch, 2**40)
    async with serve() as gateway:
        assert (await refused(gateway, await gateway.tenant("acme")))[0] == 413


async def test_a_tenants_refused_bodies_are_dropped_at_a_limited_rate(serve: Any, monkeypatch: pytest.MonkeyPatch):
    rate(monkeypatch, 2 * SIZE)
    async with serve() as gateway:
        acme, other = await gateway.tenant("acme"), await gateway.tenant("other")
        many = [asyncio.create_task(refused(gateway, acme)) for _ in range(8)]
        await asyncio.sleep(0.3)
        status, sent = await refused(gateway, other)
        slow = await asyncio.gather(*many)
        assert [status for status, _ in slow] == [413] * 8
        assert status == 413
        # Eight bodies of one tenant share its rate; the other tenant does not wait for them.
        assert max(seconds for _, seconds in slow) > 2.0
        assert sent < max(seconds for _, seconds in slow) / 2


async def test_a_refused_client_that_sends_nothing_keeps_its_connection_for_a_second(serve: Any):
    async with serve() as gateway, connected(gateway) as (reader, writer):
        began = time.monotonic()
        writer.write(head(gateway.client("lpx_wrong"), "/v1/completions", "Content-Length: 9") + b"{")
        assert (await asyncio.wait_for(reader.read(), 30.0)).startswith(b"HTTP/1.1 401 ")
        # aiohttp alone would wait for 10 s.
        assert time.monotonic() - began < 6.0


def test_all_addresses_of_an_ipv6_network_share_a_rate():
    owners = set()
    for address in ("2001:db8::1", "2001:db8::2", "2001:db8:1::1"):
        token = CALLER.set(Caller(address, "r"))
        owners.add(_owner())
        CALLER.reset(token)
    assert len(owners) == 2
