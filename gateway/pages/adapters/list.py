"""`/admin/adapters`: the adapters of all tenants."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from aiohttp import web

from gateway.api.admin.adapters import read_filter, resident_on
from gateway.errors import BadRequest
from gateway.fleet.discovery.registry import Registry
from gateway.pages.frame.frame import Frame
from gateway.pages.widgets.links import Links
from gateway.pages.widgets.states import TONES
from gateway.pages.widgets.tables import ROWS, Column, Table, csv_response, read_table
from gateway.process.page_threads import in_page_thread
from gateway.records.adapters.list import MAX_PAGE, STATES, AdapterList, AdapterPage, ListedAdapter, ListFilter, Sort
from gateway.records.bases.base import FIRST
from gateway.records.bases.registry import Bases
from wire.digests import digest_name

LIST_QUERY = ("tenant", "q", "state", "rank", "base", "unused", "idle_days", "sort", "page", "format")
COLUMNS = (
    Column("name", "Adapter"),
    Column("tenant", "Tenant"),
    Column("version", "Version", hint="Version of the alias latest, and the newest version if it is another one"),
    Column("state", "State"),
    Column("rank", "Rank", numeric=True),
    Column("size", "Size", numeric=True, hint="Size of the version's files"),
    Column("base", "Trained for", sortable=False, hint="Base model on which the version was probed"),
    Column("requests", "Requests 24 h", numeric=True),
    Column("last_used", "Last used", hint="To the hour, within 30 days"),
    Column("resident", "On device", sortable=False, hint="Engines that have it in device memory"),
)
STATE_OPTIONS = (("", "any"), *((state, state) for state in STATES))
IDLE_DAYS = (7, 30, 90)
# Maximum rows of a CSV file.
MAX_CSV = 20_000


class Row(NamedTuple):
    """An adapter in the table, the URLs of the engines that have it on their device, and the name of its base model."""

    adapter: ListedAdapter
    resident: Sequence[str]
    base: str | None


def _csv_column(key: str, name: str) -> Column:
    def value(row: Row) -> Any:
        return getattr(row.adapter, name)

    return Column(key, key, value=value)


_FIELDS = (
    *(("tenant", "tenant"), ("name", "name"), ("version", "version"), ("state", "state"), ("digest", "digest")),
    *(("rank", "rank"), ("size_bytes", "num_bytes"), ("base", "base"), ("newest_version", "newest")),
    *(("newest_state", "newest_state"), ("pinned", "pinned"), ("created_at", "created_at")),
    *(("requests_24h", "requests"), ("last_used", "last_used")),
)
CSV_COLUMNS = (
    *(_csv_column(key, name) for key, name in _FIELDS),
    Column("resident", "resident", value=lambda row: " ".join(row.resident)),
)


class AdapterListPage:
    """Page of all adapters."""

    def __init__(self, *, frame: Frame, adapters: AdapterList, registry: Registry, bases: Bases) -> None:
        self._frame = frame
        self._adapters = adapters
        self._registry = registry
        self._base_models = bases

    async def show(self, request: web.Request) -> web.Response:
        """Return a page of the list, or all of it as CSV. An error of a filter is shown at its field."""
        errors: dict[str, str] = {}
        criteria, found = ListFilter(), AdapterPage(adapters=[], total=0)
        table = read_table(request, "adapters", COLUMNS, "name")
        try:
            criteria = read_filter(request)
            if request.query.get("format") == "csv":
                return await self._csv(table, criteria)
            found = await self._page(table, criteria, table.page, ROWS)
        except BadRequest as error:
            errors[error.param or ""] = error.message
        table.rows, table.total = [self._row(each) for each in found.adapters], found.total
        return await self._frame.render_long(
            request,
            "adapters.html",
            title="Adapters",
            status=400 if errors else 200,
            table=table,
            errors=errors,
            bases=await self._bases(criteria.base),
            states=STATE_OPTIONS,
            idle=idle_options(criteria.idle_days),
            idle_days=str(criteria.idle_days or ""),
            is_filtered=any(request.query.get(name) for name in LIST_QUERY[:7]),
            num_up=len(self._registry.up),
            tones=TONES,
            links=Links(request),
        )

    async def _page(self, table: Table, criteria: ListFilter, page: int, limit: int) -> AdapterPage:
        sort = cast(Sort, table.sort)
        return await self._adapters.page(criteria, sort=sort, descending=table.descending, page=page, limit=limit)

    async def _csv(self, table: Table, criteria: ListFilter) -> web.Response:
        rows: list[Row] = []
        for page in range(1, MAX_CSV // MAX_PAGE + 1):
            found = await self._page(table, criteria, page, MAX_PAGE)
            rows += [self._row(each) for each in found.adapters]
            if len(found.adapters) < MAX_PAGE:
                break
        return await in_page_thread(csv_response, "adapters", CSV_COLUMNS, rows)

    def _row(self, adapter: ListedAdapter) -> Row:
        # An upload without content is bound to no base model.
        base = None if not adapter.digest else self._base_models.name_of(adapter.base_id or FIRST)
        return Row(adapter, resident_on(self._registry, adapter.digest), base)

    async def _bases(self, chosen: str | None) -> list[tuple[str, str]]:
        """Return the options of the base model: those of the engines, and those that versions are bound to."""
        served = {engine.state.base_digest: engine.state.model for engine in self._registry.up}
        known = {*await self._adapters.bases(), *(digest for digest in served if digest)}
        if chosen is not None:
            known.add(chosen)
        shown = [
            (digest_name(digest), f"{served.get(digest) or 'not served'} · {digest[:8]}") for digest in sorted(known)
        ]
        return [("", "any"), *shown]


def idle_options(chosen: int | None) -> list[tuple[str, str]]:
    """Return the options of the filter for adapters without use. chosen: days of the present filter."""
    days = sorted({*IDLE_DAYS, *([] if chosen is None else [chosen])})
    return [("", "any"), *((str(number), f"not for {number} days") for number in days)]
