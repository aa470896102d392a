"""A stopping gateway cuts off no request, and a starting one waits for its database."""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from gateway.records.sql.database import Database
from gateway.settings import Settings, SettingsError
from testing.gateway.running import Client, Gateway, running, settings, until
from testing.gateway.upstream import Upstream
from testing.ports import free_ports


class Seen(Exception):
    """End of a test that has seen enough."""


@asynccontextmanager
async def leaving(of: Settings):
    """Run a gateway that a test can stop while clients send requests; it ends with the test."""
    up, leave = asyncio.Event(), asyncio.Event()

    async def live() -> None:
        async with running(of):
            up.set()
            await leave.wait()

    life = asyncio.create_task(live())
    waiting = asyncio.create_task(up.wait())
    await asyncio.wait([life, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    try:
        yield leave
        leave.set()
        await life
    finally:
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)


async def keep_asking(url: str, key: str, enough: asyncio.Event) -> int:
    """Send requests on one connection while it is kept alive; any failure fails the test."""
    asked = 0
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1)) as session:
        while not enough.is_set():
            got = await Client(session, url, key).complete(stream=asked % 2 == 0)
            assert got.status == 200, got.body
            asked += 1
    return asked


async def test_restarts_of_one_of_two_fail_no_request(
    tmp_path: Path, model_dir: Path, upstream: Upstream, redis_url: str
):
    patient = {"shutdown_seconds": 60.0, "shutdown_delay": 0.5, "port": free_ports(1), "workers": 2, "metrics_port": 0}
    of = settings(tmp_path, model_dir, [upstream.url], redis_url, **patient)
    async with running(of) as stays:
        tenant = await stays.tenant("acme", requests_per_minute=1_000_000, tokens_per_minute=100_000_000)
        enough = asyncio.Event()
        asking = [asyncio.create_task(keep_asking(stays.url, tenant.key or "", enough)) for _ in range(8)]
        try:
            for _ in range(3):
                async with leaving(of):
                    # Long enough for some requests to arrive; none is no failure either.
                    await asyncio.sleep(0.3)
            enough.set()
            assert all(await asyncio.gather(*asking))
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)


async def test_a_gateway_that_leaves_says_so_before_it_stops_listening(
    tmp_path: Path, model_dir: Path, upstream: Upstream, redis_url: str
):
    of = settings(tmp_path, model_dir, [upstream.url], redis_url, port=free_ports(1), shutdown_delay=3600.0)
    with pytest.raises(Seen):
        await see_it_leave(of)


async def see_it_leave(of: Settings) -> None:
    """Raise Seen at the end, so that the test does not wait for the drain of an hour."""
    async with leaving(of) as leave, aiohttp.ClientSession() as session:
        gateway = Gateway(f"http://127.0.0.1:{of.port}", session)
        before = await gateway.nobody.get("/readyz")
        assert (before.status, before.json["parts"]["process"]) == (200, "ok")
        assert "Connection" not in before.headers
        leave.set()

        async def says_so() -> bool:
            return (await gateway.nobody.get("/readyz")).status == 503

        await until(says_so)
        after = await gateway.nobody.get("/readyz")
        assert (after.json["parts"]["process"], after.headers["Connection"]) == ("stopping", "close")
        raise Seen


async def test_what_outlasts_the_drain_ends_with_an_error_of_its_own(
    tmp_path: Path, model_dir: Path, upstream: Upstream, redis_url: str
):
    of = settings(tmp_path, model_dir, [upstream.url], redis_url, port=free_ports(1), shutdown_seconds=2.0)
    async with running(settings(tmp_path, model_dir, [upstream.url], redis_url)) as stays:
        tenant = await stays.tenant("acme", requests_per_minute=1_000_000, tokens_per_minute=100_000_000)
        async with leaving(of) as leave, aiohttp.ClientSession() as session:
            leaves = Client(session, f"http://127.0.0.1:{of.port}", tenant.key)
            endless = {"max_tokens": 200, "x_engine": {"tokens": 200, "delay": 0.1}}
            asking = [asyncio.create_task(leaves.complete(stream=stream, **endless)) for stream in (True, False)]

            async def are_running() -> bool:
                return len(upstream.requests) == 2

            await until(are_running)
            leave.set()
            stream, whole = await asyncio.gather(*asking)
        assert stream.status == 200
        assert stream.events[-1]["error"]["code"] == "shutting_down"
        assert (whole.status, whole.error["code"]) == (503, "shutting_down")

        async def rows() -> list[tuple[str, str]]:
            log = (await stays.admin.get("/admin/api/requests")).json["data"]
            return [(each["status"], each["code"]) for each in log]

        async def are_written() -> bool:
            return len(await rows()) == 2

        await until(are_written)
        assert await rows() == [("error", "shutting_down")] * 2


@pytest.mark.usefixtures("starts_servers")
async def test_a_start_waits_for_the_database_and_then_says_what_is_wrong(caplog: pytest.LogCaptureFixture):
    port = free_ports(1)
    database = Database(f"postgresql://someone@127.0.0.1:{port}/records")
    try:
        await database.wait(1.2)
        assert caplog.text.count("the database fails") == 1
        with pytest.raises(SettingsError, match="cannot be reached"):
            await database.check_schema()
    finally:
        await database.close()
