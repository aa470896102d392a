"""Pages of the dashboard and the console, from the table of routes."""

import re
from collections.abc import Mapping

from gateway.api.route import Route
from gateway.route_table import ROUTES


def pages_below(home: str) -> list[Route]:
    """Return the routes below `/admin` or `/console` that a browser may open: those of sessions, and log-in pages."""
    return [
        route
        for route in ROUTES
        if route.method == "GET"
        and f"{route.path}/".startswith(f"{home}/")
        and (route.scope == "page" or (route.is_open and route.response is None))
    ]


def path_of(route: Route, known: Mapping[str, str]) -> str:
    """Return the route's path with values for its variables.

    known: the values by name, or by the folder too, such as `requests/id`, where folders give a name other meanings.
    """

    def value(found: re.Match[str]) -> str:
        folder, name = found.groups()
        return f"{folder}/{known.get(f'{folder}/{name}') or known[name]}"

    return re.sub(r"([\w-]+)/{(\w+)[^}]*}", value, route.path)
