"""`/openapi.json` lists every route, and no other."""

import re

import pytest
from aiohttp import web

from gateway.api.description import describe_routes
from gateway.api.parameters import OF_ROUTE, PARAMETERS, find_parameter
from gateway.api.route import Route
from gateway.app import make_app
from gateway.route_table import ROUTES
from testing.gateway.running import Gateway, settings
from testing.gateway.upstream import Upstream


def str_of(route: Route) -> str:
    return f"{route.method} {route.canonical}"


async def test_every_route_is_described(tmp_path, model_dir, upstream: Upstream, redis_url: str):
    app = await make_app(settings(tmp_path, model_dir, [upstream.url], redis_url))
    # Only a started application closes its resources.
    runner = web.AppRunner(app)
    await runner.setup()
    await runner.cleanup()
    routes = {
        (route.method, route.resource.canonical)
        for route in app.router.routes()
        if isinstance(route.resource, web.Resource) and route.method != "HEAD"
    }
    assert {(route.method, route.canonical) for route in ROUTES} == routes


async def test_the_description_is_published(gateway: Gateway):
    got = await gateway.nobody.get("/openapi.json")
    published = got.json
    assert (got.status, published["openapi"]) == (200, "3.1.0")
    references = set(re.findall(r'"#/components/schemas/([^"]+)"', got.body.decode()))
    assert references <= set(published["components"]["schemas"])
    # msgspec puts the module before the names of two structs that have the same name.
    assert [name for name in published["components"]["schemas"] if not re.fullmatch("[A-Z][A-Za-z]*", name)] == []
    words = [schema.get("description", "") for schema in published["components"]["schemas"].values()]
    assert [text for text in words if re.search(r"\bNone\b|[A-Z]+_KINDS", text)] == []
    made = published["paths"]["/admin/api/tenants"]["post"]
    assert made["security"] == [{"key": []}]
    assert made["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/NewTenant")
    [parameter] = published["paths"]["/v1/models/{name}"]["get"]["parameters"]
    assert (parameter["name"], parameter["required"]) == ("name", True)


@pytest.mark.parametrize("route", [route for route in ROUTES if route.scope != "page" and route.query], ids=str_of)
def test_every_query_parameter_has_a_type_and_a_description(route: Route):
    if "/login" in route.path:
        return
    for name in route.query or ():
        found = find_parameter(route.canonical, name)
        assert found is not None, name
        assert found.text.endswith(".")
        assert found.schema


def test_no_description_of_a_parameter_is_left_over():
    used = {(route.canonical, name) for route in ROUTES for name in route.query or ()}
    assert OF_ROUTE.keys() <= used
    assert PARAMETERS.keys() <= {name for _, name in used}


async def test_values_of_the_described_types_are_accepted_and_others_refused(gateway: Gateway):
    """The description has no choice that its route refuses, and the route no other one."""
    published = (await gateway.nobody.get("/openapi.json")).json["paths"]
    checked = 0
    for path in ("/admin/api/tenants", "/admin/api/adapters", "/admin/api/keys", "/admin/api/activity",
                 "/admin/api/refusals"):  # fmt: skip
        for parameter in published[path]["get"]["parameters"]:
            assert parameter["description"]
            name, schema = parameter["name"], parameter["schema"]
            more = "&all=true" if path == "/admin/api/keys" and name != "all" else ""
            for value in schema.get("enum", ()):
                assert (await gateway.admin.get(f"{path}?{name}={value}{more}")).status == 200, (path, name, value)
            bounds = [schema[key] + step for key, step in (("minimum", -1), ("maximum", 1)) if key in schema]
            for value in ["none-such"] if "enum" in schema else bounds:
                assert (await gateway.admin.get(f"{path}?{name}={value}{more}")).status == 400, (path, name, value)
                checked += 1
    assert checked > 12


async def test_no_request_builds_the_description(gateway: Gateway, monkeypatch: pytest.MonkeyPatch):
    """It costs 0.1 s of CPU time, and the route needs no key."""

    def build(*_: object) -> None:
        raise AssertionError("built while serving")

    describe_routes.cache_clear()
    monkeypatch.setattr("gateway.api.description.describe", build)
    described = await gateway.nobody.get("/openapi.json")
    assert described.status == 200
    assert "/v1/chat/completions" in described.json["paths"]
