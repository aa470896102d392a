"""Access to an engine: API keys, the internal token, and operations limited to this machine without either."""

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from engine.answering.errors import ApiError
from engine.http.access import Access, is_loopback
from testing.engine import Client, RunningServer

TOKEN, KEYS = "of-the-gateways", ("first-key", "second-key")
PROMPT = {"model": "tiny", "prompt": "Hi", "max_tokens": 1}


@pytest.fixture(scope="module")
def server(model: Path):
    running = RunningServer(model, internal_token=TOKEN, api_keys=KEYS, access_log=True)
    yield running
    running.close()


@pytest.mark.parametrize(("path", "body"), [("/v1/completions", PROMPT), ("/tokenize", {"prompt": "Hi"})])
async def test_a_key_or_the_token_opens_the_api(client: Client, path: str, body: dict):
    for key in KEYS:
        await client.ok(path, body, headers={"Authorization": f"Bearer {key}"})
    await client.ok(path, body, headers={"x-loraplex-internal-token": TOKEN})
    for wrong in ({}, {"Authorization": "Bearer first"}, {"Authorization": KEYS[0]}, {"Authorization": "Bearer \xff"}):
        status, answer = await client.post(path, body, headers=wrong)
        assert (status, answer["error"]["code"]) == (401, "invalid_api_key")


async def test_the_gateways_routes_take_no_key(client: Client):
    status, answer = await client.get("/state", headers={"Authorization": f"Bearer {KEYS[0]}"})
    assert (status, answer["error"]["code"]) == (401, "invalid_internal_token")
    assert (await client.get("/state", headers={"x-loraplex-internal-token": TOKEN}))[0] == 200
    assert (await client.get("/health"))[0] == 200


async def test_a_clients_word_on_its_tenant_counts_with_the_token_only(client: Client):
    """The tenant headers of a client count only with the internal token; without it, a malformed one is not read."""
    headers = {"Authorization": f"Bearer {KEYS[0]}", "x-loraplex-weight": "heavy"}
    await client.ok("/v1/completions", PROMPT, headers=headers)
    status, _ = await client.post("/v1/completions", PROMPT, headers={**headers, "x-loraplex-internal-token": TOKEN})
    assert status == 400


async def load_from(access: Access, remote: str) -> web.StreamResponse:
    async def loaded(_: web.Request) -> web.StreamResponse:
        return web.Response()

    request = make_mocked_request("POST", "/v1/load_lora_adapter").clone(remote=remote)
    return await access.authenticate(request, loaded)


async def test_without_token_or_key_only_this_machine_loads_by_path():
    assert (await load_from(Access(None, ()), "127.0.0.1")).status == 200
    with pytest.raises(ApiError, match="only from this machine") as refused:
        await load_from(Access(None, ()), "192.0.2.7")
    assert refused.value.status == 403


@pytest.mark.parametrize(
    ("host", "own"),
    [
        *(("127.0.0.1", True), ("::1", True), ("::ffff:127.0.0.1", True), ("localhost", True)),
        *(("0.0.0.0", False), ("::", False), ("192.0.2.7", False), ("host.example", False), (None, False)),
    ],
)
def test_which_addresses_are_this_machine(host: str | None, own: bool):
    assert is_loopback(host) is own


async def test_request_ids_and_access_log(client: Client, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "engine")
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    for given, same in (("mine-1", True), ("x" * 65, False), (None, False)):
        sent = headers if given is None else headers | {"X-Request-Id": given}
        async with client.session.get(f"{client.url}/v1/models", headers=sent) as response:
            got = response.headers["X-Request-Id"]
        assert (got == given) is same
        assert got
    async with client.session.post(
        f"{client.url}/v1/completions", json=PROMPT | {"stream": True}, headers=headers | {"X-Request-Id": "mine-2"}
    ) as response:
        assert response.headers["X-Request-Id"] == "mine-2"
        await response.read()
    assert (await client.get("/v1/nowhere%0A" + "x" * 300 + "?key=some-secret", headers=headers))[0] == 404
    assert (await client.post("/v1/models", {}, headers=headers))[0] == 405
    assert "mine-1 GET /v1/models 200" in caplog.text
    assert f" GET /v1/nowhere%0A{'x' * 186} 404 " in caplog.text
    assert " POST /v1/models 405 " in caplog.text
    assert not any(secret in caplog.text for secret in (*KEYS, TOKEN, "some-secret"))


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET http://xn--a/ HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\nExpect: 1\r\n\r\n", 417),
    ],
)
async def test_heads_that_the_http_library_does_not_answer(server: RunningServer, head: bytes, status: int):
    url = urlsplit(server.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(head)
    answer = await asyncio.wait_for(reader.read(), 20.0)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    assert b'"type":"invalid_request_error"' in answer


async def test_a_body_that_waits_to_be_asked_for(server: RunningServer):
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    async with aiohttp.ClientSession() as session:
        url = f"{server.url}/v1/completions"
        async with session.post(url, json=PROMPT, headers=headers, expect100=True) as answer:
            assert answer.status == 200
