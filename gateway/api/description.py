"""OpenAPI description of the gateway's routes, published as `/openapi.json`."""

import asyncio
import re
from collections.abc import Callable, Iterable
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
    """Route for the description. document: builds it, once in the process, because the route needs no key.

    A thread builds it, because that would hold the event loop too long. A client that leaves does not stop the thread,
    so clients that connect and leave cannot start further ones.
    """

    def __init__(self, document: Callable[[], dict[str, Any]]) -> None:
        self._build = document
        self._task: asyncio.Task[bytes] | None = None

    async def get(self, _: web.Request) -> web.Response:
        if self._task is None:
            self._task = asyncio.create_task(asyncio.to_thread(lambda: msgspec.json.encode(self._build())))
        return web.Response(body=await asyncio.shield(self._task), content_type="application/json")


def describe_routes(routes: Iterable[Route]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document, with the routes' key requirements and path parameters."""
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
    return description


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
