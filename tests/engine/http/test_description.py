"""The published description: every route of the app, every field of every body, and ranges that the server enforces."""

import json
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.http.app import Server
from engine.http.description import ROUTES, engine_description
from wire.decoding import decode
from wire.errors import BadRequest
from wire.requests import ChatCompletionRequest, CompletionRequest

BODIES = {
    "CompletionRequest": (CompletionRequest, {"model": "m", "prompt": "x"}),
    "ChatCompletionRequest": (ChatCompletionRequest, {"model": "m", "messages": [{"role": "user", "content": "x"}]}),
}
LIMITS = {"minimum": -1, "exclusiveMinimum": 0, "maximum": 1}


def limits() -> list[tuple[str, str, dict[str, Any], str]]:
    schemas = engine_description()["components"]["schemas"]
    return [
        (name, field, part, limit)
        for name in BODIES
        for field, schema in schemas[name]["properties"].items()
        for part in schema.get("anyOf", [schema])
        for limit in LIMITS
        if limit in part
    ]


async def test_it_is_published(client):
    status, published = await client.get("/openapi.json")
    assert status == 200
    assert published == engine_description()
    assert published["openapi"] == "3.1.0"


def test_it_has_every_route_and_no_other():
    app = Server(EngineConfig(model="none")).make_app()
    served = {(r.method, r.resource.canonical) for r in app.router.routes() if r.resource and r.method != "HEAD"}
    assert served == {(route.method, route.path) for route in ROUTES}


def test_every_reference_leads_somewhere():
    description = engine_description()
    text = json.dumps(description)
    names = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names <= set(description["components"]["schemas"])
    assert {"Tool", "Message", "ErrorResponse"} <= names


@pytest.mark.parametrize(("name", "field", "part", "limit"), limits(), ids=lambda value: str(value)[:40])
def test_what_is_beyond_a_limit_is_refused_and_the_limit_itself_is_not(name, field, part, limit):
    kind, body = BODIES[name]
    bound = part[limit]
    if limit == "exclusiveMinimum":
        beyond, allowed = bound, bound + 0.01
    else:
        step = 1 if part["type"] == "integer" else 0.001
        beyond, allowed = bound + LIMITS[limit] * step, bound
    with pytest.raises(BadRequest) as refused:
        decode(kind, json.dumps(body | {field: beyond}).encode())
    assert refused.value.param == field
    assert f"{field}: expected " in refused.value.message
    echo = {"echo": True} if kind is CompletionRequest else {}
    needs = {
        "max_tokens": echo,
        "top_logprobs": {"logprobs": True},
        "best_of": {"n": allowed},
        "min_tokens": {"max_tokens": 2**31 - 1},
    }
    decode(kind, json.dumps(body | needs.get(field, {}) | {field: allowed}).encode())
