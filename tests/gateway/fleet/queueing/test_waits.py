"""Waits of requests in the gateway's queue and on a real engine with a simulated device, and what is not known."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from gateway.fleet.engines.engine import Address, EngineRecord, EngineState
from gateway.fleet.queueing.waits import EngineQueues, Waits
from testing.engine import RunningServer
from testing.gateway.commands import runner
from testing.gateway.running import Client, Gateway, running, settings, until
from testing.gateway.spread_tenant import MODEL
from testing.gateway.upstream import TOKEN
from testing.tiny import save_model
from wire.responses import TenantFairShare

# Seats of the engine, which gets two batches. SEATS of the REQUESTS run, SEATS wait on the engine, the others here.
SEATS, REQUESTS = 2, 5


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_model(folder)
    return folder


@pytest.fixture(scope="module")
def engine(tiny: Path, starts_servers: None) -> Iterator[str]:
    config = {"max_num_seqs": SEATS, "device": "simulated:100,0"}
    with closing(RunningServer(tiny, config=config, internal_token=TOKEN)) as server:
        yield server.url


@pytest.fixture
async def gateway(tmp_path: Path, tiny: Path, engine: str, redis_url: str) -> AsyncIterator[Gateway]:
    async with running(settings(tmp_path, tiny, [engine], redis_url, base_model=MODEL)) as gateway:
        yield gateway


@asynccontextmanager
async def streams(client: Client, number: int, tokens: int) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Keep streams of `tokens` tokens open, each of which takes 100 ms."""
    body = {"stream": True, "max_tokens": tokens, "ignore_eos": True, "model": MODEL}
    asked = [asyncio.ensure_future(client.complete(prompt=f"long {i}", **body)) for i in range(number)]
    try:
        yield asked
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)


async def read(gateway: Gateway, path: str) -> dict[str, Any]:
    got = await gateway.admin.get(f"/admin/api/{path}")
    assert got.status == 200, got.body
    return got.json


async def test_requests_that_wait_on_an_engine_count_as_waiting(gateway: Gateway):
    acme, run = await gateway.tenant("acme"), runner(gateway)
    expected = {"waiting": 3, "waiting_in_gateway": 1, "waiting_on_engines": 2}
    async with streams(acme, REQUESTS, 400):

        async def all_wait() -> bool:
            queue = await read(gateway, "queue")
            # The engine counts an arrival during a step at once, and counts it for its tenant from the next step on.
            rows = [queue, *queue["data"]]
            return all(expected.items() <= each.items() and each["waited"] > 0.5 for each in rows)

        await until(all_wait)
        [row] = (await read(gateway, "queue"))["data"]
        assert expected.items() <= row.items()
        assert 0.5 < row["waited"] < 60
        fairness = await read(gateway, "fairness")
        assert expected.items() <= fairness["waits"].items()
        [row] = fairness["data"]
        assert expected.items() <= row.items()
        assert row["oldest"] > 0.5
        top = (await run("top", "--once")).stdout.splitlines()
        assert " 3 waiting (1 in the gateway, 2 on engines)," in top[1]
        [columns] = [line.split() for line in top if line.startswith("TENANT")]
        [cells] = [line.split() for line in top if line.startswith("acme")]
        shown = dict(zip(columns, cells, strict=True))
        assert (shown["WAITING"], shown["WAITING_ON_ENGINES"]) == ("3", "2")
        assert float(shown["LONGEST_WAIT_S"]) >= 0.5
        lines = (await run("fairness")).stdout.splitlines()
        assert lines[1].startswith("3 waiting (1 in the gateway, 2 on engines), the longest for ")
        async with gateway.browser() as operator:
            page = (await operator.get("/admin/fairness")).body.decode()
            csv = (await operator.get("/admin/fairness?format=csv")).body.decode()
        assert "1 here, 2 on engines" in page
        header, cells = (line.split(",") for line in csv.splitlines())
        shown = dict(zip(header, cells, strict=True))
        assert (shown["waiting"], shown["waiting_on_engines"]) == ("3", "2")


async def test_a_wait_on_an_engine_is_in_the_waits_of_its_tenant_and_in_its_request(gateway: Gateway):
    acme = await gateway.tenant("acme")
    # The engine has seats for half of the streams, each of which takes at least 3 s.
    async with streams(acme, 2 * SEATS, 30) as asked:
        answers = await asyncio.gather(*asked)
    assert {answer.status for answer in answers} == {200}
    assert not any("loraplex" in event for answer in answers for event in answer.events)

    async def rows() -> list[Any]:
        return (await read(gateway, "fairness"))["data"]

    async def requests() -> list[Any]:
        found = (await read(gateway, "requests"))["data"]
        return found if len(found) == len(answers) else []

    await until(rows)
    [row] = await rows()
    assert row["p50"] < row["p95"]
    assert 1 < row["p95"] < 60
    assert (await read(gateway, "fairness"))["waits"]["p95"] == row["p95"]
    await until(requests)
    recorded = await requests()
    assert sorted(each["queue_ms"] > 1000 for each in recorded) == [False] * SEATS + [True] * SEATS
    assert all(each["admission_ms"] + each["queue_ms"] <= each["ttft_ms"] + 2 for each in recorded)


def share(tenant: str, waiting: int, oldest: float) -> TenantFairShare:
    return TenantFairShare(tenant, 1.0, 0.0, 0, waiting, oldest, 0.0, 0.0)


def engine_of(tenants: list[TenantFairShare] | None, waiting: int | None) -> EngineRecord:
    """Return an engine that reports these tenants and this number of waiting requests; None: it reports none."""
    fields = {"tenants": tenants, "waiting": waiting}
    given: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
    return EngineRecord(Address("http://e"), state=EngineState(**given, reported=given))


def test_waits_of_several_engines_are_added_and_the_longest_counts():
    engines = [engine_of([share("a", 2, 4.0)], 2), engine_of([share("a", 1, 9.0), share("b", 3, 1.0)], 4)]
    queues = EngineQueues(engines)
    assert queues.total(5, 2.0) == Waits(5, 6, 9.0)
    assert queues.total(5, 2.0).waiting == 11
    assert queues.of("a", 0, 0.0) == Waits(0, 3, 9.0)
    assert queues.of("b", 1, 2.0) == Waits(1, 3, 2.0)
    assert queues.of("c", 0, 0.0) == Waits(0, 0, 0.0)


def test_what_an_engine_does_not_report_is_not_zero():
    foreign = EngineQueues([engine_of(None, 7)])
    assert foreign.total(0, 0.0) == Waits(0, 7, None)
    assert foreign.of("a", 2, 3.0) == Waits(2, None, 3.0)
    assert EngineQueues([engine_of(None, None)]).total(0, 0.0) == Waits(0, None, 0.0)
    assert EngineQueues([]).of("a", 0, 0.0) == Waits(0, None, 0.0)
    # The report leaves out tenants with fewer waiting requests than the listed ones.
    assert EngineQueues([engine_of([share("a", 2, 4.0)], 5)]).of("b", 0, 0.0).on_engines is None
