"""Bad requests at the gateway: each gets a 4xx in OpenAI's shape that names the field, and the service continues."""

import json
from typing import Any

import pytest

from testing.stack import Tenant, http

HI = [{"role": "user", "content": "Hi"}]
CHAT: dict[str, Any] = {"messages": HI, "max_tokens": 4}
COMPLETION: dict[str, Any] = {"prompt": "Hi", "max_tokens": 4}

CASES = {
    # id: (route, body, status, param)
    "unknown model": ("chat/completions", CHAT | {"model": "no-such-model"}, 404, "model"),
    "no model": ("chat/completions", CHAT | {"model": None}, 400, "model"),
    "model of a wrong type": ("chat/completions", CHAT | {"model": 7}, 400, "model"),
    "no messages": ("chat/completions", {"max_tokens": 4}, 400, "messages"),
    "empty messages": ("chat/completions", CHAT | {"messages": []}, 400, "messages"),
    "messages of a wrong type": ("chat/completions", CHAT | {"messages": "Hi"}, 400, "messages"),
    "a message without a role": ("chat/completions", CHAT | {"messages": [{"content": "Hi"}]}, 400, "messages"),
    "an unknown role": ("chat/completions", CHAT | {"messages": [{"role": "cat", "content": "Hi"}]}, 400, "messages"),
    "empty prompt": ("completions", COMPLETION | {"prompt": ""}, 400, "prompt"),
    "empty prompt list": ("completions", COMPLETION | {"prompt": []}, 400, "prompt"),
    "prompt of a wrong type": ("completions", COMPLETION | {"prompt": {"text": "Hi"}}, 400, "prompt"),
    "token id out of range": ("completions", COMPLETION | {"prompt": [1, 10_000_000]}, 400, "prompt"),
    "prompt over the context": ("completions", COMPLETION | {"prompt": "word " * 20_000}, 400, "prompt"),
    "chat over the context": (
        "chat/completions",
        CHAT | {"messages": [{"role": "user", "content": "word " * 20_000}]},
        400,
        "messages",
    ),
    "max_tokens 0": ("chat/completions", CHAT | {"max_tokens": 0}, 400, "max_tokens"),
    "max_tokens negative": ("completions", COMPLETION | {"max_tokens": -1}, 400, "max_tokens"),
    "max_tokens of a wrong type": ("completions", COMPLETION | {"max_tokens": "many"}, 400, "max_tokens"),
    "max_tokens over the context": ("completions", COMPLETION | {"max_tokens": 1_000_000}, 400, "max_tokens"),
    "temperature out of range": ("completions", COMPLETION | {"temperature": -1}, 400, "temperature"),
    "top_p out of range": ("completions", COMPLETION | {"top_p": 1.5}, 400, "top_p"),
    "stop of a wrong type": ("completions", COMPLETION | {"stop": 5}, 400, "stop"),
    "stream of a wrong type": ("completions", COMPLETION | {"stream": "yes"}, 400, "stream"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_bad_request_names_its_field(case: str, acme: Tenant, demo: dict):
    route, body, status, param = CASES[case]
    whole = {"model": demo["base_model"]} | body
    got = http(
        "POST",
        f"{acme.url}/v1/{route}",
        acme.key,
        json.dumps({k: v for k, v in whole.items() if v is not None}).encode(),
    )
    assert got.status == status, got.body
    error = got.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert (error["param"] or "").split(".")[0].split("[")[0] == param, error
    assert error["message"]


@pytest.mark.parametrize(
    "body", [b"{", b"", b"[]", b'"text"', b"\xff\xfe", b'{"model": "x", "messages": ' + b"[" * 5000]
)
def test_a_body_that_is_no_json_object(body: bytes, acme: Tenant):
    got = http("POST", f"{acme.url}/v1/chat/completions", acme.key, body)
    assert got.status == 400, got.body
    assert got.json["error"]["type"] == "invalid_request_error"


def test_an_unknown_url_and_method(acme: Tenant):
    missing = http("GET", f"{acme.url}/v1/no-such-route", acme.key)
    assert (missing.status, missing.json["error"]["type"]) == (404, "invalid_request_error")
    wrong = http("GET", f"{acme.url}/v1/chat/completions", acme.key)
    assert (wrong.status, wrong.json["error"]["type"]) == (405, "invalid_request_error")


def test_a_streamed_request_that_is_refused_is_no_stream(acme: Tenant, demo: dict):
    body = CHAT | {"model": demo["base_model"], "max_tokens": 0, "stream": True}
    got = http("POST", f"{acme.url}/v1/chat/completions", acme.key, json.dumps(body).encode())
    assert got.status == 400
    assert got.headers["content-type"].startswith("application/json")
    assert got.json["error"]["param"] == "max_tokens"


def test_after_all_that_it_still_serves(acme: Tenant, demo: dict):
    assert acme.ask(demo["base_model"], "Hi", max_tokens=4)
