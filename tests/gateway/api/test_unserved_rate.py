"""Floods of requests that no engine serves: they wait, and no other requests do."""

import asyncio
import gzip
import itertools
import time
import uuid
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from gateway.api import unserved_rate
from gateway.caller import CALLER, Caller
from gateway.metrics import Metrics
from gateway.records.adapters.uploads import Uploads
from gateway.sharing import start_limiter
from testing.gateway.clocks import SleepClock
from testing.gateway.running import Client, Gateway, until
from testing.gateway.upstream import Upstream
from tests.gateway.api.adapters.test_adapters import files, tarred
from tests.gateway.api.uploads.test_resumable import PATH, begin, put

# Requests a second, and the burst of five seconds.
RATE = 4.0
BURST = 20
DELAYED = "loraplex_gateway_delayed_requests_total"


async def metric(gateway: Gateway, name: str) -> float:
    text = (await gateway.admin.get("/metrics")).body.decode()
    return float(next(line for line in text.splitlines() if line.startswith(name + " ")).split()[1])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SleepClock:
    """Return the clock of the buckets. It stands still, so that a stall refills none."""
    clock = SleepClock()
    clock.put(monkeypatch, unserved_rate)
    return clock


async def is_delayed(gateway: Gateway) -> bool:
    return await metric(gateway, DELAYED) > 0


async def flood(client: Client, path: str, number: int) -> None:
    await asyncio.gather(*(client.get(path) for _ in range(number)))


async def test_reads_beyond_the_rate_wait_and_served_requests_of_others_do_not(
    serve: Any, upstream: Upstream, clock: SleepClock
):
    async with serve(unserved_per_second=RATE) as gateway:
        mallory, acme = await gateway.tenant("mallory"), await gateway.tenant("acme")
        await flood(mallory, "/v1/models", BURST + 12)
        waits = asyncio.ensure_future(mallory.get("/v1/models"))
        await until(lambda: is_delayed(gateway))
        assert (await acme.get("/v1/models")).status == 200
        assert (await gateway.admin.get("/admin/api/tenants")).status == 200
        # 12 requests are owed, four a second.
        assert clock.slept == [12 / RATE]
        assert not waits.done()
        clock.go.set()
        await waits
        assert await metric(gateway, DELAYED) == 1


async def test_served_requests_are_free(serve: Any, upstream: Upstream):
    async with serve(unserved_per_second=0.001) as gateway:
        acme = await gateway.tenant("acme", requests_per_minute=1000)
        for _ in range(30):
            assert (await acme.complete()).status == 200
        assert await metric(gateway, DELAYED) == 0


async def test_refusals_count_and_so_do_the_bytes_of_their_bodies(serve: Any, upstream: Upstream, clock: SleepClock):
    async with serve(unserved_per_second=RATE) as gateway:
        mallory = await gateway.tenant("mallory")
        # 2 MiB of spaces in 2 KB count as 32 more requests.
        body, headers = gzip.compress(b" " * 2**21), {"Content-Encoding": "gzip"}
        assert (await mallory.call("POST", "/v1/completions", data=body, headers=headers)).status == 400
        assert await metric(gateway, DELAYED) == 0
        clock.go.set()
        assert (await mallory.complete()).status == 200
        assert clock.slept == [(33 - BURST) / RATE]
        assert await metric(gateway, DELAYED) == 1


async def test_refusals_beyond_the_first_ones_begin_at_a_distance(
    serve: Any, upstream: Upstream, clock: SleepClock, monkeypatch: pytest.MonkeyPatch
):
    rest, free = 0.05, int(unserved_rate.FREE_SECONDS * RATE)
    monkeypatch.setattr(unserved_rate, "REST_SECONDS", rest)
    async with serve(unserved_per_second=RATE) as gateway:
        mallory, acme = await gateway.tenant("mallory"), await gateway.tenant("acme")
        began = time.monotonic()
        for _ in range(3):
            await flood(mallory, "/v1/adapters/none", 6)
        assert (await acme.complete()).status == 200
        # All of one flood may begin before the first of them is refused.
        assert time.monotonic() - began > (18 - free - 6) * rest
        # The bucket still had room for all of them.
        assert await metric(gateway, DELAYED) == 0


def refused_calls(rate: float) -> Any:
    """Return a function that sends a request of one address through the rate limit to a handler that refuses it."""
    limit, numbers = unserved_rate.UnservedRate(rate, lambda secret: False, Metrics()).middleware(), itertools.count()
    # Each mocked request takes 2 ms to make, and nothing here changes it.
    request = make_mocked_request("GET", "/v1/none")

    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.Response(status=404)

    async def call() -> int:
        CALLER.set(Caller("192.0.2.1", f"request-{next(numbers)}"))
        return (await limit(request, refuse)).status

    return call


async def test_requests_that_leave_while_they_wait_do_not_delay_later_ones_beyond_the_limit(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(unserved_rate, "ADDRESS_SECONDS", 1.0)
    # Rests of requests that had not begun would show.
    monkeypatch.setattr(start_limiter, "MAX_REST_SECONDS", 600.0)
    call = refused_calls(20.0)
    tasks = [asyncio.create_task(call()) for _ in range(3000)]
    await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(isinstance(result, asyncio.CancelledError) for result in done) > 2900
    # Without a limit, it would wait for more than two minutes.
    assert await asyncio.wait_for(call(), unserved_rate.ADDRESS_SECONDS + 60.0) == 404


async def test_a_rest_is_not_longer_than_the_rate_requires(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(unserved_rate, "REST_SECONDS", 25.0)
    monkeypatch.setattr(start_limiter, "MAX_REST_SECONDS", 600.0)
    monkeypatch.setattr(unserved_rate, "FREE_SECONDS", 0.0)
    call = refused_calls(100.0)
    began = time.monotonic()
    for _ in range(20):
        assert await call() == 404
    assert 0.15 < time.monotonic() - began < 60.0


async def test_guesses_wait_by_address_and_issued_keys_behind_it_do_not(
    serve: Any, upstream: Upstream, clock: SleepClock
):
    async with serve(unserved_per_second=RATE) as gateway:
        acme = await gateway.tenant("acme")
        guesser = gateway.client("lpx_" + "0" * 64)
        clock.go.set()
        await flood(guesser, "/v1/models", BURST + 20)
        clock.go.clear()
        clock.slept.clear()
        waits = asyncio.ensure_future(guesser.get("/v1/models"))
        assert (await acme.complete()).status == 200
        assert (await gateway.nobody.get("/readyz")).status == 200
        await until(lambda: asyncio.sleep(0, clock.slept))
        # The guess still waits.
        assert clock.slept == [20 / RATE]
        assert not waits.done()
        clock.go.set()
        await waits


async def test_requests_whose_client_leaves_count(serve: Any, upstream: Upstream, clock: SleepClock):
    rate, beyond = 2.0, 20
    async with serve(unserved_per_second=rate) as gateway:
        mallory = await gateway.tenant("mallory", max_concurrent=1000)
        number = int(rate * unserved_rate.BURST_SECONDS) + beyond
        sent = [asyncio.ensure_future(mallory.complete(x_engine={"delay": 60.0})) for _ in range(number)]

        async def arrived() -> bool:
            return len(upstream.requests) == len(sent)

        await until(arrived)
        for request in sent:
            request.cancel()

        async def left() -> bool:
            return upstream.cancelled >= len(sent)

        await until(left)
        clock.go.set()
        reads = 0

        async def owes_all() -> bool:
            nonlocal reads
            await mallory.get("/v1/models")
            reads += 1
            return clock.slept[-1:] == [(beyond + reads - 1) / rate]

        await until(owes_all)


@pytest.mark.parametrize(
    "refused",
    [
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\nExpect: 1\r\n\r\n",
        b"DELETE /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
    ],
    ids=["bad-head", "method", "metrics"],
)
async def test_refused_requests_at_the_routes_of_probes_wait_and_probes_do_not(
    refused: bytes, serve: Any, clock: SleepClock
):
    clock.go.set()
    async with serve(unserved_per_second=RATE) as gateway:
        for _ in range(BURST):
            await raw_answer(gateway, refused)
        assert (await gateway.nobody.get("/healthz")).status == 200
        assert await metric(gateway, DELAYED) == 0
        for _ in range(8):
            await raw_answer(gateway, refused)
        assert (await gateway.nobody.get("/healthz")).status == 200
        # All but the one that emptied the bucket.
        assert await metric(gateway, DELAYED) >= 7


async def raw_answer(gateway: Gateway, request: bytes) -> None:
    """Send a request that has to be refused, and read its answer."""
    url = urlsplit(gateway.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    try:
        writer.write(request)
        assert (await reader.read()).split()[1] in (b"401", b"405", b"417")
    finally:
        writer.close()


async def test_redirects_of_forms_without_a_session_and_preflights_count(serve: Any, clock: SleepClock):
    clock.go.set()
    origin = "https://app.example"
    asked = {"Origin": origin, "Access-Control-Request-Method": "GET"}
    async with serve(unserved_per_second=RATE, cors_origins=[origin]) as gateway:
        for _ in range(BURST // 2 + 6):
            got = await gateway.nobody.call("POST", "/console/logout", allow_redirects=False)
            assert got.status == 303
            assert (await gateway.nobody.call("OPTIONS", "/v1/models", headers=asked)).status == 204
        assert await metric(gateway, DELAYED) > 5


async def test_redirects_of_pages_with_a_session_count_and_are_no_failures_of_the_gateway(
    serve: Any, upstream: Upstream, clock: SleepClock
):
    """They passed the rate as exceptions, without a limit, and counted as answers of status 500."""
    clock.go.set()
    async with serve(unserved_per_second=RATE) as gateway:
        acme = await gateway.tenant("acme")
        async with gateway.browser(acme.key, "/console") as browser:
            for _ in range(BURST + 6):
                got = await browser.get("/console/requests?id=req_none")
                assert (got.status, got.headers["Location"]) == (303, "/console/requests/req_none")
        assert await metric(gateway, DELAYED) > 0
        counted = 'loraplex_gateway_http_requests_total{method="GET",route="/console/requests",status="303"}'
        assert await metric(gateway, counted) == BURST + 6


async def test_repeated_answers_count_and_write_nothing(
    serve: Any, upstream: Upstream, clock: SleepClock, monkeypatch: pytest.MonkeyPatch
):
    """Each removed the completed upload again, as often as a client repeated its completion."""
    clock.go.set()
    content, once, removed = tarred(files(2)), {"Idempotency-Key": uuid.uuid4().hex}, list[str]()
    remove = Uploads.remove

    async def noted(uploads: Uploads, upload_id: str) -> None:
        removed.append(upload_id)
        await remove(uploads, upload_id)

    monkeypatch.setattr(Uploads, "remove", noted)
    async with serve(unserved_per_second=RATE) as gateway:
        acme = await gateway.tenant("acme")
        upload = (await begin(acme, content)).json["id"]
        assert (await put(acme, upload, 0, content)).status == 200
        assert (await acme.post(f"{PATH}/{upload}/complete", headers=once)).status == 201
        for _ in range(BURST + 6):
            again = await acme.post(f"{PATH}/{upload}/complete", headers=once)
            assert (again.status, again.headers["Idempotent-Replayed"]) == (201, "true")
        assert await metric(gateway, DELAYED) > 0
        assert removed == [upload]


async def test_deleted_keys_count_by_address(serve: Any, upstream: Upstream, clock: SleepClock):
    """Each had a rate of its own, and a tenant may have made any number of them."""
    clock.go.set()
    async with serve(unserved_per_second=RATE) as gateway:
        gateway.admin = gateway.client((await gateway.admin.post("/admin/api/keys")).json["key"])
        await gateway.tenant("gone")
        path = "/admin/api/tenants/gone"
        keys = [(await gateway.admin.post(f"{path}/keys")).json["key"] for _ in range(BURST + 6)]
        assert (await gateway.admin.call("DELETE", path)).status == 200
        for _ in range(2):
            for key in keys:
                assert (await gateway.client(key).get("/v1/models")).status == 401
        assert await metric(gateway, DELAYED) == len(keys)


async def test_deleted_keys_that_are_used_in_turn_count_although_they_are_forgotten(
    serve: Any, upstream: Upstream, clock: SleepClock, monkeypatch: pytest.MonkeyPatch
):
    """A tenant that had made more keys than are remembered had no rate at all."""
    monkeypatch.setattr(unserved_rate, "MAX_OWNERS", 12)
    clock.go.set()
    async with serve(unserved_per_second=RATE) as gateway:
        gateway.admin = gateway.client((await gateway.admin.post("/admin/api/keys")).json["key"])
        acme = await gateway.tenant("acme")
        assert (await acme.get("/v1/models")).status == 200
        await gateway.tenant("gone")
        path = "/admin/api/tenants/gone"
        keys = [(await gateway.admin.post(f"{path}/keys")).json["key"] for _ in range(2 * unserved_rate.MAX_OWNERS)]
        assert (await gateway.admin.call("DELETE", path)).status == 200
        for _ in range(2):
            for key in keys:
                assert (await gateway.client(key).get("/v1/models")).status == 401
        delayed = await metric(gateway, DELAYED)
        assert delayed >= 2 * len(keys) - BURST - 1
        # A key that was used before does not wait with them, nor does another one from its second request on.
        assert (await acme.get("/v1/models")).status == 200
        assert await metric(gateway, DELAYED) == delayed
        other = await gateway.tenant("other")
        assert [(await other.get("/v1/models")).status for _ in range(3)] == [200] * 3
        assert await metric(gateway, DELAYED) == delayed + 1


async def test_the_keys_of_a_tenant_together_have_a_rate_too(serve: Any, upstream: Upstream, clock: SleepClock):
    async with serve(unserved_per_second=0.5) as gateway:
        _, acme = await gateway.tenant("mallory"), await gateway.tenant("acme")
        keys = [(await gateway.admin.post("/admin/api/tenants/mallory/keys")).json["key"] for _ in range(20)]

        async def read_twice(key: Client) -> None:
            assert [(await key.get("/v1/models")).status for _ in range(2)] == [200, 200]

        # A key alone may read twice at once.
        await read_twice(acme)
        assert await metric(gateway, DELAYED) == 0
        readers = asyncio.gather(*(read_twice(gateway.client(key)) for key in keys))

        await until(lambda: is_delayed(gateway))
        # Another tenant is served at once. Its own reads above are paid off.
        clock.now += 2 * unserved_rate.BURST_SECONDS
        async with asyncio.timeout(30):
            await read_twice(acme)
        assert not readers.done()
        readers.cancel()


async def test_the_revoked_key_of_an_operator_waits(serve: Any, upstream: Upstream, clock: SleepClock):
    clock.go.set()
    async with serve(unserved_per_second=0.5) as gateway:
        made = (await gateway.admin.post("/admin/api/keys", {"role": "viewer"})).json
        former = gateway.client(made["key"])
        for _ in range(4):
            assert (await former.get("/admin/api/tenants")).status == 200
        assert await metric(gateway, DELAYED) == 0
        assert (await gateway.admin.call("DELETE", f"/admin/api/keys/{made['id']}")).status == 200
        for _ in range(4):
            assert (await former.get("/admin/api/tenants")).status == 401
        assert await metric(gateway, DELAYED) > 0


async def test_requests_without_an_engine_count(serve: Any, upstream: Upstream, clock: SleepClock):
    upstream.healthy = False
    async with serve(unserved_per_second=RATE) as gateway:
        mallory, acme = await gateway.tenant("mallory"), await gateway.tenant("acme")
        for _ in range(BURST + 1):
            assert (await mallory.complete()).error["code"] == "no_engine"
        waits = asyncio.ensure_future(mallory.complete())
        await until(lambda: is_delayed(gateway))
        assert clock.slept == [1 / RATE]
        assert not waits.done()
        # Another tenant's requests do not wait.
        assert (await acme.complete()).error["code"] == "no_engine"
        clock.go.set()
        assert (await waits).headers["Retry-After"] == "1"
        # The tenant's own requests wait for a second at most, however many were refused.
        for _ in range(int(3 * RATE)):
            assert (await mallory.complete()).error["code"] == "no_engine"
        assert max(clock.slept) == pytest.approx(1.0)
