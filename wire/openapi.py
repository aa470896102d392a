"""OpenAPI 3.1 descriptions of routes, generated from the structs that decode and encode their bodies.

Ranges, lengths and required fields come from the structs' annotations, so the description cannot differ from the code.
"""

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import msgspec

from wire.responses import ErrorResponse

JSON = "application/json"
EVENTS = "text/event-stream"
# Descriptions of successful answers by status.
DESCRIPTIONS = {
    200: "The answer.",
    201: "Created.",
    202: "Accepted; the work continues after the answer.",
    204: "Done; the answer has no body.",
}


@dataclass(frozen=True, slots=True)
class Route:
    """A route of the description.

    request, response: structs; None for no body and for an answer that is not JSON; several for an answer that is one
    of them. statuses: the HTTP statuses of successful answers. files: media types of the files that the answer may be
    instead. streams: the route accepts "stream": true.
    """

    method: str
    path: str
    summary: str
    request: type | None = None
    response: type | tuple[type, ...] | None = None
    statuses: tuple[int, ...] = (200,)
    files: tuple[str, ...] = ()
    streams: bool = False

    @property
    def responses(self) -> tuple[type, ...]:
        """Return the structs of the answer."""
        if isinstance(self.response, tuple):
            return self.response
        return () if self.response is None else (self.response,)


def describe(title: str, routes: Sequence[Route]) -> dict[str, Any]:
    """Return the OpenAPI description, ready to be encoded as JSON."""
    kinds = [kind for route in routes for kind in (route.request, *route.responses) if kind is not None]
    kinds = list(dict.fromkeys([*kinds, ErrorResponse]))
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(kinds, schemas, strict=True))
    for component in components.values():
        if "description" in component:
            # Docstrings have Python's word for JSON's null.
            component["description"] = re.sub(r"\bNone\b", "null", inspect.cleandoc(component["description"]))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version("loraplex")},
        "paths": paths,
        "components": {"schemas": components},
    }


def _operation(route: Route, schema_of: dict[type, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    if found := [schema_of[kind] for kind in route.responses]:
        content = {JSON: {"schema": found[0] if len(found) == 1 else {"anyOf": found}}}
    content |= {kind: {"schema": {"type": "string", "format": "binary"}} for kind in route.files}
    if route.streams:
        content[EVENTS] = {"schema": {"type": "string", "description": "The answer in chunks, then [DONE]."}}
    answers = {str(status): {"description": DESCRIPTIONS[status], "content": content} for status in route.statuses}
    if "204" in answers:
        del answers["204"]["content"]
    error = {"description": "The error.", "content": {JSON: {"schema": schema_of[ErrorResponse]}}}
    operation: dict[str, Any] = {"summary": route.summary, "responses": answers | {"default": error}}
    if names := re.findall(r"\{(\w+)\}", route.path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if route.request is not None:
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": schema_of[route.request]}}}
    return operation
