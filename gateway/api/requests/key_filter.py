"""Filter of keys in a URL's query, for the page of keys and the JSON route."""

from aiohttp import web

from gateway.errors import BadRequest
from gateway.records.keys.list import STATES, KeyFilter

MAX_CHARS = 100


def read_key_filter(request: web.Request) -> KeyFilter:
    """Return the filter. An empty parameter counts as absent. Raises BadRequest."""
    given = {name: request.query[name] for name in ("tenant", "state", "q") if request.query.get(name)}
    for name, value in given.items():
        if len(value) > MAX_CHARS or not value.isprintable():
            raise BadRequest(f"{name}: expected at most {MAX_CHARS} printable characters.", param=name)
    state = given.get("state")
    if state is not None and state not in STATES:
        raise BadRequest(f"state: expected one of {', '.join(STATES)}.", param="state")
    return KeyFilter(tenant=given.get("tenant"), state=state, q=given.get("q"))
