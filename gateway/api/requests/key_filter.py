"""Filter of keys in a URL's query, for the page of keys and the JSON route."""

from aiohttp import web

from gateway.api.requests.fields import parse_text
from gateway.errors import BadRequest
from gateway.records.keys.list import STATES, KeyFilter


def read_key_filter(request: web.Request) -> KeyFilter:
    """Return the filter. An empty parameter counts as absent. Raises BadRequest."""
    state = request.query.get("state") or None
    if state is not None and state not in STATES:
        raise BadRequest(f"state: expected one of {', '.join(STATES)}.", param="state")
    return KeyFilter(tenant=parse_text(request.query, "tenant"), state=state, q=parse_text(request.query, "q"))
