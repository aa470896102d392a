"""Bad input over real HTTP: the status, OpenAI's error object, and nothing left in the engine."""

import asyncio
import gzip
import io
import json
import zlib

import pytest

MESSAGES = [{"role": "user", "content": "hi"}]
COMPLETION = {"model": "tiny", "prompt": "hi"}
CHAT = {"model": "tiny", "messages": MESSAGES}
TOOL = {"type": "function", "function": {"name": "f"}}
LONG = "x " * 5000


def error_of(answer: dict) -> dict:
    assert set(answer) == {"error"}
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    return answer["error"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        ("/v1/completions", COMPLETION | {"model": "nobody"}, 404, "model", "model_not_found"),
        ("/v1/completions", COMPLETION | {"model": "sha256:" + "0" * 64}, 404, "model", "model_not_found"),
        ("/v1/completions", COMPLETION | {"model": "sha256:xyz"}, 404, "model", "model_not_found"),
        ("/v1/completions", {"prompt": "hi"}, 400, "model", None),
        ("/v1/completions", COMPLETION | {"prompt": ""}, 400, "prompt", None),
        ("/v1/completions", COMPLETION | {"prompt": LONG}, 400, "prompt", "context_length_exceeded"),
        ("/v1/completions", COMPLETION | {"max_tokens": 9999}, 400, "max_tokens", "context_length_exceeded"),
        ("/v1/completions", COMPLETION | {"max_tokens": 0}, 400, "max_tokens", None),
        ("/v1/completions", COMPLETION | {"prompt": [99999]}, 400, "prompt", None),
        ("/v1/completions", COMPLETION | {"prompt": [-1]}, 400, "prompt[0]", None),
        ("/v1/completions", COMPLETION | {"prompt": [10**30]}, 400, "prompt[0]", None),
        ("/v1/completions", COMPLETION | {"logit_bias": {"99999": 1}}, 400, "logit_bias", None),
        ("/v1/completions", COMPLETION | {"stop_token_ids": [99999]}, 400, "stop_token_ids", None),
        ("/v1/completions", COMPLETION | {"prompt": ["a"] * 2000}, 400, "prompt", None),
        ("/v1/completions", COMPLETION | {"suffix": "x"}, 400, "suffix", "unsupported_parameter"),
        ("/v1/completions", COMPLETION | {"best_of": 2}, 400, "best_of", "unsupported_parameter"),
        ("/v1/chat/completions", CHAT | {"messages": []}, 400, "messages", None),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "tool", "content": "x"}]}, 400, "messages", None),
        ("/v1/chat/completions", CHAT | {"tools": [TOOL]}, 400, "tools", None),
        (
            "/v1/chat/completions",
            CHAT | {"messages": [{"role": "user", "content": LONG}]},
            400,
            "messages",
            "context_length_exceeded",
        ),
        (
            "/v1/chat/completions",
            CHAT | {"max_completion_tokens": 9999},
            400,
            "max_completion_tokens",
            "context_length_exceeded",
        ),
        ("/tokenize", {"model": "nobody", "prompt": "x"}, 404, "model", "model_not_found"),
        ("/detokenize", {"model": "nobody", "tokens": [1]}, 404, "model", "model_not_found"),
        ("/v1/completions", b"{", 400, None, None),
        ("/v1/completions", b"", 400, None, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_input_is_a_plain_error_also_for_a_stream(client, path, body, status, param, code, stream):
    if stream and isinstance(body, dict):
        body = body | {"stream": True}
    got, answer = await client.post(path, body)
    error = error_of(answer)
    assert (got, error["param"], error["code"]) == (status, param, code), error
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    state = await client.state()
    assert (state["running"], state["waiting"]) == (0, 0)


async def test_unknown_routes_and_methods(client):
    status, answer = await client.get("/nowhere")
    assert (status, error_of(answer)["code"]) == (404, "unknown_url")
    status, answer = await client.get("/v1/completions")
    assert (status, error_of(answer)["code"]) == (405, "method_not_allowed")


async def test_ping_and_version(client):
    assert (await client.get("/ping"))[0] == 200
    assert (await client.get("/version"))[1]["version"]


async def test_a_body_too_large(client):
    async with client.session.post(client.url + "/v1/completions", data=io.BytesIO(b" " * (17 << 20))) as response:
        assert response.status == 413
        assert error_of(await response.json())["code"] == "request_too_large"


async def test_a_body_that_is_not_what_its_headers_say(client):
    body = json.dumps(COMPLETION).encode()
    for encoding, data, expected in (
        ("gzip", gzip.compress(body), 200),
        ("deflate", zlib.compress(body), 200),
        ("gzip", b"not gzip", 400),
        ("gzip", gzip.compress(body)[:-9], 400),
        ("br", body, 400),
    ):
        async with client.session.post(
            client.url + "/v1/completions", data=data, headers={"Content-Encoding": encoding}
        ) as response:
            answer = await response.json()
        assert response.status == expected, answer
        assert expected == 200 or answer["error"]["type"] == "invalid_request_error"


async def test_a_body_is_too_large_by_what_it_decompresses_to(client):
    packer = zlib.compressobj(1, wbits=zlib.MAX_WBITS | 16)
    bomb = b"".join(packer.compress(bytes(1 << 20)) for _ in range(64)) + packer.flush()
    assert len(bomb) < 1 << 20
    async with client.session.post(
        client.url + "/v1/completions", data=bomb, headers={"Content-Encoding": "gzip"}
    ) as response:
        assert response.status == 413
        assert error_of(await response.json())["code"] == "request_too_large"


@pytest.mark.parametrize(
    "request_", [b"POST / HTTP/1.1\r\nAuthorization: Bearer my-secret\x01\r\n\r\n", b"my-secret prompt\r\n\r\n"]
)
async def test_what_is_no_http_is_not_quoted_in_the_log(server, caplog, request_):
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
    writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b"200 OK" in await reader.readuntil(b"}")
    writer.write(request_)
    assert b"400 Bad Request" in await reader.read()
    writer.close()
    assert "not valid HTTP" in caplog.text
    assert "secret" not in caplog.text


async def test_the_body_is_read_as_json_whatever_its_declared_type(client):
    status, _ = await client.post(
        "/v1/completions", json.dumps(COMPLETION).encode(), headers={"Content-Type": "text/plain"}
    )
    assert status == 200


async def test_one_refused_prompt_refuses_the_request_and_frees_the_others(client):
    status, answer = await client.post("/v1/completions", COMPLETION | {"prompt": [[5, 6], [99999]], "max_tokens": 500})
    assert (status, error_of(answer)["param"]) == (400, "prompt")
    state = await client.wait_for(lambda state: not state["running"] and not state["waiting"])
    assert state["kv_blocks_free"] == state["kv_blocks_total"]


async def test_ids_of_no_token_take_no_memory(client, server):
    """A client chooses its prompts' ids and pays nothing for a refused request."""
    known = server.server._generation.tokenizer._bytes
    await client.post("/v1/completions", COMPLETION)
    before = len(known)
    for first in range(10**6, 10**6 + 100, 10):
        status, _ = await client.post("/v1/completions", COMPLETION | {"prompt": list(range(first, first + 10))})
        assert status == 400
    assert len(known) == before
