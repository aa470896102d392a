"""`/admin/api/adapters`: the adapters of all tenants in one list."""

from collections.abc import Sequence
from datetime import datetime
from typing import Literal

from aiohttp import web
from msgspec import Struct

from gateway.api.adapters.versions import describe_content
from gateway.api.requests.fields import json_response, parse_text, read_flag, read_limit, read_number, read_sort
from gateway.errors import BadRequest
from gateway.fleet.discovery.registry import Registry
from gateway.records.adapters.list import MAX_PAGE, SORTS, STATES, AdapterList, ListedAdapter, ListFilter
from wire.digests import bare_digest, digest_name, named_digest

LIST_QUERY = ("tenant", "q", "state", "rank", "base", "unused", "idle_days", "sort", "page", "limit")
DEFAULT_ROWS, MAX_RANK, MAX_DAYS = 50, 4096, 9999
# Days of `unused=true`.
UNUSED_DAYS = 30


class ShownAdapter(Struct, frozen=True, kw_only=True):
    """An adapter of a tenant. resident: URLs of the engines that hold it in device memory. See ListedAdapter."""

    object: Literal["adapter"] = "adapter"
    tenant: str
    name: str
    version: int | None
    state: str
    digest: str | None
    rank: int | None
    size_bytes: int
    created_at: datetime
    pinned: bool
    newest_version: int | None
    newest_state: str
    versions: int
    base: str | None
    requests_24h: int
    last_used: datetime | None
    resident: list[str]


class AdapterPage(Struct, frozen=True, kw_only=True):
    """Page of adapters. total: their number on all pages."""

    object: Literal["list"] = "list"
    data: list[ShownAdapter]
    total: int
    has_more: bool


class AdminAdapters:
    """Routes for the adapters of all tenants."""

    def __init__(self, *, adapters: AdapterList, registry: Registry) -> None:
        self._adapters = adapters
        self._registry = registry

    async def list(self, request: web.Request) -> web.Response:
        """Return a page of adapters with their use, and the engines that hold them in device memory."""
        sort, descending = read_sort(request, SORTS, "name")
        limit, number = read_limit(request, DEFAULT_ROWS, MAX_PAGE), read_number(request, "page", 1, 1_000_000) or 1
        page = await self._adapters.page(
            read_filter(request), sort=sort, descending=descending, page=number, limit=limit
        )
        data = [describe_listed(each, resident_on(self._registry, each.digest)) for each in page.adapters]
        more = number * limit < page.total
        return json_response(AdapterPage(data=data, total=page.total, has_more=more))


def read_filter(request: web.Request) -> ListFilter:
    """Return the filter of the query. An empty parameter counts as absent. Raises BadRequest."""
    state, base = parse_text(request.query, "state"), parse_text(request.query, "base")
    if state is not None and state not in STATES:
        raise BadRequest(f"state: expected one of {', '.join(STATES)}.", param="state")
    if base is not None and named_digest(base) is None:
        raise BadRequest("base: expected a digest such as sha256:3fa9...", param="base")
    idle_days = read_number(request, "idle_days", 1, MAX_DAYS)
    if idle_days is None and request.query.get("unused") and read_flag(request, "unused"):
        idle_days = UNUSED_DAYS
    return ListFilter(
        tenant=parse_text(request.query, "tenant"),
        search=parse_text(request.query, "q"),
        state=state,
        rank=read_number(request, "rank", 1, MAX_RANK),
        base=None if base is None else bare_digest(base),
        idle_days=idle_days,
    )


def resident_on(registry: Registry, digest: str) -> list[str]:
    """Return the URLs of the engines that report an adapter in device memory."""
    return sorted(engine.url for engine in registry.up if digest and digest in engine.resident)


def describe_listed(adapter: ListedAdapter, resident: Sequence[str]) -> ShownAdapter:
    """Return a listed adapter as the API shows it. resident: the URLs of its engines."""
    return ShownAdapter(
        tenant=adapter.tenant,
        **describe_content(adapter),
        newest_version=adapter.newest,
        newest_state=adapter.newest_state,
        versions=adapter.versions,
        base=None if adapter.base is None else digest_name(adapter.base),
        requests_24h=adapter.requests,
        last_used=adapter.last_used,
        resident=list(resident),
    )
