"""`/`: the gateway's addresses, as a small page for browsers and as JSON for programs."""

from collections.abc import Callable
from html import escape
from typing import Literal

from aiohttp import web
from msgspec import Struct

from gateway.api.requests.fields import json_response
from gateway.process.admin_port import is_admin_port

PLACES = {
    "/v1": "OpenAI-compatible API; the base URL of clients",
    "/openapi.json": "description of all routes",
    "/console/": "console for tenants",
    "/admin/": "dashboard for operators",
    "/readyz": "state of the service",
}
PAGE = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Loraplex</title>'
    '<meta name="viewport" content="width=device-width"></head><body><h1>Loraplex</h1><ul>{items}</ul></body></html>'
)
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; frame-ancestors 'none'",
    "Vary": "Accept",
    "X-Content-Type-Options": "nosniff",
}


class Service(Struct, frozen=True, kw_only=True):
    """Addresses that are served on this port, with their descriptions."""

    object: Literal["service"] = "service"
    name: str = "Loraplex"
    links: dict[str, str]


class Home:
    """Route for `/`. paths: returns those of all routes. admin_port: the operators' own port, if there is one."""

    def __init__(self, paths: Callable[[], set[str]], admin_port: int | None) -> None:
        self._paths = paths
        self._admin_port = admin_port

    async def get(self, request: web.Request) -> web.Response:
        """Return the addresses that are served on this port."""
        links = {path: text for path, text in PLACES.items() if self._is_served(request, path)}
        if "text/html" not in request.headers.get("Accept", ""):
            response = json_response(Service(links=links))
            response.headers.update(HEADERS)
            return response
        items = "".join(
            f'<li><a href="{escape(path)}">{escape(path)}</a>: {escape(text)}</li>' for path, text in links.items()
        )
        return web.Response(text=PAGE.format(items=items), content_type="text/html", headers=HEADERS)

    def _is_served(self, request: web.Request, path: str) -> bool:
        if path == "/admin/" and self._admin_port is not None:
            return is_admin_port(request, self._admin_port)
        return path == "/v1" or path in self._paths()
