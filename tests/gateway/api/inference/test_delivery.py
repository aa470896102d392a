"""Clients that do not read: their use of engines, memory and other clients' time."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import aiohttp
import msgspec
import pytest
from aiohttp import web

from gateway.fleet.calls.answers import read_answer
from gateway.fleet.engines.breaker import FAILURES_UNTIL_OPEN
from gateway.quota import growing_hold
from testing.gateway.running import Client, Gateway, until
from testing.gateway.upstream import Upstream
from testing.serving import serving
from tests.gateway.api.conftest import Ask, Reader

MANY = {"requests_per_minute": 1_000_000, "tokens_per_minute": 10**9, "max_concurrent": 1000}
LONG = 10**7
UNREAD = "loraplex_gateway_unread_answer_bytes"


@asynccontextmanager
async def lag_probe() -> AsyncIterator[list[float]]:
    """Yield the longest stalls of this event loop, which the gateway shares."""
    longest = [0.0]

    async def look() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.005)
            longest[0] = max(longest[0], time.monotonic() - before - 0.005)

    probe = asyncio.create_task(look())
    try:
        yield longest
    finally:
        probe.cancel()


async def metric(gateway: Gateway, name: str) -> float:
    page = (await gateway.admin.get("/metrics")).body.decode()
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(name))


async def in_flight(gateway: Gateway) -> int:
    return (await gateway.admin.get("/admin/api/engines")).json["data"][0]["in_flight"]


@pytest.mark.parametrize("stream", [True, False])
async def test_readers_that_stop_hold_no_places(stream: bool, serve: Any, ask: Ask, upstream: Upstream):
    """70 stopped readers exceed the engine's 64 seats, and a neighbour is served at once."""
    async with serve() as gateway:
        slow, neighbour = await gateway.tenant("slow", **MANY), await gateway.tenant("neighbour")
        for _ in range(70):
            await ask(gateway, slow, stream=stream, max_tokens=8, x_engine={"tokens": 8, "pad": 2**16})

        async def all_are_answered() -> bool:
            return len(upstream.requests) == 70 and await in_flight(gateway) == 0

        await until(all_are_answered, 60.0)
        assert (await asyncio.wait_for(neighbour.complete(), 20.0)).status == 200


async def test_a_reader_beyond_its_buffer_holds_the_engine_back_and_no_place(serve: Any, ask: Ask, upstream: Upstream):
    async with serve(max_model_len=LONG, reader_buffer_bytes=2**17) as gateway:
        slow = await gateway.tenant("slow", **MANY)
        events = 2000
        reader = await ask(gateway, slow, stream=True, max_tokens=events, x_engine={"tokens": events, "pad": 2**16})

        async def is_held() -> bool:
            before = upstream.events
            await asyncio.sleep(0.3)
            return 0 < before == upstream.events

        await until(is_held)
        assert upstream.events < events
        assert await in_flight(gateway) == 0
        assert await metric(gateway, UNREAD) < 2**19
        # A disconnection still stops the engine.
        reader.writer.transport.abort()

        async def is_cancelled() -> bool:
            return upstream.cancelled == 1

        await until(is_cancelled)


async def test_an_answer_that_is_not_read_holds_all_that_it_may_use(
    serve: Any, ask: Ask, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(growing_hold, "FIRST", 500.0)
    upstream.keeps_allowances = True
    async with serve(max_model_len=LONG, reader_buffer_bytes=2**17) as gateway:
        slow = await gateway.tenant("slow", **MANY)
        await ask(gateway, slow, stream=True, max_tokens=5000, x_engine={"tokens": 5000, "pad": 2**16})
        await until(lambda: asyncio.sleep(0, list(upstream.allowances.values()) == [5000]))


async def test_an_engine_that_counts_nothing_is_stopped_if_an_unread_answer_has_no_room(
    serve: Any, ask: Ask, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(growing_hold, "FIRST", 1.0)
    async with serve(max_model_len=LONG, reader_buffer_bytes=2**17) as gateway:
        slow = await gateway.tenant("slow", tokens_per_minute=5000)
        other = asyncio.create_task(slow.complete(max_tokens=1000, x_engine={"delay": 60}))
        await until(lambda: asyncio.sleep(0, len(upstream.requests) == 1))
        reader = await ask(gateway, slow, stream=True, max_tokens=4800, x_engine={"tokens": 4800, "pad": 2**16})
        await until(lambda: asyncio.sleep(0, any(each["finish_reason"] for each in upstream.finished.values())))
        [stopped] = [each for each in upstream.finished.values() if each["finish_reason"]]
        assert (stopped["finish_reason"], stopped["completion_tokens"] < 4800) == ("abort", True)
        await reader.find(b"rate_limit_exceeded")

        async def names_the_limit() -> bool:
            log = (await gateway.admin.get("/admin/api/requests?status=failed")).json["data"]
            return [each["ended_by"] for each in log] == ["tokens_per_minute"]

        await until(names_the_limit)
        assert await metric(gateway, "loraplex_gateway_quota_refusals_total{") == 1
        other.cancel()


async def check_billed(gateway: Gateway, client: Client, upstream: Upstream) -> None:
    """Check that a tenant's only answer is billed by the engine's count and that no unread byte of it is kept."""

    async def is_billed() -> bool:
        rows = await client.usage()
        return bool(rows) and rows[0]["completion_tokens"] > 0

    await until(is_billed)
    [done] = upstream.finished.values()
    assert (await client.usage())[0]["completion_tokens"] == done["completion_tokens"]
    assert await metric(gateway, UNREAD) == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_reader_below_the_minimum_rate_is_cut_off_and_billed(
    stream: bool, serve: Any, ask: Ask, upstream: Upstream
):
    async with serve(max_model_len=LONG, slow_reader_seconds=1.0) as gateway:
        slow = await gateway.tenant("slow", **MANY)
        # A stream is cut off in the middle; a whole answer has ended by then.
        tokens, pad = (1000, 2**16) if stream else (3, 7 * 2**20)
        reader = await ask(gateway, slow, stream=stream, max_tokens=tokens, x_engine={"tokens": tokens, "pad": pad})

        async def is_cut() -> bool:
            return await metric(gateway, "loraplex_gateway_slow_readers_cut_total") == 1

        await until(is_cut)
        rest = await reader.rest()
        assert len(rest) < 7 * 2**20
        assert b"[DONE]" not in rest

        await check_billed(gateway, slow, upstream)


async def cut_off_readers(
    gateway: Gateway, ask: Ask, upstream: Upstream, *names: str
) -> tuple[list[Client], list[Reader]]:
    """Return new tenants, and three streams of each that it did not read and that the engine has cut off."""
    tenants = [await gateway.tenant(name, **MANY) for name in names]
    how = {"tokens": 2000, "pad": 2**16}
    readers = [
        await ask(gateway, tenant, prompt=f"Hi {number}", stream=True, max_tokens=2000, x_engine=how)
        for number in range(FAILURES_UNTIL_OPEN)
        for tenant in tenants
    ]

    async def all_are_held() -> bool:
        return len(upstream.streaming) == len(readers) and await in_flight(gateway) == 0

    await until(all_are_held, 120.0)
    upstream.cut_off()
    return tenants, readers


@pytest.fixture
def lasting_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breakers that open stay open for the whole test, however slow the machine."""
    monkeypatch.setattr("gateway.fleet.engines.breaker.FIRST_PAUSE_SECONDS", 600.0)
    monkeypatch.setattr("gateway.fleet.engines.breaker.MAX_PAUSE_SECONDS", 600.0)


@pytest.mark.usefixtures("lasting_pauses")
async def test_readers_that_an_engine_cuts_off_are_no_failure_of_it(
    serve: Any, ask: Ask, upstream: Upstream, caplog: pytest.LogCaptureFixture
):
    """Two tenants' slow readers, whose breaks surface together, close the engine for nobody and quarantine nothing."""
    async with serve(max_model_len=LONG, reader_buffer_bytes=2**17) as gateway:
        tenants, readers = await cut_off_readers(gateway, ask, upstream, "a", "b")
        neighbour = await gateway.tenant("neighbour")
        ends = await asyncio.gather(*(reader.rest() for reader in readers))
        assert not any(b"[DONE]" in end or b"error" in end for end in ends)
        for each in (neighbour, *tenants):
            # The requests of the tenants that were cut off are not in quarantine.
            got = await each.complete(prompt="Hi 0", max_tokens=2000, x_engine={"tokens": 2, "pad": 2**16})
            assert got.status == 200, got.json
        assert await metric(gateway, "loraplex_gateway_quarantined_total") == 0
        assert await metric(gateway, "loraplex_gateway_slow_readers_cut_total") == len(readers)
        [engine] = (await gateway.admin.get("/admin/api/engines")).json["data"]
        assert engine["available"], engine
        generated = sorted(done["completion_tokens"] for done in upstream.finished.values())

        async def are_billed() -> bool:
            page = (await gateway.admin.get("/metrics")).body.decode()
            cancelled = sum(
                float(line.rsplit(" ", 1)[1])
                for line in page.splitlines()
                if line.startswith("loraplex_gateway_inference_requests_total") and 'status="cancelled"' in line
            )
            billed = [row["completion_tokens"] for each in (*tenants, neighbour) for row in await each.usage()]
            return cancelled == len(readers) and sum(billed) == sum(generated)

        await until(are_billed)
    assert "engine_died" not in caplog.text
    assert caplog.text.count("cut the answer off") == len(readers)
    assert "0 bytes unread" not in caplog.text


@pytest.mark.usefixtures("lasting_pauses")
async def test_an_engine_that_dies_behind_a_slow_reader_has_died(serve: Any, ask: Ask, upstream: Upstream):
    async with serve(max_model_len=LONG, reader_buffer_bytes=2**17) as gateway:
        [slow], readers = await cut_off_readers(gateway, ask, upstream, "a")
        # Another instance runs at the address of the one that broke the streams.
        upstream.instance = "two"
        await asyncio.gather(*(reader.find(b"engine_died") for reader in readers))
        assert (await slow.complete()).error["code"] == "no_engine"
        assert (await (await gateway.tenant("neighbour")).complete()).status == 200


@pytest.mark.usefixtures("lasting_pauses")
async def test_an_engine_that_answers_no_check_behind_a_slow_reader_has_died(
    serve: Any, ask: Ask, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
):
    """The slow client's requests count against it alone, and the unanswered checks against nobody."""
    async with serve(max_model_len=LONG, reader_buffer_bytes=2**17, engine_heartbeat_timeout=600.0) as gateway:
        [slow], readers = await cut_off_readers(gateway, ask, upstream, "a")
        monkeypatch.setattr("gateway.fleet.discovery.health_checks.HEALTH_TIMEOUT", aiohttp.ClientTimeout(total=1.0))
        upstream.mute = True
        try:
            await asyncio.gather(*(reader.find(b"engine_died") for reader in readers))
            assert (await slow.complete()).error["code"] == "no_engine"
            assert (await (await gateway.tenant("neighbour")).complete()).status == 200
        finally:
            upstream.mute = False


@pytest.mark.usefixtures("lasting_pauses")
async def test_a_break_of_a_server_without_instances_is_a_death(serve: Any, ask: Ask, upstream: Upstream):
    cast(Any, upstream).instance = None
    async with serve(max_model_len=LONG, reader_buffer_bytes=2**17) as gateway:
        [slow], readers = await cut_off_readers(gateway, ask, upstream, "a")
        await asyncio.gather(*(reader.find(b"engine_died") for reader in readers))
        assert (await slow.complete()).error["code"] == "no_engine"


async def test_a_reader_that_keeps_up_with_the_minimum_rate_gets_all(serve: Any, ask: Ask):
    async with serve(slow_reader_seconds=4.0, min_read_rate=50_000.0) as gateway:
        acme = await gateway.tenant("acme", **MANY)
        size = 2**20
        reader = await ask(gateway, acme, x_engine={"pad": size})
        got = 0
        while got < size:
            piece = await asyncio.wait_for(reader.reader.read(2**16), 30.0)
            assert piece, "it was cut off"
            got += len(piece)
            # In all longer than the time after which the rate is judged, which outlasts a stall.
            await asyncio.sleep(0.4)


async def test_unread_answers_take_bounded_memory(serve: Any, ask: Ask, upstream: Upstream):
    """A tenant's unread answers take half of the memory at most; another tenant's large answer is still read."""
    async with serve(max_answer_bytes=2**20, answer_memory_bytes=2**22, reader_buffer_bytes=2**20) as gateway:
        slow, neighbour = await gateway.tenant("slow", **MANY), await gateway.tenant("neighbour", **MANY)
        how = {"tokens": 16, "pad": 900_000}
        for i in range(40):
            await ask(gateway, slow, stream=i % 2 == 0, max_tokens=16, x_engine=how)

        async def all_have_come() -> bool:
            return len(upstream.requests) == 40

        await until(all_have_come)
        got = await asyncio.wait_for(neighbour.complete(max_tokens=16, x_engine=how), 30.0)
        assert len(got.json["pad"]) == 900_000
        assert await metric(gateway, UNREAD) <= 2**22


@pytest.mark.usefixtures("starts_servers")
async def test_a_large_answer_stalls_nobody():
    """A large answer is read, renamed and sent in steps of a few milliseconds; the double makes it before the probe."""
    place = {str(t): {"logprob": -1.5, "rank": 1, "decoded_token": "word"} for t in range(20)}
    answer = msgspec.json.encode({"id": "x", "model": "sha256:0", "choices": [], "prompt_logprobs": [place] * 7500})
    assert len(answer) > 7 * 2**20

    async def reserve(size: int) -> None:
        assert size == len(answer)

    async def respond(_: web.Request) -> web.Response:
        return web.Response(body=answer)

    app = web.Application()
    app.router.add_get("/", respond)
    async with serving(app) as url, aiohttp.ClientSession() as session:
        stalls = []
        # Three times, because a busy machine may take the core away once.
        for _ in range(3):
            response = await session.get(url)
            async with lag_probe() as longest:
                fields = await read_answer(response, 2**23, reserve)
            assert bytes(fields["model"]) == b'"sha256:0"'
            stalls.append(longest[0])
        assert min(stalls) < 0.5


async def test_an_answer_beyond_the_limit_is_refused_and_billed(serve: Any, upstream: Upstream):
    async with serve(max_answer_bytes=2**16) as gateway:
        acme = await gateway.tenant("acme", **MANY)
        got = await acme.complete(max_tokens=8, x_engine={"tokens": 5, "pad": 2**17})
        assert (got.status, got.error["code"]) == (400, "answer_too_large")

        async def is_billed() -> bool:
            return [row["completion_tokens"] for row in await acme.usage()] == [5]

        await until(is_billed)
        got = await acme.complete(stream=True, max_tokens=8, x_engine={"pad": 2**21})
        assert got.events[-1]["error"]["code"] == "engine_error"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_reader_that_stops_holds_no_slot_of_its_tenant(stream: bool, serve: Any, ask: Ask, upstream: Upstream):
    """A tenant with one slot gets its next answers, although nobody reads the one before."""
    async with serve() as gateway:
        slow = await gateway.tenant("slow", **MANY | {"max_concurrent": 1})
        for number in range(1, 4):
            await ask(gateway, slow, stream=stream, max_tokens=8, x_engine={"tokens": 8, "pad": 2**16})

            async def is_settled(number: int = number) -> bool:
                return sum(row["requests"] for row in await slow.usage()) == number

            await until(is_settled)
        assert len(upstream.requests) == 3
        assert await in_flight(gateway) == 0
        assert (await slow.complete(max_tokens=8)).status == 200
