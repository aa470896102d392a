"""Reports of service at other engines."""

import asyncio
import logging
from contextlib import ExitStack

import pytest
from aiohttp import ClientError

from gateway.fleet.engines.engine import Address, EngineRecord, EngineState
from gateway.fleet.kinds.vllm import Vllm
from gateway.fleet.queueing.engine_service import MAX_REPORTS, REPEAT_SECONDS, EngineService
from wire.responses import TenantFairShare
from wire.service import MAX_TENANTS, ServiceElsewhere

ONE, OTHER = EngineRecord(Address("http://one")), EngineRecord(Address("http://other"))
FOREIGN = EngineRecord(Address("http://foreign", Vllm.traits))


class Reports:
    """Records reports by engine, the latest of each. broken: engines that accept none. slow: the engine that answers
    only after `answers`.
    """

    def __init__(self) -> None:
        self.latest: dict[str, dict[str, float]] = {}
        self.numbers: list[int] = []
        self.broken: set[str] = set()
        self.slow: EngineRecord | None = None
        self.answers = asyncio.Event()
        self.now = 1000.0
        self.service = EngineService(lambda: [ONE, OTHER, FOREIGN], self._send, lambda: self.now)

    async def _send(self, engine: EngineRecord, report: ServiceElsewhere) -> None:
        assert report.reporter
        self.latest[engine.url] = report.tenants
        self.numbers.append(report.number)
        if engine is self.slow:
            await self.answers.wait()
        if engine.url in self.broken:
            raise ClientError

    async def report(self) -> dict[str, dict[str, float]]:
        self.latest = {}
        await asyncio.gather(*self.service.report())
        return self.latest


async def test_each_engine_gets_the_service_at_the_others():
    reports = Reports()
    reports.service.served(ONE, "acme", 10)
    reports.service.served(ONE, "acme", 5)
    reports.service.served(OTHER, "acme", 2)
    reports.service.served(OTHER, "globex", 3)
    # A foreign server's service counts, but it gets no reports.
    reports.service.served(FOREIGN, "acme", 1)
    assert await reports.report() == {"http://one": {"acme": 3, "globex": 3}, "http://other": {"acme": 16}}
    assert await reports.report() == {}


async def test_a_failed_report_is_sent_again_with_its_number_and_logged_once(caplog: pytest.LogCaptureFixture):
    """The engine may have applied it, so nothing is added to it; what came later follows."""
    reports = Reports()
    reports.broken = {"http://one"}
    for _ in range(2):
        reports.service.served(OTHER, "acme", 2)
        assert await reports.report() == {"http://one": {"acme": 2}}
    reports.broken = set()
    reports.service.served(OTHER, "acme", 3)
    assert await reports.report() == {"http://one": {"acme": 2}}
    assert await reports.report() == {"http://one": {"acme": 2 + 3}}
    assert await reports.report() == {}
    assert reports.numbers == [1, 1, 1, 2]
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("engine http://one counts only its own service")
    assert record.getMessage().endswith(": ClientError")


async def test_the_service_of_a_time_in_which_an_engine_was_down_is_not_charged_at_its_return():
    reports = Reports()
    reports.broken = {"http://one"}
    reports.service.served(OTHER, "acme", 2)
    await reports.report()
    reports.service.served(OTHER, "acme", 5)
    reports.now += REPEAT_SECONDS - 0.1
    assert await reports.report() == {"http://one": {"acme": 2}}
    reports.broken = set()
    reports.now += 0.2
    assert await reports.report() == {}
    reports.service.served(OTHER, "acme", 3)
    assert await reports.report() == {"http://one": {"acme": 3}}


async def test_a_report_is_bounded_and_the_other_tenants_follow():
    reports = Reports()
    for number in range(MAX_TENANTS + 10):
        reports.service.served(ONE, f"t{number}", 1 + number)
    report = (await reports.report())["http://other"]
    assert len(report) == MAX_TENANTS
    assert min(report.values()) == 11
    reports.service.served(ONE, "t0", 1)
    assert await reports.report() == {"http://other": {"t0": 2} | {f"t{i}": 1 + i for i in range(1, 10)}}
    assert await reports.report() == {}


async def test_a_slow_engine_delays_no_other_and_loses_no_service():
    reports = Reports()
    reports.slow = ONE
    reports.service.served(FOREIGN, "acme", 1)
    [first, other] = reports.service.report()
    await other
    assert reports.latest == {"http://one": {"acme": 1}, "http://other": {"acme": 1}}
    for _ in range(2):
        reports.service.served(FOREIGN, "acme", 2)
        assert await reports.report() == {"http://other": {"acme": 2}}
    reports.answers.set()
    await first
    assert await reports.report() == {"http://one": {"acme": 4}}


async def test_in_a_large_fleet_engines_take_turns_and_get_the_service_of_their_own_tenants():
    engines = [EngineRecord(Address(f"http://{number}")) for number in range(MAX_REPORTS * 2 + 5)]
    reports: list[dict[str, dict[str, float]]] = []

    async def send(engine: EngineRecord, report: ServiceElsewhere) -> None:
        assert engine.url not in reports[-1]
        reports[-1][engine.url] = report.tenants

    service = EngineService(lambda: engines, send)
    share = TenantFairShare("globex", 1.0, 0.0, 1, 0, 0.0, 0.5, 0.5)
    engines[-1].state = EngineState(tenants=[share])
    with ExitStack() as held:
        for engine in engines[:-1]:
            held.enter_context(engine.requests.count(None, "acme"))
        for _ in range(6):
            service.served(engines[0], "acme", 1)
            service.served(engines[0], "globex", 2)
            service.served(engines[0], "initech", 3)
            reports.append({})
            await asyncio.gather(*service.report())
    # The service at engines[0] is none elsewhere for that engine.
    assert [len(each) for each in reports[:3]] == [MAX_REPORTS - 1, MAX_REPORTS, MAX_REPORTS - 1]
    assert reports[0]["http://1"] == {"acme": 1}
    got: dict[str, float] = {}
    for report in reports:
        for url, service_elsewhere in report.items():
            got[url] = got.get(url, 0.0) + sum(service_elsewhere.values())
    assert got.keys() == {engine.url for engine in engines[1:]}
    # The service of the rounds after an engine's last turn is not reported yet.
    assert got[engines[-1].url] in (8, 10, 12)
    assert all(3 <= got[engine.url] <= 6 for engine in engines[1:-1])
