"""`/openapi.json` lists every route, and no other."""

import re

from aiohttp import web

from gateway.api.routes import ROUTES
from gateway.app import make_app
from testing.gateway.running import Gateway, settings
from testing.gateway.upstream import Upstream


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
    made = published["paths"]["/admin/api/tenants"]["post"]
    assert made["security"] == [{"key": []}]
    assert made["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("/NewTenant")
    [parameter] = published["paths"]["/v1/models/{name}"]["get"]["parameters"]
    assert (parameter["name"], parameter["required"]) == ("name", True)
