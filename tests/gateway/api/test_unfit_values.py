"""Unfit values in every field, path and query of every route, on PostgreSQL, which refuses more of them than SQLite."""

import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from gateway.access.roles import ADMIN_ROLES
from gateway.api.route import Route
from gateway.route_table import ROUTES
from testing.gateway.running import MODEL_CONFIG, Answer, Browser, Client, Gateway, running_alone, settings
from testing.gateway.upstream import Upstream
from tests.gateway.conftest import new_database

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.usefixtures("takes_a_core")]

# Truthful 5xx: an engine that does not know a route, and parts that are away.
HONEST = (502, 503, 504)
NUL = "nul\0"
BASE_CONFIG = MODEL_CONFIG | {"max_position_embeddings": 256}
VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 2**31, 2**63, 10**30, -(10**30), 1.5, 1e308),
    *("", NUL, "\u202e", "x" * 5000, "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"),
    *("https://[", "~no-such-user/x", "/" + "x" * 1000),
    *([], [None], [[]], {}, {NUL: 1}, {"a": {"b": []}}),
)
IN_PATHS = ("%00", "%ED%A0%80", "%FF", "%E2%80%AE", "..", "%2F", "-1", "99999999999999999999", "x" * 300)
IN_QUERIES = ("%00", "%ED%A0%80", "99999999999999999999", "8999-12-31", "NaN", "bnVsbA", "x" * 300)
# Bodies whose other fields are right, so that a field's value is all that is wrong.
BODIES: dict[str, dict[str, Any]] = {
    "/admin/api/tenants": {"name": "made"},
    "/admin/api/tenants/bulk": {"filter": {"q": "none"}, "add_tags": ["a"], "expect": 0},
    "/admin/api/prices/{model}": {"input": 1, "output": 2},
    "/admin/api/webhooks/{name}": {"url": "https://hooks.example/"},
    "/admin/api/bases": {"name": "other", "config": BASE_CONFIG},
    "/admin/api/plans/{plan}/prices": {"prices": {}},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(
    tmp_path_factory: pytest.TempPathFactory,
    model_dir: Path,
    shared_upstream: Upstream,
    redis_url: str,
    postgres: Any,
    migrated_template: str,
) -> AsyncIterator[Gateway]:
    """Start one gateway on PostgreSQL for all tests, with a plan and two tenants."""
    url = postgres.get_uri(database=await new_database(postgres, migrated_template))
    folder = tmp_path_factory.mktemp("gateway")
    of = settings(folder, model_dir, [shared_upstream.url], redis_url, database_url=url)
    async with running_alone(of) as gateway:
        assert (await gateway.admin.call("PUT", "/admin/api/plans/gold", json={})).status == 200
        for name in ("acme", "globex"):
            assert (await gateway.admin.post("/admin/api/tenants", {"name": name})).status == 201
        yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def acme(gateway: Gateway) -> Client:
    return await key_of(gateway, "acme")


async def key_of(gateway: Gateway, tenant: str) -> Client:
    made = await gateway.admin.post(
        f"/admin/api/tenants/{tenant}/keys", {"scopes": ["adapters", "inference", "keys", "usage"]}
    )
    return gateway.client(made.json["key"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browsers(gateway: Gateway, acme: Client) -> AsyncIterator[dict[bool, Browser]]:
    """Return the browser of an operator, under True, and that of a tenant."""
    async with gateway.browser() as operator, gateway.browser(acme.key, "/console") as tenant:
        yield {True: operator, False: tenant}


def path_of(route: Route, **values: str) -> str:
    known = {"tenant": "acme", "plan": "gold", "version": "1", "alias": "prod", "id": "0" * 16, "name": "pirate"}
    return re.sub(r"{(\w+)}", lambda found: (known | values).get(found[1], "x"), route.canonical)


def fields_of(route: Route) -> list[str]:
    """Return a field of each type in a route's body."""
    if route.request is None or not issubclass(route.request, msgspec.Struct):
        return []
    return list({repr(field.type): field.encode_name for field in msgspec.structs.fields(route.request)}.values())


def check(answer: Answer, what: Any) -> None:
    assert answer.status < 500 or answer.status in HONEST, (what, answer.body)
    assert b"database_unavailable" not in answer.body, what
    assert b"Traceback" not in answer.body, what


# An operator's chats go to the handler of a tenant's own once the tenant is known.
SAME_HANDLER = {"/admin/api/tenants/{tenant}/chat/completions", "/admin/api/tenants/{tenant}/completions"}
BODIED = [
    route
    for route in ROUTES
    if fields_of(route) and route.scope not in ("page", None) and route.canonical not in SAME_HANDLER
]


@pytest.mark.parametrize("route", BODIED, ids=lambda route: f"{route.method} {route.canonical}")
async def test_no_value_of_a_field_is_an_internal_error(route: Route, gateway: Gateway, acme: Client):
    client = gateway.admin if route.scope == "admin" else acme
    # Another tenant than the other tests', because a right value can suspend it.
    path = path_of(route, tenant="globex")
    body = BODIES.get(route.canonical, {})
    for field in fields_of(route):
        for value in VALUES:
            content = json.dumps(body | {field: value})
            headers = {"Content-Type": "application/json"}
            answer = await client.call(route.method, path, data=content, headers=headers)
            check(answer, (route.method, route.path, content[:200]))
        raw = json.dumps(body | {field: "?"}).replace('"?"', '"\\ud800"')
        answer = await client.call(route.method, path, data=raw, headers=headers)
        assert answer.status in (400, 403, 404), (route.path, raw, answer.body)


@pytest.mark.parametrize("field", [*BASE_CONFIG, "rope_scaling", "rope_parameters", "head_dim", "architectures"])
async def test_no_value_of_a_bases_config_is_an_internal_error(field: str, gateway: Gateway):
    deep = ({"rope_type": "yarn", "factor": "x"}, {"factor": 1e308, "rope_type": "linear"}, {"type": 1, "factor": []})
    for value in (*VALUES, *deep):
        body = {"name": "other", "config": BASE_CONFIG | {field: value}}
        answer = await gateway.admin.post("/admin/api/bases", body)
        check(answer, body)


def attempts(route: Route) -> Iterator[str]:
    """Return paths and queries with an unfit text in one place each."""
    for name in re.findall(r"{(\w+)}", route.canonical):
        for text in IN_PATHS:
            yield path_of(route, **{name: text})
    for name in route.query or ():
        for text in IN_QUERIES:
            yield f"{path_of(route)}?{name}={text}"


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: f"{route.method} {route.canonical}")
async def test_no_text_of_an_address_is_an_internal_error(
    route: Route, gateway: Gateway, acme: Client, browsers: dict[bool, Browser]
):
    if route.canonical.endswith(("/events", "/logout")):
        pytest.skip("a stream without an end, and the end of the session")
    client = gateway.admin if route.scope == "admin" else acme
    if route.scope != "page":
        for path in attempts(route):
            check(await client.call(route.method, path, allow_redirects=False), (route.method, path))
        return
    browser = browsers[route.least_role in ADMIN_ROLES]
    first, *others = forms(route, await browser.csrf())
    for path in attempts(route):
        check(await browser.call(route.method, path, **first), (route.method, path, first))
    for sent in (first, *others):
        check(await browser.call(route.method, path_of(route), **sent), (route.method, route.path, sent))


def forms(route: Route, csrf: str) -> list[dict[str, Any]]:
    """Return bodies of a page's POST: a form, none, and one of another type."""
    if route.method == "GET":
        return [{}]
    header = {"x-csrf": csrf}
    return [{"data": {"csrf": csrf}}, {"headers": header}, {"headers": header, "json": {"a": 1}}]


FORMS = (
    *("/admin/tenants/-/new", "/admin/tenants/globex/edit", "/admin/tenants/globex/budget", "/admin/plans/-/new"),
    *("/admin/plans/gold", "/admin/plans/gold/prices", "/admin/prices", "/admin/alerts/-/new", "/admin/keys/new"),
    *("/admin/engines/bases/new", "/admin/tenants/globex/keys/new", "/console/keys/new"),
)
TYPED = ("nul%00", "%ED%A0%80", "9" * 30, "-1", "1e400", "x" * 3000, "https://[", "~no-such-user/x")
# Values of the fields without which a form's other fields are not used.
NEEDED = {"name": "other", "url": "https://hooks.example/"}


@pytest.mark.parametrize("path", FORMS)
async def test_no_text_in_a_form_is_an_internal_error(path: str, browsers: dict[bool, Browser]):
    browser = browsers[path.startswith("/admin")]
    page = (await browser.get(path)).body.decode()
    names = set(re.findall(r'<(?:input|textarea|select)[^>]*\sname="(\w+)"', page)) - {"csrf", "shown", "once"}
    assert len(names) > 1
    head, headers = f"csrf={await browser.csrf()}", {"Content-Type": "application/x-www-form-urlencoded"}

    async def send(fields: set[str], text: str) -> set[str]:
        """Send the form with the text in these fields. Return the fields at which the answer shows an error."""
        values = {name: NEEDED[name] for name in names & NEEDED.keys()} | dict.fromkeys(fields, text)
        content = "&".join([head, *(f"{name}={value}" for name, value in values.items())])
        answer = await browser.call("POST", path, data=content, headers=headers)
        check(answer, (path, content))
        return set(re.findall(r'<small class="error" id="e-(\w+)"', answer.body.decode()))

    for text in TYPED:
        # A form reports the errors of several fields at once. Only a text that its field takes goes further alone.
        for name in names - await send(names, text):
            await send({name}, text)
