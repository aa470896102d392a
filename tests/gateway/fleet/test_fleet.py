"""Engines that come and go: health, announcements, and requests that move to another engine."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from aiohttp import ClientTimeout

from gateway.api.health import NO_ENGINE, NO_ENGINE_KNOWN
from gateway.fleet.engines.breaker import FAILURES_UNTIL_OPEN
from gateway.fleet.engines.engine import EngineRecord
from testing.gateway.running import ADMIN_KEY, BASE_MODEL, Browser, Client, Gateway, running, settings, until
from testing.gateway.upstream import TOKEN, Upstream
from testing.ports import free_port

pytestmark = pytest.mark.usefixtures("quick_polls")

# Codes of engines that cannot serve a request now.
BUSY = ("engine_overloaded", "adapter_files_unreadable")


async def test_residency_is_read_and_followed(tmp_path: Path, model_dir: Path, redis_url: str):
    async with Upstream().serving() as one, Upstream().serving() as two:
        two.resident = ["sha256:" + "d" * 64]
        async with running(settings(tmp_path, model_dir, [one.url, two.url], redis_url, redis_timeout=30.0)) as gateway:
            listed = (await gateway.admin.get("/admin/api/engines")).json["data"]
            assert [e["resident"] for e in listed] == [[], ["d" * 64]]
            assert all(e["healthy"] and e["in_flight"] == 0 for e in listed)


async def test_an_engine_that_dies_is_passed_over_and_found_again(tmp_path: Path, model_dir: Path, redis_url: str):
    async with Upstream().serving() as stays:
        async with Upstream().serving() as goes:
            port = int(goes.url.rsplit(":", 1)[1])
            of = settings(tmp_path, model_dir, [goes.url, stays.url], redis_url, redis_timeout=30.0)
            gateway_of = running(of)
            gateway = await gateway_of.__aenter__()
            acme = await gateway.tenant("acme")
            assert (await acme.complete()).status == 200
        try:
            # The first request with a refused connection goes to the next engine; its client does not notice.
            for i in range(8):
                got = await acme.complete(prompt=f"conversation {i}")
                assert got.status == 200, got.body
            await gateway.engines_up(1)
            assert [e["healthy"] for e in (await gateway.admin.get("/admin/api/engines")).json["data"]] == [False, True]
            async with Upstream().serving(port):
                await gateway.engines_up(2)
        finally:
            await gateway_of.__aexit__(None, None, None)


async def test_a_tests_gateway_starts_once_each_engine_has_answered(
    tmp_path: Path, model_dir: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("gateway.fleet.discovery.health_checks.HEALTH_TIMEOUT", ClientTimeout(total=0.5))
    note = EngineRecord.note_missed_check
    async with Upstream().serving() as late, Upstream().serving() as prompt:
        late.mute = True

        def answer_the_third(record: EngineRecord, reason: str) -> None:
            note(record, reason)
            late.mute = record.condition.misses < 2

        monkeypatch.setattr(EngineRecord, "note_missed_check", answer_the_third)
        async with running(settings(tmp_path, model_dir, [late.url, prompt.url], redis_url)) as gateway:
            assert await gateway.engine_faults() == []


async def test_an_engine_of_another_model_gets_no_requests(
    tmp_path: Path, model_dir: Path, redis_url: str, caplog: pytest.LogCaptureFixture
):
    problem = (
        "engine serves other, not base; start it with --served-model-name base, or add its base model: "
        "`loraplex base add`"
    )
    async with Upstream().serving() as wrong, Upstream().serving() as right:
        wrong.model = "other"
        async with running(
            settings(tmp_path, model_dir, [wrong.url, right.url], redis_url, redis_timeout=30.0)
        ) as gateway:
            acme = await gateway.tenant("acme")
            assert [(await acme.complete()).status for _ in range(3)] == [200] * 3
            assert wrong.requests == []
            ready = await gateway.nobody.get("/readyz")
            assert (ready.status, ready.json["engines_up"]) == (200, 1)
            assert ready.json["engine_problems"] == ["misconfigured"]
            assert await gateway.engine_faults() == [f"{wrong.url} is misconfigured: {problem}"]
            right.healthy = False
            await gateway.engines_up(0)
            ready = await gateway.nobody.get("/readyz")
            assert (ready.status, ready.json["status"], ready.json["parts"]["engines"]) == (200, "degraded", NO_ENGINE)
            assert ready.json["engine_problems"] == ["down", "misconfigured"]
            assert f"{wrong.url} is misconfigured: {problem}" in await gateway.engine_faults()
            assert (await acme.complete()).status == 503
            wrong.model = BASE_MODEL
            await gateway.engines_up(1)
            ready = await gateway.nobody.get("/readyz")
            down = f"{right.url} is down: GET /health answered 503"
            assert (ready.status, ready.json["engine_problems"]) == (200, ["down"])
            assert await gateway.engine_faults() == [down]
    assert caplog.text.count(problem) == 1


async def test_an_engine_that_is_not_there_is_named_with_the_reason(
    tmp_path: Path, model_dir: Path, redis_url: str, caplog: pytest.LogCaptureFixture
):
    refusing, unknown = f"http://127.0.0.1:{free_port()}", "http://no-such-engine.invalid:1"
    async with Upstream().serving() as well:
        urls = [refusing, unknown, well.url]
        async with running(settings(tmp_path, model_dir, urls, redis_url, redis_timeout=30.0)) as gateway:
            expected = [
                f"{refusing} is down: GET /health failed: connection refused; no process listens at this address",
                f"{unknown} is down: GET /health failed: its host name cannot be resolved",
            ]
            assert await gateway.engine_faults() == expected
            # A client without a key learns neither addresses nor reasons.
            assert (await gateway.nobody.get("/readyz")).json["engine_problems"] == ["down", "down"]
            for line in expected:
                assert caplog.text.count(f"engine {line}") == 1
            well.healthy = False
            await gateway.engines_up(0)
            ready = (await gateway.nobody.get("/readyz")).json
            assert ready["parts"]["engines"] == NO_ENGINE
            assert await gateway.engine_faults() == [*expected, f"{well.url} is down: GET /health answered 503"]
            async with Browser(gateway.url, "/admin") as browser:
                await browser.log_in(ADMIN_KEY)
                assert "connection refused" in (await browser.get("/admin/")).body.decode()


async def test_a_gateway_that_knows_no_engine_says_so(tmp_path: Path, model_dir: Path, redis_url: str):
    engines = ["dns://no-such-engine.invalid:1"]
    async with running(settings(tmp_path, model_dir, engines, redis_url, redis_timeout=30.0)) as gateway:
        ready = (await gateway.nobody.get("/readyz")).json
        assert (ready["parts"]["engines"], ready["engine_problems"]) == (NO_ENGINE_KNOWN, [])


async def test_a_request_that_no_engine_was_there_for_is_given_back(gateway: Gateway, upstream: Upstream):
    acme = await gateway.tenant("acme", requests_per_minute=1)
    upstream.healthy = False
    await gateway.engines_up(0)
    for _ in range(3):
        got = await acme.complete()
        assert (got.status, got.error["code"]) == (503, "no_engine")
        assert got.headers["x-ratelimit-limit-requests"] == "1"
    upstream.healthy = True
    await gateway.engines_up(1)
    assert (await acme.complete()).status == 200

    async def requests() -> int:
        return sum(row["requests"] for row in await acme.usage())

    async def is_written() -> bool:
        return await requests() > 0

    await until(is_written)
    assert await requests() == 1
    assert 'status="abandoned"' not in (await gateway.admin.get("/metrics")).body.decode()


async def test_without_an_engine(gateway: Gateway, upstream: Upstream):
    acme = await gateway.tenant("acme", tokens_per_minute=100)
    upstream.healthy = False
    await gateway.engines_up(0)
    for _ in range(3):
        # Nothing is charged: three times 64 of 100 tokens.
        got = await acme.complete(max_tokens=62)
        assert (got.status, got.error["code"]) == (503, "no_engine")
        assert got.headers["Retry-After"] == "1"
    ready = await gateway.nobody.get("/readyz")
    assert (ready.status, ready.json["status"], ready.json["parts"]["engines"]) == (200, "degraded", NO_ENGINE)
    assert await gateway.engine_faults() == [f"{upstream.url} is down: GET /health answered 503"]
    # The operator still gets in.
    assert (await gateway.admin.get("/admin/api/tenants")).status == 200
    upstream.healthy = True
    await gateway.engines_up(1)
    assert (await acme.complete(max_tokens=62)).status == 200


async def test_own_requests_are_counted_while_they_run(gateway: Gateway):
    acme = await gateway.tenant("acme")
    running_one = asyncio.ensure_future(acme.complete(x_engine={"tokens": 2, "delay": 60}))

    async def in_flight(number: int) -> bool:
        return (await gateway.admin.get("/admin/api/engines")).json["data"][0]["in_flight"] == number

    await until(lambda: in_flight(1))
    running_one.cancel()
    await until(lambda: in_flight(0))


@pytest.fixture(params=["all engines compared", "some compared"])
async def pair(
    tmp_path: Path, model_dir: Path, redis_url: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Gateway, Upstream, Upstream]]:
    if request.param == "some compared":
        monkeypatch.setattr("gateway.fleet.discovery.base_engines.EXACT", 0)
    async with (
        Upstream().serving() as one,
        Upstream().serving() as two,
        running(settings(tmp_path, model_dir, [one.url, two.url], redis_url, redis_timeout=30.0)) as gateway,
    ):
        yield gateway, one, two


@pytest.fixture
def long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep an opened breaker open for the whole test."""
    monkeypatch.setattr("gateway.fleet.engines.breaker.FIRST_PAUSE_SECONDS", 3600.0)
    monkeypatch.setattr("gateway.fleet.engines.breaker.MAX_PAUSE_SECONDS", 3600.0)


async def ask_of_both(acme: Client, one: Upstream, two: Upstream, asked: int) -> None:
    """Send requests of new conversations until each engine has had `asked`; every request must be answered."""
    numbers = itertools.count()

    async def enough() -> bool:
        got = await acme.complete(prompt=f"{next(numbers)}")
        assert got.status == 200, got.body
        return min(len(one.requests), len(two.requests)) >= asked

    await until(enough, 60.0)


@pytest.mark.parametrize("refuses", [None, *((503, code) for code in ("engine_unavailable", *BUSY))])
async def test_what_an_engine_does_not_begin_another_does(
    pair: tuple[Gateway, Upstream, Upstream], refuses: tuple[int, str] | None
):
    gateway, one, two = pair
    acme = await gateway.tenant("acme", requests_per_minute=1_000_000, tokens_per_minute=100_000_000)
    one.refuses = refuses
    await ask_of_both(acme, one, two, 1)
    ids = {headers["x-request-id"] for headers, _ in one.requests}
    assert ids <= {headers["x-request-id"] for headers, _ in two.requests}
    one.refuses = False
    await ask_of_both(acme, one, two, len(one.requests) + 1)


async def test_a_conversation_stays_with_its_engine(pair: tuple[Gateway, Upstream, Upstream]):
    gateway, one, two = pair
    acme = await gateway.tenant("acme")
    for i in range(10):
        assert (await acme.complete(prompt=f"{i}", prompt_cache_key="a conversation")).status == 200
    assert sorted([len(one.requests), len(two.requests)]) == [0, 10]


@pytest.mark.parametrize("refuses", [*((503, code) for code in BUSY), (429, "engine_share_used")])
async def test_if_no_engine_begins_the_last_ones_reason_is_returned(
    pair: tuple[Gateway, Upstream, Upstream], refuses: tuple[int, str]
):
    gateway, one, two = pair
    acme = await gateway.tenant("acme")
    one.refuses = two.refuses = refuses
    got = await acme.complete()
    assert (got.status, got.error["code"]) == refuses
    assert got.headers["Retry-After"] == "7"
    assert len(one.requests) == len(two.requests) == 1


async def test_if_all_are_on_their_way_out_there_is_none(pair: tuple[Gateway, Upstream, Upstream]):
    gateway, one, two = pair
    acme = await gateway.tenant("acme")
    one.refuses = two.refuses = (503, "engine_unavailable")
    for stream in (False, True):
        got = await acme.complete(stream=stream)
        assert (got.status, got.error["code"], got.headers["Retry-After"]) == (503, "no_engine", "1")
        assert "not now" not in got.error["message"]


async def test_streams_that_a_revocation_ends_are_not_held_against_their_engine(
    gateway: Gateway, upstream: Upstream, long_pauses: None
):
    bystander = await gateway.tenant("bystander")
    await gateway.tenant("acme")
    made = (await gateway.admin.post("/admin/api/tenants/acme/keys")).json
    asked = FAILURES_UNTIL_OPEN + 2
    long = {"stream": True, "max_tokens": 200, "x_engine": {"tokens": 200, "delay": 0.2}}
    streams = [asyncio.create_task(gateway.client(made["key"]).complete(**long)) for _ in range(asked)]

    async def all_begun() -> bool:
        return upstream.events >= asked * 2

    await until(all_begun)
    assert (await gateway.admin.call("DELETE", f"/admin/api/keys/{made['id']}")).status < 300
    for stream in await asyncio.gather(*streams):
        assert stream.events[-1]["error"]["code"] == "invalid_api_key"
    assert (await bystander.complete()).status == 200


@pytest.mark.parametrize("how", [{"drop_after": 1}, {"status": 500}])
async def test_an_engine_that_breaks_one_answer_after_the_other_gets_no_more(
    gateway: Gateway, upstream: Upstream, how: dict[str, int], long_pauses: None
):
    acme = await gateway.tenant("acme", requests_per_minute=1_000_000, tokens_per_minute=100_000_000)
    for _ in range(FAILURES_UNTIL_OPEN):
        failed = (await acme.complete(stream=True, x_engine=how)).body.decode()
        assert ("engine_died" if "drop_after" in how else "engine_error") in failed
    got = await acme.complete()
    assert (got.status, got.error["code"], len(upstream.requests)) == (503, "no_engine", FAILURES_UNTIL_OPEN)


@pytest.mark.parametrize("code", BUSY)
async def test_requests_that_an_engine_cannot_serve_now_are_no_failures_of_it(
    gateway: Gateway, upstream: Upstream, code: str, long_pauses: None
):
    tenants = [await gateway.tenant(name) for name in ("acme", "globex")]
    upstream.refuses = (503, code)
    for tenant in tenants * FAILURES_UNTIL_OPEN:
        got = await tenant.complete()
        assert (got.status, got.error["code"]) == (503, code)
    upstream.refuses = False
    assert [(await tenant.complete()).status for tenant in tenants] == [200, 200]


async def test_while_a_long_answer_proves_an_engine_others_are_served(
    gateway: Gateway, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
):
    for name in ("FIRST_PAUSE_SECONDS", "MAX_PAUSE_SECONDS"):
        monkeypatch.setattr(f"gateway.fleet.engines.breaker.{name}", 0.0)
    acme = await gateway.tenant("acme", requests_per_minute=1_000_000, tokens_per_minute=100_000_000)
    for _ in range(FAILURES_UNTIL_OPEN):
        await acme.complete(stream=True, x_engine={"drop_after": 1})
    before = upstream.events
    trial = asyncio.create_task(acme.complete(stream=True, max_tokens=200, x_engine={"tokens": 200, "delay": 0.5}))

    async def begun() -> bool:
        return upstream.events > before

    await until(begun)
    assert (await acme.complete()).status == 200
    trial.cancel()


async def test_an_engine_that_fails_with_a_request_is_not_the_only_one_asked(pair: tuple[Gateway, Upstream, Upstream]):
    gateway, one, two = pair
    acme = await gateway.tenant("acme", requests_per_minute=1_000_000, tokens_per_minute=100_000_000)
    one.refuses = (500, "internal")
    await ask_of_both(acme, one, two, 1)
    # Both engines fail, so the request may be the cause.
    two.refuses = (500, "internal")
    got = await acme.complete(prompt="what ends them all")
    assert got.status in (502, 503)
    assert got.error["code"] in ("engine_error", "no_engine")


async def test_a_request_that_engines_leave_over_is_not_given_to_one_after_the_other(
    tmp_path: Path, model_dir: Path, redis_url: str
):
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(Upstream().serving()) for _ in range(4)]
        of = settings(tmp_path, model_dir, [engine.url for engine in engines], redis_url, redis_timeout=30.0)
        gateway = await stack.enter_async_context(running(of))
        acme = await gateway.tenant("acme")
        for engine in engines:
            engine.refuses = None
        got = await acme.complete()
        assert (got.status, got.error["code"]) == (502, "engine_error")
        assert sum(len(engine.requests) for engine in engines) == 2


async def test_an_engine_that_announces_itself_is_used_until_it_takes_it_back(
    tmp_path: Path, model_dir: Path, redis_url: str
):
    headers = {"x-loraplex-internal-token": TOKEN}
    announced = running(settings(tmp_path, model_dir, ["announced"], redis_url, redis_timeout=30.0))
    async with Upstream().serving() as engine, announced as gateway:
        acme = await gateway.tenant("acme")
        path, body = "/internal/engines", {"url": engine.url}
        assert (await gateway.nobody.post(path, body)).error["code"] == "invalid_internal_token"
        assert (await acme.post(path, body)).status == 401
        refused = await gateway.nobody.post(path, {"url": "dns://x:1"}, headers=headers)
        assert (refused.status, refused.error["param"]) == (400, "url")
        assert (await gateway.nobody.post(path, body, headers=headers)).status == 204
        await gateway.engines_up(1)
        assert (await acme.complete()).status == 200
        assert (await gateway.nobody.call("DELETE", path, json=body, headers=headers)).status == 204
        await gateway.engines_up(0)
        assert (await acme.complete()).error["code"] == "no_engine"


async def test_announcements_are_taken_only_where_they_are_asked_for(gateway: Gateway):
    headers = {"x-loraplex-internal-token": TOKEN}
    got = await gateway.nobody.post("/internal/engines", {"url": "http://x:1"}, headers=headers)
    assert (got.status, got.error["code"]) == (404, "not_found")
