"""Metrics of foreign servers: large ones of healthy servers, and those of servers that lie."""

import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import ClientSession, web

from gateway.fleet.discovery.addresses import parse_address
from gateway.fleet.discovery.health_checks import HealthChecks
from gateway.fleet.engines.engine import EngineRecord
from gateway.fleet.kinds import server_metrics
from gateway.fleet.kinds.server_metrics import MAX_KEPT_BYTES, MAX_LINE_BYTES, read_metrics
from testing.gateway.bases import only
from testing.gateway.kinds import kinds_of
from testing.gateway.running import BASE_MODEL
from testing.gateway.sglang_double import SglangDouble
from testing.gateway.vllm_double import VllmDouble

RUNNING = b'vllm:num_requests_running{engine="0"} 3.0\n'
OTHER = b'vllm:lora_requests_info{running_lora_adapters="%d"} 1.0\n'


class Server(VllmDouble):
    """Double of vLLM with given metrics."""

    def __init__(self, *pages: bytes) -> None:
        super().__init__(api_key="", base_model=BASE_MODEL)
        self.pages: Sequence[bytes] = pages

    async def _metrics(self, request: web.Request) -> Any:
        response = web.StreamResponse()
        await response.prepare(request)
        # The gateway may close the connection before the last piece.
        with suppress(ConnectionError):
            for piece in self.pages:
                await response.write(piece)
        return response


@asynccontextmanager
async def checked(server: VllmDouble | SglangDouble, prefix: str = "vllm") -> AsyncIterator[EngineRecord]:
    """Start a server, check it once, and yield its record."""
    async with server.serving(), ClientSession() as session:
        engine = EngineRecord(parse_address(f"{prefix}+{server.url}"))
        await HealthChecks(session, kinds_of(session), only(BASE_MODEL)).check(engine)
        yield engine


@pytest.mark.usefixtures("starts_servers")
async def test_a_healthy_server_with_many_label_sets_is_up():
    """Its page of more than 8 MiB was not read, so it never got a request."""
    many = b"".join(OTHER % i for i in range(10_000))
    async with checked(Server(*[many] * 17, RUNNING)) as engine:
        assert len(many) * 17 > 8 * 2**20
        assert (engine.is_up, engine.state.running) == (True, 3)


@pytest.mark.usefixtures("starts_servers")
async def test_a_page_without_an_end_takes_no_server_out_and_is_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(server_metrics, "MAX_METRICS_BYTES", 2**20)
    server = Server(RUNNING, *[OTHER % 1 * 1000] * 1000)
    async with server.serving(), ClientSession() as session:
        engine = EngineRecord(parse_address(f"vllm+{server.url}"))
        checks = HealthChecks(session, kinds_of(session), only(BASE_MODEL))
        with caplog.at_level(logging.WARNING, "gateway.fleet.kinds.vllm"):
            for _ in range(3):
                await checks.check(engine)
            assert (engine.is_up, engine.state.running) == (True, 3)
            assert caplog.text.count("its page is too large") == 1
            server.pages = [RUNNING]
            await checks.check(engine)
            assert "works again" in caplog.text


@pytest.mark.usefixtures("starts_servers")
async def test_what_a_page_that_is_too_large_does_not_show_is_as_before(monkeypatch: pytest.MonkeyPatch):
    """The gateway took the server's plugin for removed, and loaded adapters that the server finds by itself."""
    monkeypatch.setattr(server_metrics, "MAX_METRICS_BYTES", 2**20)
    plugin = b'loraplex_resolver_info{base_digest="b",version="0.1.0",device="cuda"} 1.0\n'
    waiting = b'vllm:num_requests_waiting{engine="0"} 5.0\n'
    server, many = Server(waiting, plugin), OTHER % 1 * 1000
    async with server.serving(), ClientSession() as session:
        engine = EngineRecord(parse_address(f"vllm+{server.url}"))
        checks = HealthChecks(session, kinds_of(session), only(BASE_MODEL))

        async def checked_state() -> tuple[bool, int, int]:
            await checks.check(engine)
            return engine.state.finds_adapters, engine.state.running, engine.state.waiting

        assert await checked_state() == (True, 0, 5)
        server.pages = [RUNNING, *[many] * 100, waiting, plugin]
        assert await checked_state() == (True, 3, 5)
        server.pages = [waiting.replace(b"5", b"1"), *[many] * 100]
        assert await checked_state() == (True, 0, 1)
        # Another server may run after an absence.
        engine.mark_down("gone")
        assert await checked_state() == (False, 0, 1)


@pytest.mark.usefixtures("starts_servers")
@pytest.mark.parametrize("value", [b"1e999", b"1e300", b"NaN", b"+Inf", b"-5", b"1.2.3", b"\xff", b"e", b"9" * 5000])
async def test_a_value_that_is_no_number_of_requests_is_ignored(value: bytes):
    """A value beyond all numbers ended the server's task with an exception; 1e300 failed the operators' list."""
    async with checked(Server(b"vllm:num_requests_running %s\n" % value, RUNNING)) as engine:
        assert (engine.is_up, engine.state.running) == (True, 3)


@pytest.mark.usefixtures("starts_servers")
async def test_answers_that_cannot_be_parsed_end_no_check():
    digits, other = Server(RUNNING), Server(b'loraplex_resolver_info{base_digest="\xff"} 1\n')
    digits.version = "1." + "9" * 5000
    for server in (digits, other):
        async with checked(server) as engine:
            assert not engine.is_up
            assert "an answer does not have the expected form" in engine.condition.reason


@pytest.mark.usefixtures("starts_servers")
@pytest.mark.parametrize("value", [-(10**6), 2**40])
async def test_sglangs_numbers_of_requests_are_bounded(value: int):
    """A negative number took places of the base model's other servers."""

    class Double(SglangDouble):
        async def _loads(self, request: web.Request) -> web.Response:
            return web.json_response({"loads": [{"max_running_requests": value}]})

    async with checked(Double(api_key="", base_model=BASE_MODEL), "sglang") as engine:
        assert not engine.is_up


async def read(pieces: Sequence[bytes]) -> tuple[bytes, bool]:
    async def iter_any() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    response = SimpleNamespace(content=SimpleNamespace(iter_any=iter_any))
    text, is_whole = await read_metrics(cast(Any, response), [b"wanted", b"also"])
    return text.strip(b"\n"), is_whole


def cuts(page: bytes) -> Iterator[tuple[bytes, ...]]:
    """Yield the page in two pieces, in every way, and in pieces of a byte."""
    yield from ((page[:cut], page[cut:]) for cut in range(len(page) + 1))
    yield tuple(page[i : i + 1] for i in range(len(page)))


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        (b"wanted 1\nother 2\nwanted 3\n", b"wanted 1\nwanted 3"),
        (b"other\nwanted 1\nan unwanted 2\nwanted 3", b"wanted 1\nwanted 3"),
        (b"\n\nwanted\n\n", b"wanted"),
        (b"also 1\nx\n", b"also 1"),
        (b"", b""),
    ],
)
async def test_lines_are_found_wherever_a_page_is_cut(page: bytes, expected: bytes):
    for pieces in cuts(page):
        assert await read(pieces) == (expected, True)


async def test_no_long_line_and_no_further_lines_are_kept():
    long = b"x" * MAX_LINE_BYTES
    assert await read([b"wanted", long, long, b"\nwanted 1\n"]) == (b"wanted 1", True)
    assert await read([long, b"x\nwanted 1"]) == (b"wanted 1", True)
    text, is_whole = await read([b"wanted 10\n" * MAX_KEPT_BYTES])
    assert (len(text) <= MAX_KEPT_BYTES, is_whole) == (True, False)
    assert set(text.split(b"\n")) == {b"wanted 10"}
