"""Keys that no request has verified: a tenant can make any number of them, so they have no rate of their own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest

from gateway.access.auth import Authenticator
from gateway.api import unserved_rate
from gateway.errors import Unavailable
from testing.gateway.clocks import SleepClock
from testing.gateway.running import Client, Gateway, until
from testing.gateway.upstream import Upstream
from tests.gateway.api.test_unserved_rate import BURST, DELAYED, RATE, metric


@pytest.fixture
async def keys(
    serve: Any, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Gateway, list[Client]]]:
    """Start a gateway whose buckets never fill again, and make more keys of a tenant than requests fit in a bucket."""
    clock = SleepClock()
    clock.put(monkeypatch, unserved_rate)
    clock.go.set()
    async with serve(unserved_per_second=RATE) as gateway:
        # The operator's requests do not wait behind those of its address.
        gateway.admin = gateway.client((await gateway.admin.post("/admin/api/keys")).json["key"])
        await gateway.tenant("mallory")
        made = [await gateway.admin.post("/admin/api/tenants/mallory/keys") for _ in range(BURST + 6)]
        yield gateway, [gateway.client(each.json["key"]) for each in made]


@pytest.mark.parametrize("path", ["/openapi.json", "/console/login", "/v1/none", "/console/"])
async def test_they_count_by_address_on_routes_that_check_none(path: str, keys: tuple[Gateway, list[Client]]):
    """Each key had a rate of its own there."""
    gateway, clients = keys
    for client in clients:
        await client.get(path, allow_redirects=False)
    assert await metric(gateway, DELAYED) >= 5


async def test_they_count_by_address_beside_a_session(keys: tuple[Gateway, list[Client]]):
    gateway, clients = keys
    async with gateway.browser(clients[0].key or "", "/console") as browser:
        for client in clients:
            assert (await browser.get("/console/help", headers=client.headers)).status == 200
    assert await metric(gateway, DELAYED) >= 5


async def test_they_count_by_address_if_a_request_is_refused_before_its_key_is_checked(
    keys: tuple[Gateway, list[Client]],
):
    gateway, clients = keys
    for _ in range(2):
        for client in clients:
            assert (await client.get("/v1/key?x=1")).status == 400
    delayed = await metric(gateway, DELAYED)
    assert delayed >= len(clients)
    # The first request that verifies a key still waits behind the address, and the next ones do not.
    assert [(await clients[0].get("/v1/key")).status for _ in range(3)] == [200] * 3
    assert await metric(gateway, DELAYED) == delayed + 1


async def test_refusals_before_a_known_key_is_checked_count_for_its_tenant(keys: tuple[Gateway, list[Client]]):
    gateway, clients = keys
    for client in clients:
        assert (await client.get("/v1/key")).status == 200
    assert await metric(gateway, DELAYED) == 0
    for _ in range(unserved_rate.TENANT_RATE):
        for client in clients:
            assert (await client.get("/v1/key?x=1")).status == 400
    assert await metric(gateway, DELAYED) > 0


async def test_a_failure_of_the_gateway_lets_no_key_count_by_address(
    keys: tuple[Gateway, list[Client]], monkeypatch: pytest.MonkeyPatch
):
    """After an outage of the database, all clients of an address waited for each other."""
    gateway, clients = keys
    with monkeypatch.context() as outage:
        outage.setattr(Authenticator, "_find", fail)
        for client in clients:
            assert (await client.get("/v1/key")).status == 503
    for client in clients:
        assert (await client.get("/v1/key")).status == 200
    assert await metric(gateway, DELAYED) == 0


async def test_a_key_has_a_rate_while_the_gateway_fails_to_verify_it(
    keys: tuple[Gateway, list[Client]], monkeypatch: pytest.MonkeyPatch
):
    """Its requests counted for its address, which does not delay requests with a key."""
    gateway, (client, other, *_) = keys
    with monkeypatch.context() as outage:
        outage.setattr(Authenticator, "_find", fail)
        for _ in range(BURST + 6):
            assert (await client.get("/v1/key")).status == 503
    # The operator's own key cannot be verified during the outage either.
    delayed = await metric(gateway, DELAYED)
    assert delayed >= 5
    with monkeypatch.context() as outage:
        outage.setattr(Authenticator, "_find", fail)
        assert (await other.get("/v1/key")).status == 503
        assert (await gateway.nobody.get("/v1/key")).status == 401
    assert await metric(gateway, DELAYED) == delayed


async def fail(*_: Any) -> Any:
    raise Unavailable("The database is away.")


async def leave(clients: list[Client], monkeypatch: pytest.MonkeyPatch) -> None:
    """Send a request of each client, which leaves before its key is verified."""
    number_left = 0

    async def hang(*_: Any) -> Any:
        nonlocal number_left
        try:
            await asyncio.Event().wait()
        finally:
            number_left += 1

    with monkeypatch.context() as patched:
        patched.setattr(Authenticator, "_find", hang)
        for number, client in enumerate(clients):
            with suppress(TimeoutError):
                await asyncio.wait_for(client.get("/v1/key"), 0.05)

            async def has_left(number: int = number) -> bool:
                return number_left > number

            await until(has_left)


async def test_a_client_that_leaves_once_lets_no_key_count_by_address(
    keys: tuple[Gateway, list[Client]], monkeypatch: pytest.MonkeyPatch
):
    gateway, clients = keys
    await leave(clients, monkeypatch)
    for client in clients:
        assert (await client.get("/v1/key")).status == 200
    assert await metric(gateway, DELAYED) == 0


async def test_clients_that_leave_again_and_again_count_by_address(
    keys: tuple[Gateway, list[Client]], monkeypatch: pytest.MonkeyPatch
):
    gateway, clients = keys
    await leave(clients, monkeypatch)
    await leave(clients, monkeypatch)
    for client in clients:
        assert (await client.get("/v1/key")).status == 200
    assert await metric(gateway, DELAYED) == len(clients)


async def test_a_known_key_counts_by_address_on_routes_that_check_none(keys: tuple[Gateway, list[Client]]):
    gateway, (client, *_) = keys
    assert (await client.get("/v1/key")).status == 200
    for _ in range(BURST + 1):
        assert (await client.get("/v1/none")).status == 404
    assert (await client.get("/v1/key")).status == 200
    assert await metric(gateway, DELAYED) == 0
    assert (await client.get("/openapi.json")).status == 200
    assert await metric(gateway, DELAYED) == 1


async def test_revoked_keys_count_by_themselves(keys: tuple[Gateway, list[Client]]):
    """They are verified before they are refused."""
    gateway, clients = keys
    for made in (await gateway.admin.get("/admin/api/tenants/mallory/keys")).json["data"]:
        assert (await gateway.admin.call("DELETE", f"/admin/api/keys/{made['id']}")).status == 200
    for client in clients:
        assert (await client.get("/v1/key")).status == 401
    assert await metric(gateway, DELAYED) == 0
