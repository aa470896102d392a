"""`/admin/api/search`: tenants, adapters and keys by name, id or digest, as the search box of the dashboard."""

import re
from typing import Literal

from aiohttp import web
from msgspec import Struct

from gateway.api.requests.fields import is_fit, json_response
from gateway.errors import BadRequest
from gateway.records.search import FoundKey, FoundVersion, Search

MAX_CHARS = 128
_REQUEST = re.compile(r"(?:req_|chatcmpl-|cmpl-)[0-9a-zA-Z_-]{1,60}")
_KEY = re.compile(r"lpx_([0-9a-f]{16})_[0-9a-f]*")


class SearchResult(Struct, frozen=True, kw_only=True):
    """Matches, at most 20 of each kind. request: the text if it is a request's id, which is not looked up."""

    object: Literal["search"] = "search"
    request: str | None
    tenants: list[str]
    adapters: list[FoundVersion]
    keys: list[FoundKey]


class AdminSearch:
    """Route of the search."""

    def __init__(self, search: Search) -> None:
        self._search = search

    async def get(self, request: web.Request) -> web.Response:
        text = clean(request.query.get("q", ""))
        if not text:
            raise BadRequest("q: is required; expected part of a name or label, an id or a digest.", param="q")
        if is_request(text):
            return json_response(SearchResult(request=text, tenants=[], adapters=[], keys=[]))
        found = await self._search.find(text)
        return json_response(
            SearchResult(request=None, tenants=found.tenants, adapters=found.versions, keys=found.keys)
        )


def clean(text: str) -> str:
    """Return the text to search for; of a key its id."""
    text = "".join(filter(is_fit, text.strip()))[:MAX_CHARS]
    key = _KEY.fullmatch(text)
    return key[1] if key else text


def is_request(text: str) -> bool:
    """Return whether the text is the id of a request or of its answer."""
    return _REQUEST.fullmatch(text) is not None
