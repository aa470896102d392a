"""Answers of the admin API: each route's has a type, and real ones have exactly its fields, values and order."""

import hashlib
import io
import json
import re
from datetime import UTC, datetime, timedelta
from itertools import chain
from pathlib import Path
from typing import Any, get_args, get_origin

import jsonschema
import msgspec
import pytest

from gateway.api.route import Route
from gateway.api.routes import API as TABLE
from gateway.route_table import ROUTES
from testing.gateway.running import ADMIN_KEY, HI, MODEL_CONFIG, Answer, Client, Gateway, until
from testing.gateway.upstream import Upstream
from tests.gateway.api.adapters.test_adapters import files, push, tarred
from tests.gateway.api.test_description import str_of

API = "/admin/api"
TENANT = f"{API}/tenants/acme"
PIRATE = f"{TENANT}/adapters/pirate"
DESCRIBED = [route for route in ROUTES if route.path.startswith(API)]
# Routes whose answers have no struct, with the reason.
UNTYPED = {
    "/openapi.json": "the OpenAPI specification describes it",
    "/metrics": "Prometheus' text format",
    "/internal/engines": "204, without a body",
}


class Operator(Client):
    """An operator's client that keeps its answers, all of which must be successes."""

    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway.session, gateway.url, ADMIN_KEY)
        self.answers: list[tuple[Route, Answer]] = []

    async def call(self, method: str, path: str, **options: Any) -> Answer:
        answer = await super().call(method, path, **options)
        assert answer.status < 300, (method, path, answer.body)
        self.answers.append((route_of(method, path.partition("?")[0]), answer))
        return answer

    async def change(self, method: str, path: str, body: Any = None) -> Answer:
        return await self.call(method, path, json=body)


def route_of(method: str, path: str) -> Route:
    """Return the route of a path, the first in the order of the table."""
    for route in ROUTES:
        pattern = re.sub(r"{\w+(?::([^}]+))?}", lambda found: f"({found[1] or '[^/]+'})", route.path)
        if route.method == method and re.fullmatch(pattern, path):
            return route
    raise AssertionError(f"there is no route {method} {path}")


async def of_tenants(admin: Operator) -> None:
    terms = {"requests_per_minute": 500, "budget_per_month": 10**9, "soft_budget_per_day": 10**6}
    prices = {"prices": {"*": {"input": 10, "output": 20}}}
    await admin.change("PUT", f"{API}/plans/gold", terms | prices)
    await admin.change("PUT", f"{API}/plans/gold/prices", prices)
    await admin.get(f"{API}/plans")
    await admin.get(f"{API}/plans/gold")
    limits = {"model_limits": {"base": {"requests_per_minute": 1, "budget_per_day": 10**7}}, "ttft_target": 0.5}
    await admin.post(f"{API}/tenants", {"name": "beta", "plan": "gold", "tags": ["eu"], "note": "new"} | limits)
    await admin.change("PATCH", f"{API}/tenants/beta", {"weight": 2, "budget_warn_at": [0.5]})
    await admin.get(f"{API}/tenants/beta")
    await admin.get(f"{API}/tenants?limit=1")
    await admin.get(f"{TENANT}/limits")
    change = {"filter": {"q": "beta"}, "add_tags": ["us"], "plan": None, "inherit": ["weight"]}
    planned = await admin.post(f"{API}/tenants/bulk?dry_run=true", change)
    await admin.post(f"{API}/tenants/bulk", change | {"expect": planned.json["count"]})
    await admin.change("PUT", f"{API}/prices/base", {"input": 100, "output": 200})
    await admin.get(f"{API}/prices")


async def of_keys(admin: Operator, gateway: Gateway) -> None:
    made = await admin.post(f"{TENANT}/keys", {"label": "ci", "requests_per_minute": 5})
    await admin.get(f"{TENANT}/keys")
    operators = await admin.post(f"{API}/keys", {"label": "viewer", "role": "viewer"})
    await admin.get(f"{API}/keys")
    await admin.get(f"{API}/keys?all=true")
    rotated = await admin.post(f"{API}/keys/{made.json['id']}/rotate", {})
    await admin.change("PATCH", f"{API}/keys/{rotated.json['id']}", {"label": "cd"})
    async with gateway.browser():
        listed = await admin.get(f"{API}/sessions")
        await admin.call("DELETE", f"{API}/sessions/{listed.json['data'][0]['id']}")
    await admin.call("DELETE", f"{API}/keys/{operators.json['id']}")


async def of_adapters(admin: Operator, upstream: Upstream) -> None:
    for seed in (1, 2):
        await push(admin, "pirate", files(seed), f"{TENANT}/adapters")
    await admin.get(f"{TENANT}/adapters")
    await admin.get(f"{PIRATE}/versions/1")
    await admin.change("PATCH", f"{PIRATE}/versions/1", {"pinned": True, "expires_at": "2099-01-01T00:00:00Z"})
    made = await admin.change("PUT", f"{PIRATE}/aliases/prod", {"targets": [{"version": 1}]})
    both = {"targets": [{"version": 1, "weight": 9}, {"version": 2, "expires_at": "2099-01-01T00:00:00Z"}]}
    tag = {"If-Match": made.headers["ETag"]}
    await admin.call("PUT", f"{PIRATE}/aliases/prod", json=both, headers=tag)
    await admin.get(f"{PIRATE}/aliases")
    tag = {"If-Match": (await admin.get(f"{PIRATE}/aliases/prod")).headers["ETag"]}
    tag = {"If-Match": (await admin.call("POST", f"{PIRATE}/aliases/prod/rollback", headers=tag)).headers["ETag"]}
    await admin.call("DELETE", f"{PIRATE}/aliases/prod", headers=tag)
    await admin.get(f"{PIRATE}/versions/2/probe")
    await admin.post(f"{PIRATE}/versions/2/probe?engine={upstream.url}")
    prompts = {"prompts": [{"messages": HI}, {"prompt": "Hi", "max_tokens": 4}]}
    await admin.change("PUT", f"{PIRATE}/versions/2/golden", prompts)
    upstream.alphabet = "ab"
    await admin.post(f"{PIRATE}/versions/2/golden/check?engine={upstream.url}")
    await admin.get(f"{PIRATE}/versions/2/golden")
    await admin.post(f"{PIRATE}/versions/2/prefetch?engine={upstream.url}")


async def of_use(admin: Operator, gateway: Gateway) -> None:
    await admin.post(f"{TENANT}/chat/completions", {"model": "pirate", "messages": HI})

    async def recorded() -> bool:
        return bool((await gateway.admin.get(f"{PIRATE}/use")).json["versions"])

    await until(recorded)
    await admin.get(f"{PIRATE}/use")


async def of_uploads(admin: Operator, imports: Path) -> None:
    for name, content in files(3).items():
        (imports / "house").mkdir(parents=True, exist_ok=True)
        (imports / "house" / name).write_bytes(content)
    await admin.post(f"{TENANT}/adapter-imports?name=house&source=file://{imports}/house")
    await admin.get(f"{TENANT}/adapter-uploads")
    archive = tarred(files(4))
    sha = hashlib.sha256(archive).hexdigest()
    begun = f"{TENANT}/adapter-uploads?name=parts&size={len(archive)}&sha256={sha}"
    upload = f"{TENANT}/adapter-uploads/{(await admin.post(begun)).json['id']}"
    await admin.get(f"{TENANT}/adapters/parts/versions")
    await admin.get(upload)
    await admin.call("PUT", f"{upload}?offset=0&sha256={sha}", data=io.BytesIO(archive))
    await admin.post(f"{upload}/complete")
    await admin.get(f"{TENANT}/adapters/parts/versions")
    again = (await admin.post(begun.replace("parts", "other"))).json["id"]
    await admin.call("DELETE", f"{TENANT}/adapter-uploads/{again}")


async def of_mixtures(admin: Operator) -> None:
    made = await admin.change("PUT", f"{TENANT}/mixtures/both", {"model": "pirate*0.7+house*0.3"})
    await admin.get(f"{TENANT}/mixtures")
    await admin.get(f"{TENANT}/mixtures/both")
    await admin.get(f"{TENANT}/models")
    await admin.call("DELETE", f"{TENANT}/mixtures/both", headers={"If-Match": made.headers["ETag"]})


async def of_requests(admin: Operator, gateway: Gateway) -> None:
    await push(admin, "pirate", files(), f"{TENANT}/adapters")
    asked = await admin.post(f"{TENANT}/chat/completions", {"model": "pirate", "messages": HI})
    await admin.post(f"{TENANT}/completions", {"model": "base", "prompt": "Hi"})
    beta = gateway.client((await admin.post(f"{API}/tenants/beta/keys")).json["key"])
    assert [(await beta.chat()).status for _ in range(2)] == [200, 429]

    async def recorded() -> bool:
        return len((await gateway.admin.get(f"{API}/requests")).json["data"]) == 4

    await until(recorded)
    await admin.get(f"{API}/requests")
    await admin.get(f"{API}/requests/{asked.headers['x-request-id']}")
    await admin.get(f"{API}/usage?group_by=tenant,model,day")
    await admin.get(f"{API}/refusals")
    for group in ("", "?group_by=tenant", "?group_by=model&limit=1"):
        await admin.get(f"{API}/activity{group}")
    await admin.post(f"{API}/usage/prune?dry_run=true", {"before": "2026-01-01"})
    await admin.get(f"{API}/adapters")
    await admin.get(f"{TENANT}/models")
    await admin.get(f"{API}/audit?limit=5")
    await admin.get(f"{API}/search?q=acme")


async def of_exports(admin: Operator) -> None:
    for form in ("json", "csv", "parquet"):
        since = datetime.now(UTC).date() - timedelta(days=1)
        await admin.get(f"{API}/usage/export?format={form}&group_by=tenant,model,key,day,end_user&since={since}")
        rows = await admin.get(f"{API}/usage/rows?format={form}")
        assert form != "json" or len(rows.json) == 3
    await admin.get(f"{API}/usage/export?format=json")


async def of_the_fleet(admin: Operator, engine: str) -> None:
    for path in ("version", "queue", "fairness", "attention", "settings", "residency", "engines", "engines/history"):
        await admin.get(f"{API}/{path}")
    await admin.get(f"{API}/quarantine")
    await admin.call("DELETE", f"{TENANT}/quarantine")
    await admin.get(f"{API}/engines/history?url={engine}")
    await admin.post(f"{API}/engines/drain", {"url": engine})
    await admin.get(f"{API}/attention")
    await admin.post(f"{API}/engines/resume", {"url": engine})
    await admin.get(f"{API}/bases")
    config = {"name": "second", "digest": "c" * 64, "context_length": 64, "config": MODEL_CONFIG}
    await admin.post(f"{API}/bases", config)
    await admin.change("PATCH", f"{API}/bases/second", {"state": "draining"})
    await admin.get(f"{API}/bases")


async def of_events(admin: Operator, url: str) -> None:
    await admin.change("PUT", f"{API}/webhooks/pager", {"url": url, "types": ["tenant.suspended"]})
    await admin.change("PATCH", f"{API}/tenants/beta", {"suspended": True})
    await admin.change("PUT", f"{API}/webhooks/pager", {"url": url})
    await admin.get(f"{API}/webhooks")
    await admin.get(f"{API}/webhooks/pager")
    await admin.post(f"{API}/webhooks/pager/test")
    await admin.get(f"{API}/events")
    await admin.call("DELETE", f"{API}/webhooks/pager")


async def of_removals(admin: Operator) -> None:
    await admin.post(f"{API}/adapters/collect?dry_run=true")
    await admin.post(f"{API}/adapters/collect")
    for path in ("tenants/beta", "plans/gold", "prices/base"):
        await admin.call("DELETE", f"{API}/{path}")


async def of_removed_adapters(admin: Operator) -> None:
    for path in ("/versions/2/golden", "/versions/1?force=true", "?force=true"):
        await admin.call("DELETE", f"{PIRATE}{path}")


def check(route: Route, answer: Answer, published: dict[str, Any]) -> None:
    """Check an answer against the published schema, and that its struct has exactly its fields, in their order."""
    name = f"{route.method} {route.canonical}"
    described = published["paths"][route.canonical][route.method.lower()]["responses"][str(answer.status)]["content"]
    schema = described["application/json"]["schema"] | {"components": published["components"]}
    errors = [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(answer.json)]
    assert not errors, (name, errors)
    # The engine makes an answer that can be streamed, and may add fields.
    if not route.streams:
        kinds = route.response if isinstance(route.response, tuple) else (route.response,)
        assert ordered(answer.body) in [ordered(encoded_again(answer.body, kind)) for kind in kinds], name


def ordered(body: bytes | None) -> Any:
    """Return a JSON document with its objects as pairs in their order."""
    return None if body is None else json.loads(body, object_pairs_hook=lambda pairs: ("object", pairs))


def encoded_again(body: bytes, kind: Any) -> bytes | None:
    """Return an answer that was decoded as `kind` and encoded again; None if it is not of the kind."""
    try:
        return msgspec.json.encode(msgspec.json.decode(body, type=kind))
    except msgspec.ValidationError:
        return None


def is_of_adapters(route: Route) -> bool:
    return "/{tenant}/adapter" in route.canonical or "/{tenant}/mixture" in route.canonical


async def check_all(admin: Operator, wanted: list[Route]) -> None:
    """Check all answers, among them some of each wanted route."""
    published = (await admin.get("/openapi.json")).json
    assert {str(route) for route in wanted} <= {str(route) for route, _ in admin.answers}
    for route, answer in admin.answers:
        if route.path not in UNTYPED and answer.headers["Content-Type"] == "application/json":
            check(route, answer, published)


@pytest.mark.parametrize("route", [*dict.fromkeys([*DESCRIBED, *chain(*TABLE.values())])], ids=str_of)
def test_every_answer_has_a_type(route: Route):
    """Neither a plain object nor one without fields."""
    if route.path in UNTYPED:
        return
    kinds = route.response if isinstance(route.response, tuple) else (route.response,)
    for kind in kinds:
        row = get_args(kind)[0] if get_origin(kind) is list else kind
        assert msgspec.structs.fields(row)


def test_no_exception_is_left_over():
    assert UNTYPED.keys() <= {route.path for route in ROUTES}


async def test_answers_have_the_described_types(serve: Any, upstream: Upstream):
    async with serve(webhook_http_hosts=("127.0.0.1",)) as gateway:
        admin = Operator(gateway)
        await gateway.tenant("acme")
        await of_tenants(admin)
        await of_keys(admin, gateway)
        await of_requests(admin, gateway)
        await of_exports(admin)
        await of_the_fleet(admin, upstream.url)
        await of_events(admin, f"{upstream.url}/hook")
        await of_removals(admin)
        await check_all(admin, [route for route in DESCRIBED if not is_of_adapters(route)])


async def test_answers_about_adapters_have_the_described_types(serve: Any, upstream: Upstream, tmp_path: Path):
    upstream.probe_status, upstream.host = 200, []
    upstream.version, upstream.base_digest = "1.0", "b" * 64
    async with serve(import_sources=(f"file://{tmp_path}/imports/",)) as gateway:
        admin = Operator(gateway)
        await gateway.tenant("acme")
        await of_adapters(admin, upstream)
        await of_use(admin, gateway)
        await of_uploads(admin, tmp_path / "imports")
        await of_mixtures(admin)
        await of_removed_adapters(admin)
        await check_all(admin, [route for route in DESCRIBED if is_of_adapters(route)])
