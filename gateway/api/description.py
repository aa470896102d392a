"""OpenAPI description of the gateway's routes, published as `/openapi.json`."""

import re
from functools import cache
from typing import Any

import msgspec
from aiohttp import web

from gateway.api.parameters import find_parameter
from gateway.api.route import Route, Upload
from wire.openapi import Route as Described
from wire.openapi import describe

UPLOAD_FORM = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "file": {"type": "string", "format": "binary", "description": "A .zip, .tar or .tar.gz of the two files."},
        "adapter_config.json": {"type": "string", "format": "binary"},
        "adapter_model.safetensors": {"type": "string", "format": "binary"},
    },
    "required": ["name"],
}


class Description:
    """Route for the description.

    body: the document, built before the gateway listens. Building takes 0.1 s of CPU time, and the route needs no key.
    """

    def __init__(self, body: bytes) -> None:
        self._body = body

    async def get(self, _: web.Request) -> web.Response:
        return web.Response(body=self._body, content_type="application/json")


@cache
def describe_routes(routes: tuple[Route, ...]) -> bytes:
    """Return the OpenAPI 3.1 document in JSON, with the routes' key requirements and path parameters."""
    by_place = {(route.canonical, route.method.lower()): route for route in routes}
    description = describe("Loraplex gateway", [_described(route) for route in by_place.values()])
    description["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in description["paths"].items():
        names = re.findall(r"\{(\w+)\}", path)
        for method, operation in operations.items():
            route = by_place[path, method]
            operation["parameters"] = [
                *(_parameter(name, "path", required=True) for name in names),
                *(_query_parameter(route, name) for name in route.query or ()),
            ]
            operation["security"] = [] if route.is_open else [{"key": []}]
            if route.request is Upload:
                content = {"multipart/form-data": {"schema": UPLOAD_FORM}}
                operation["requestBody"] = {"required": True, "content": content}
    return msgspec.json.encode(description)


def _described(route: Route) -> Described:
    body = None if route.request is Upload else route.request
    return Described(
        route.method,
        route.canonical,
        route.summary,
        body,
        route.response,
        statuses=route.statuses,
        files=route.files,
        streams=route.streams,
    )


def _query_parameter(route: Route, name: str) -> dict[str, Any]:
    described = _parameter(name, "query", required=False)
    if (known := find_parameter(route.canonical, name)) is not None:
        described |= {"schema": known.schema, "description": known.text}
    return described


def _parameter(name: str, place: str, *, required: bool) -> dict[str, Any]:
    return {"name": name, "in": place, "required": required, "schema": {"type": "string"}}
