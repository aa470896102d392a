"""Hints for URLs without a route: the route that was probably meant, and OpenAI's APIs that are not served."""

from aiohttp import web

# Titles of the APIs by the first part of their paths.
UNSUPPORTED = {
    "/v1/responses": "Responses API",
    "/v1/embeddings": "Embeddings API",
    "/v1/images": "Images API",
    "/v1/audio": "Audio API",
    "/v1/moderations": "Moderations API",
    "/v1/assistants": "Assistants API",
    "/v1/threads": "Threads API",
    "/v1/batches": "Batch API",
    "/v1/files": "Files API",
    "/v1/fine_tuning": "Fine-tuning API",
    "/v1/realtime": "Realtime API",
    "/v1/messages": "Messages API",
    "/v1/rerank": "Rerank API",
}
API = "/v1"
# Maximum characters of a method and of a path in an error.
MAX_METHOD, MAX_PATH = 20, 200


def unsupported_api(request: web.Request) -> str | None:
    """Return the error for a path of an API that the gateway does not have, None for other paths."""
    for start, name in UNSUPPORTED.items():
        if request.path == start or request.path.startswith(f"{start}/"):
            return f"{_target(request)}: the {name} is not served here; use POST /v1/chat/completions."
    return None


def unknown_route(request: web.Request) -> str:
    """Return the error for a path without a route."""
    meant = _meant(request)
    hint = "" if meant is None else f" Did you mean {meant}?"
    return (
        f"Unknown route {_target(request)}.{hint} The API's base URL ends with /v1; "
        "GET /openapi.json describes the routes."
    )


def _target(request: web.Request) -> str:
    """Return the request's method and path, cut to their limits."""
    return f"{request.method[:MAX_METHOD]} {request.path[:MAX_PATH]}"


def _meant(request: web.Request) -> str | None:
    """Return the path of the route that the request meant, if it only lacks /v1 or has it twice.

    Routes with variables are not compared.
    """
    path = request.path
    if path.startswith(f"{API}{API}/"):
        meant = path.removeprefix(API)
    else:
        meant = API + path
    for resource in request.app.router.resources():
        if resource.canonical == meant and any(route.method == request.method for route in resource):
            return meant
    return None
