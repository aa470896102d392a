"""Table of all routes: source of the application's routes, `/openapi.json`, and the checks of scopes and parameters."""

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from gateway.api.routes import API
from gateway.api.scopes import Guards
from gateway.pages.routes import PAGES

TABLE = API | PAGES
ROUTES = tuple(route for routes in TABLE.values() for route in routes)
PARAMETERS = {(route.method, route.canonical): route.query for route in ROUTES if route.query is not None}
# Patterns of the routes that check the key in `Authorization`; pages check a session instead.
KEYED = frozenset(route.canonical for route in ROUTES if route.scope not in (None, "page"))


def add_routes(app: web.Application, objects: Mapping[type, Any], guards: Guards) -> None:
    """Add the routes of every class in `objects`."""
    for kind, routes in TABLE.items():
        if kind in objects:
            for route in routes:
                handler = route.handler.__get__(objects[kind])
                if route.scope is not None:
                    handler = guards.guarded(handler, route.scope, route.least_role, route.beyond)
                if route.method == "GET":
                    # `add_get` also answers HEAD.
                    app.router.add_get(route.path, handler)
                else:
                    app.router.add_route(route.method, route.path, handler)
