"""Bad input: each gets a 4xx in OpenAI's shape that names the field, and none reaches an engine."""

import asyncio
import io
import json
import logging
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from testing.gateway.running import BASE_MODEL, HI, Client, Gateway
from testing.gateway.upstream import Upstream

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def acme(shared_gateway: Gateway) -> Client:
    return await shared_gateway.tenant("acme")


@pytest.fixture
def gateway(shared_gateway: Gateway) -> Gateway:
    return shared_gateway


@pytest.fixture
def upstream(shared_upstream: Upstream) -> Upstream:
    """Return the engine's double, without the requests of other tests."""
    shared_upstream.requests.clear()
    return shared_upstream


CASES: list[tuple[str, dict[str, Any], int, str]] = [
    ("chat", {"model": "nobody"}, 404, "model"),
    ("chat", {"model": 7}, 400, "model"),
    ("chat", {"model": "nul\0"}, 404, "model"),
    ("chat", {"model": ""}, 404, "model"),
    ("chat", {"messages": []}, 400, "messages"),
    ("chat", {"messages": "Hi"}, 400, "messages"),
    ("chat", {"messages": [{"role": "user"}]}, 400, "messages"),
    ("chat", {"messages": [{"role": "tool", "content": "x"}]}, 400, "messages"),
    ("chat", {"messages": [{"role": "user", "content": "x" * 20_000}]}, 400, "messages"),
    ("chat", {"max_tokens": 0}, 400, "max_tokens"),
    ("chat", {"max_tokens": -3}, 400, "max_tokens"),
    ("chat", {"max_tokens": "many"}, 400, "max_tokens"),
    ("chat", {"max_completion_tokens": 0}, 400, "max_completion_tokens"),
    ("chat", {"max_tokens": 10**9}, 400, "max_tokens"),
    ("chat", {"temperature": "hot"}, 400, "temperature"),
    ("chat", {"stream": "yes"}, 400, "stream"),
    ("chat", {"n": 0}, 400, "n"),
    ("chat", {"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ("complete", {"prompt": ""}, 400, "prompt"),
    ("complete", {"prompt": []}, 400, "prompt"),
    ("complete", {"prompt": [[]]}, 400, "prompt"),
    ("complete", {"prompt": {"a": 1}}, 400, "prompt"),
    ("complete", {"prompt": "x" * 300}, 400, "prompt"),
    ("complete", {"prompt": [1] * 300}, 400, "prompt"),
    ("complete", {"max_tokens": 0}, 400, "max_tokens"),
]


@pytest.mark.parametrize(("route", "body", "status", "param"), CASES)
async def test_a_bad_field_is_named(
    route: str, body: dict[str, Any], status: int, param: str, acme: Client, upstream: Upstream
):
    got = await getattr(acme, route)(**body)
    assert got.status == status, got.body
    assert got.headers["content-type"].startswith("application/json")
    assert got.error["type"] == "invalid_request_error"
    assert got.error["param"].split("[")[0] == param
    assert got.error["message"]
    assert got.headers["x-request-id"].startswith("req_")
    assert upstream.requests == []


async def test_a_missing_field_is_named(acme: Client):
    for path, body, param in (
        ("/v1/chat/completions", {"messages": HI}, "model"),
        ("/v1/chat/completions", {"model": "base"}, "messages"),
        ("/v1/completions", {"model": "base"}, "prompt"),
    ):
        got = await acme.post(path, body)
        assert (got.status, got.error["param"]) == (400, param)


@pytest.mark.parametrize("raw", [b"{", b"", b"[]", b'"x"', b"\xff\xfe", b'{"model":' + b"[" * 100_000])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/admin/api/tenants"])
async def test_a_body_that_is_no_object(path: str, raw: bytes, acme: Client, gateway: Gateway):
    client = gateway.admin if path.startswith("/admin") else acme
    got = await client.call("POST", path, data=raw)
    assert got.status == 400, got.body
    assert got.error["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/adapters"])
async def test_a_body_that_is_not_what_its_headers_say(path: str, acme: Client):
    got = await acme.call("POST", path, data=b"not gzip", headers={"Content-Encoding": "gzip"})
    assert got.status == 400, got.body
    assert got.error["type"] == "invalid_request_error"


async def test_what_is_no_http_is_not_quoted_in_the_log(gateway: Gateway, caplog: pytest.LogCaptureFixture):
    url = urlsplit(gateway.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(b"GET /healthz HTTP/1.1\r\nAuthorization: Bearer my-secret\x01\r\n\r\n")
    assert b"400 Bad Request" in await reader.read()
    writer.close()
    assert "not valid HTTP" in caplog.text
    assert "secret" not in caplog.text


async def whole_answer(gateway: Gateway, head: bytes) -> bytes:
    """Return all bytes until the gateway closes the connection."""
    url = urlsplit(gateway.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(head)
    try:
        return await asyncio.wait_for(reader.read(), 20.0)
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("head", "status", "words"),
    [
        (b"GET http://xn--a/ HTTP/1.1\r\nHost: x\r\n\r\n", 400, b"not a valid host"),
        (
            b"POST http://xn--a/v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{",
            400,
            b"not a valid host",
        ),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\nExpect: 1\r\n\r\n", 417, b"100-continue"),
        (b"GET /nowhere HTTP/1.1\r\nHost: x\r\nConnection: close\r\nExpect: \xff\r\n\r\n", 417, b"100-continue"),
    ],
)
async def test_heads_that_the_http_library_does_not_answer(
    gateway: Gateway, caplog: pytest.LogCaptureFixture, head: bytes, status: int, words: bytes
):
    caplog.set_level(logging.INFO)
    answer = await whole_answer(gateway, head)
    assert answer.startswith(b"HTTP/1.1 %d " % status)
    top, _, body = answer.partition(b"\r\n\r\n")
    assert b"x-request-id: req_" in top.lower()
    assert words in json.loads(body)["error"]["message"].encode()
    assert "Traceback" not in caplog.text
    assert len([line for line in caplog.records if line.name in ("gateway.api.access_log", "gateway.http")]) <= 1


async def test_a_body_is_asked_for_after_the_key(gateway: Gateway, acme: Client, upstream: Upstream):
    url = urlsplit(gateway.url)
    body = json.dumps({"model": BASE_MODEL, "prompt": "Hi", "max_tokens": 1}).encode()

    def head(key: str) -> bytes:
        lines = ("POST /v1/completions HTTP/1.1", "Host: x", f"Authorization: Bearer {key}", "Expect: 100-continue")
        return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode()

    assert (await whole_answer(gateway, head("lpx_wrong"))).startswith(b"HTTP/1.1 401 ")
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    writer.write(head(acme.key))
    assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20.0) == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert (await asyncio.wait_for(reader.readline(), 20.0)).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_a_body_over_the_limit(acme: Client):
    got = await acme.call("POST", "/v1/completions", data=io.BytesIO(b"x" * (9 * 2**20)))
    assert (got.status, got.error["code"]) == (413, "request_too_large")


async def test_urls_and_methods_that_are_none(acme: Client):
    assert (await acme.get("/v1/nothing")).error["code"] == "unknown_url"
    for path, hint in (
        ("/chat/completions", " Did you mean /v1/chat/completions?"),
        ("/v1/v1/chat/completions", " Did you mean /v1/chat/completions?"),
        ("/nowhere", ""),
    ):
        error = (await acme.post(path, {})).error
        assert error["message"].startswith(f"Unknown route POST {path}.{hint} The API's base URL ends with /v1;")

    got = await acme.get("/v1/chat/completions")
    assert (got.status, got.error["code"], got.headers["Allow"]) == (405, "method_not_allowed", "POST")


TENANTS: list[tuple[dict[str, Any], str]] = [
    ({}, "name"),
    ({"name": 5}, "name"),
    ({"name": "Bad Name"}, "name"),
    ({"name": "x", "requests_per_minute": 0}, "requests_per_minute"),
    ({"name": "x", "tokens_per_minute": "many"}, "tokens_per_minute"),
    ({"name": "x", "max_concurrent": 1.5}, "max_concurrent"),
    ({"name": "x", "weight": -1}, "weight"),
    ({"name": "x", "wieght": 1}, "wieght"),
]


@pytest.mark.parametrize(("body", "param"), TENANTS)
async def test_a_tenant_that_is_none(body: dict[str, Any], param: str, acme: Client, gateway: Gateway):
    got = await gateway.admin.post("/admin/api/tenants", body)
    assert got.status == 400, got.body
    assert got.error["param"] == param
    if "name" in body and param != "name":
        changes = {key: value for key, value in body.items() if key != "name"}
        changed = await gateway.admin.call("PATCH", "/admin/api/tenants/acme", json=changes)
        assert (changed.status, changed.error["param"]) == (400, param)


WORDS: list[tuple[dict[str, Any], str]] = [
    ({"name": "x", "max_concurrent": 0}, "max_concurrent: expected an integer of at least 1."),
    ({"name": "x", "max_concurrent": 10**6}, "max_concurrent: expected an integer of at most 100000."),
    ({"name": "x", "weight": -1}, "weight: expected a number of at least 0.01."),
    ({"name": 5}, "name: expected a string, got an integer."),
    ({"name": "x", "max_concurrent": "1"}, "max_concurrent: expected an integer or null, got a string."),
    ({"name": "x", "weight": None}, "weight: expected a number, got null."),
    ({}, "name: is required."),
    ({"name": "x", "wieght": 1}, "wieght: there is no such field."),
]


@pytest.mark.parametrize(("body", "message"), WORDS)
async def test_what_was_expected_is_said_in_words(body: dict[str, Any], message: str, gateway: Gateway):
    assert (await gateway.admin.post("/admin/api/tenants", body)).error["message"] == message


async def test_a_text_that_is_too_long_is_said_in_characters(gateway: Gateway):
    got = await gateway.admin.post("/admin/api/keys", {"label": "x" * 101})
    assert got.error["message"] == "label: expected a string of at most 100 characters."


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/usage?since=tomorrow", "/v1/usage?until=2026-13-01", "/v1/usage?until=9999-12-31T23:30:00"),
        *("/v1/usage?until=9999-12-31T23:30:00-12:00", "/v1/usage?since=0001-01-01T00:00:00%2B12:00"),
    ],
)
async def test_a_moment_that_is_none(path: str, acme: Client):
    got = await acme.get(path)
    assert (got.status, got.error["param"]) == (400, path.split("?")[1].split("=")[0])


async def test_a_period_that_ends_before_it_begins(acme: Client, gateway: Gateway):
    backwards = {"since": "2026-11-02", "until": "2026-11-01"}
    for client, path in ((acme, "/v1/usage"), (gateway.admin, "/admin/api/usage"), (gateway.admin, "/admin/api/audit")):
        got = await client.get(path, params=backwards)
        assert (got.status, got.error["param"]) == (400, "since")


async def test_a_query_parameter_that_is_none_is_named_with_those_that_are(acme: Client, gateway: Gateway):
    got = await gateway.admin.get("/admin/api/usage?tenat=alpha")
    assert (got.status, got.error["param"]) == (400, "tenat")
    assert got.error["message"] == (
        "tenat: there is no such query parameter; known are: tenant, since, until, group_by, limit, after."
    )
    for client, method, path in (
        (acme, "GET", "/v1/usage?tenant=acme"),
        (gateway.admin, "GET", "/admin/api/audit?tenat=acme"),
        (gateway.admin, "GET", "/admin/api/tenants?limits=3"),
        (gateway.admin, "DELETE", "/admin/api/tenants/acme?dry_run=true"),
        (gateway.admin, "PUT", "/admin/api/prices/base?forse=true"),
    ):
        got = await client.call(method, path)
        assert (got.status, "no such query parameter" in got.error["message"]) == (400, True), path
    twice = await gateway.admin.get("/admin/api/usage?tenant=acme&tenant=other")
    assert (twice.status, twice.error["message"]) == (400, "tenant: expected once.")
    assert (await gateway.admin.get("/admin/api/tenants/acme")).status == 200


UNFIT: list[tuple[str, dict[str, Any], str]] = [
    ("keys", {"label": "nul\0"}, "label"),
    ("keys", {"label": "two\nlines"}, "label"),
    ("keys", {"label": "\x1b[31mred"}, "label"),
    ("tenants/acme/keys?force=true", {"label": "\x85"}, "label"),
    ("tenants/acme/keys?force=true", {"allowed_models": ["\0"]}, "allowed_models[0]"),
    ("tenants?force=true", {"name": "x", "model_limits": {"\0": {}}}, "model_limits"),
    ("tenants", {"name": "x\n"}, "name"),
]


@pytest.mark.parametrize(("path", "body", "param"), UNFIT)
async def test_a_text_with_control_characters_is_named(
    path: str, body: dict[str, Any], param: str, acme: Client, gateway: Gateway
):
    got = await gateway.admin.post(f"/admin/api/{path}", body)
    assert (got.status, got.error["param"]) == (400, param), got.body


async def test_texts_that_no_database_holds(acme: Client, gateway: Gateway):
    for raw in (b'{"label": "\\ud800x"}', b'{"label": "\\udc00"}', b'{"label": "\xed\xa0\x80"}'):
        got = await gateway.admin.call("POST", "/admin/api/keys", data=raw)
        assert got.status == 400, got.body
    for model in ("%00", "acme%2F%00", "nobody%2Fa%1Bb"):
        got = await gateway.admin.call("PUT", f"/admin/api/prices/{model}?force=true", json={"input": 1, "output": 1})
        assert (got.status, got.error["param"]) == (400, "model"), model
    assert (await gateway.admin.post("/admin/api/keys", {"label": "Zoë's 👩\u200d💻"})).status == 201


async def test_apis_that_are_not_served_are_named(gateway: Gateway):
    for path, name in (("/v1/responses", "Responses"), ("/v1/embeddings", "Embeddings"), ("/v1/files/f1", "Files")):
        answer = await gateway.nobody.post(path, {})
        assert (answer.status, answer.error["code"]) == (404, "unsupported_endpoint")
        expected = f"POST {path}: the {name} API is not served here; use POST /v1/chat/completions."
        assert answer.error["message"] == expected
    assert (await gateway.nobody.get("/v1/responsesx")).error["code"] == "unknown_url"
