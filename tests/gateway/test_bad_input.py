"""Bad input: each a 4xx in OpenAI's shape that names the field, and nothing of it reaches an engine."""

import asyncio
import io
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.gateway.running import HI, Client, Gateway
from tests.gateway.upstream import Upstream


@pytest.fixture
async def acme(gateway: Gateway) -> Client:
    return await gateway.tenant("acme")


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
    ("chat", {"max_tokens": 10**9}, 400, "messages"),
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


async def test_a_body_over_the_limit(acme: Client):
    got = await acme.call("POST", "/v1/completions", data=io.BytesIO(b"x" * (9 * 2**20)))
    assert (got.status, got.error["code"]) == (413, "request_too_large")


async def test_urls_and_methods_that_are_none(acme: Client):
    assert (await acme.get("/v1/nothing")).error["code"] == "unknown_url"
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
async def test_a_tenant_that_is_none(body: dict[str, Any], param: str, gateway: Gateway):
    got = await gateway.admin.post("/admin/api/tenants", body)
    assert got.status == 400, got.body
    assert got.error["param"] == param
    if "name" in body and param != "name":
        await gateway.tenant("acme")
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
