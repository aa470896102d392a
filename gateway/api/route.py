"""Entry of the table of routes."""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from gateway.access.roles import ADMIN_PATH, Role
from gateway.api.scopes import Scope

# Statuses of an added version: 202 while it is validated.
ADDED = (201, 202)
# Statuses of what a PUT changed or created.
PUT = (200, 201)


class Upload:
    """Body of an upload: a form with the adapter's name and its files."""


@dataclass(frozen=True, slots=True)
class Route:
    """Entry of the table of routes.

    handler: a method of the class under which the table lists the route.
    scope: the scope that the key must have; None if the route needs no key or checks another kind of secret itself;
        `page` for a browser's session.
    role: the least role on an admin route or page; by default viewer for reads, operator for changes, and any of a
        tenant's roles on pages of the console.
    beyond: words about changes that need another role, for the error.
    is_open: whether it needs no secret at all.
    query: the allowed query parameters; None to skip the check.
    request, response: structs of the bodies; `Upload` for a form; several for an answer that is one of them.
    statuses: the HTTP statuses of successful answers.
    files: media types of the files that the answer may be instead.
    streams: whether it accepts "stream": true.
    """

    method: str
    path: str
    handler: Callable[[Any, web.Request], Awaitable[web.StreamResponse]]
    summary: str
    scope: Scope | None = None
    role: Role | None = None
    beyond: str = ""
    is_open: bool = False
    query: tuple[str, ...] | None = None
    request: type | None = None
    response: type | tuple[type, ...] | None = dict
    statuses: tuple[int, ...] = (200,)
    files: tuple[str, ...] = ()
    streams: bool = False

    @property
    def least_role(self) -> Role:
        if self.role is not None:
            return self.role
        if self.scope == "page" and not self.path.startswith(ADMIN_PATH):
            return "tenant_member"
        return "viewer" if self.method == "GET" else "operator"

    @property
    def canonical(self) -> str:
        """Return the path without the regular expressions of its variables, as aiohttp and OpenAPI write it."""
        return re.sub(r":[^}]+}", "}", self.path)
