"""Any request to any route by any caller: no 500, no stack trace, no data of another tenant.

`LORAPLEX_FUZZ_REQUESTS=50000` sends that many instead of the few of CI.
"""

import asyncio
import json
import os
import string
from collections import Counter
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, seed, strategies
from hypothesis import settings as hypothesis_settings

from gateway.route_table import ROUTES
from testing.gateway.running import BASE_MODEL, HI, Answer, Client, Gateway

REQUESTS = int(os.environ.get("LORAPLEX_FUZZ_REQUESTS", "200"))
CHUNK = 1000
# A tenant whose data only the operator may see.
MARK = "zebra"
# Truthful 5xx: an invalid answer of an engine, or a part that is away or busy.
HONEST = (502, 503, 504)
# Errors of these are pages.
PAGES = ("/admin", "/console")

texts = strategies.text(max_size=20)
scalars = strategies.one_of(
    strategies.none(),
    strategies.booleans(),
    strategies.integers(),
    strategies.floats(allow_nan=False, allow_infinity=False),
    texts,
)
values = strategies.recursive(
    scalars, lambda inner: strategies.lists(inner, max_size=3) | strategies.dictionaries(texts, inner, max_size=3)
)
VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": BASE_MODEL, "messages": HI, "max_tokens": 2, "stream": True},
    "/v1/completions": {"model": BASE_MODEL, "prompt": "Hi", "max_tokens": 2, "n": 1, "stream_options": None},
    "/admin/api/tenants": {"name": "made", "requests_per_minute": 5, "weight": 1.0, "model_limits": {}},
    "/admin/api/tenants/{tenant}": {"priority": 3, "ttft_target": 0.5, "suspended": False, "on_token_limit": "shorten"},
    "/admin/api/tenants/{tenant}/keys": {"label": "k", "scopes": ["usage"], "allowed_models": ["a"]},
    "/admin/api/prices/{model}": {"input": 1, "output": 2},
    "/v1/adapters/{name}/versions/{version}/golden": {"prompts": [{"prompt": "Hi", "max_tokens": 2}]},
    "/v1/mixtures/{name}": {"model": "a*0.5+b*0.5"},
}
FIELDS = strategies.sampled_from([*sorted({field for body in VALID.values() for field in body}), "unknown"])
NAMES = strategies.one_of(
    strategies.sampled_from(["victim", BASE_MODEL, "..", "%00", "a/b", "*", "x" * 300]), strategies.text(max_size=12)
)
# Characters that HTTP allows in a header.
LATIN = strategies.text(string.printable.strip() + "éÿ", max_size=30)


@strategies.composite
def requests(draw: Any) -> dict[str, Any]:
    route = draw(strategies.sampled_from(ROUTES))
    method = draw(strategies.sampled_from([route.method] * 8 + ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]))
    parts = [
        quote(draw(NAMES), safe="") or "x" if part.startswith("{") else part for part in route.canonical.split("/")
    ]
    further = strategies.just({}) | strategies.dictionaries(FIELDS, values, max_size=3)
    body = VALID.get(route.canonical, {}) | draw(further)
    raw = draw(
        strategies.one_of(
            strategies.just(json.dumps(body).encode()),
            strategies.just(json.dumps(body).encode()),
            values.map(lambda value: json.dumps(value).encode()),
            strategies.binary(max_size=60),
        )
    )
    headers = {
        "Content-Type": draw(strategies.sampled_from(["application/json", "multipart/form-data; boundary=x", ""]))
    }
    for name in draw(strategies.sets(strategies.sampled_from(["Idempotency-Key", "traceparent", "x-request-id"]))):
        headers[name] = draw(LATIN)
    query = draw(
        strategies.dictionaries(
            strategies.sampled_from(["since", "until", "tenant", "by", "unknown"]), texts, max_size=2
        )
    )
    who = draw(strategies.sampled_from(["acme", "acme", "acme", "admin", "nobody", "garbage"]))
    return {
        "method": method,
        "path": "/".join(parts),
        "data": raw,
        "headers": headers,
        "params": query,
        "who": who,
        "key": draw(LATIN),
    }


async def send(clients: dict[str, Client], asked: dict[str, Any]) -> Answer:
    client = clients.get(asked["who"]) or Client(clients["nobody"].session, clients["nobody"].url, asked["key"])
    options = {name: asked[name] for name in ("data", "headers", "params")}
    return await client.call(asked["method"], asked["path"], allow_redirects=False, **options)


def check(asked: dict[str, Any], got: Answer) -> None:
    assert got.status < 500 or got.status in HONEST, (asked, got.status, got.body)
    assert b"Traceback" not in got.body
    assert b'File "' not in got.body
    if asked["who"] != "admin":
        assert MARK.encode() not in got.body, asked
    if got.status >= 400:
        is_page = asked["path"].startswith(PAGES) and got.headers["Content-Type"].startswith("text/html")
        assert is_page or got.error["message"], asked


@pytest.mark.timeout(60 + REQUESTS // 20)
async def test_whatever_is_sent(gateway: Gateway):
    unlimited = {"requests_per_minute": 10_000_000, "tokens_per_minute": 1_000_000_000}
    acme = await gateway.tenant("acme", **unlimited)
    await gateway.tenant("victim")
    other = await gateway.tenant(f"{MARK}-tenant", **unlimited)
    assert (await other.complete()).status == 200
    clients = {"acme": acme, "admin": gateway.admin, "nobody": gateway.nobody}
    loop = asyncio.get_running_loop()
    statuses: Counter[int] = Counter()

    def fuzz(chunk: int) -> None:
        @seed(chunk)
        @hypothesis_settings(
            max_examples=min(CHUNK, REQUESTS), deadline=None, database=None, suppress_health_check=list(HealthCheck)
        )
        @given(requests())
        def one(asked: dict[str, Any]) -> None:
            got = asyncio.run_coroutine_threadsafe(send(clients, asked), loop).result()
            statuses[got.status] += 1
            check(asked, got)

        one()

    for chunk in range(max(1, REQUESTS // CHUNK)):
        await asyncio.to_thread(fuzz, chunk)
    # Some requests passed all checks.
    assert statuses[200] + statuses[201] > REQUESTS // 100
    print(f"{statuses.total()} requests: {dict(sorted(statuses.items()))}")
