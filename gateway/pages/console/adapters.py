"""`/console/adapters`: the models that the tenant's requests may use, with their context and price.

An adapter's own page, its actions and the upload are those of the operators' pages (gateway/pages/adapters/page.py).
"""

from typing import NamedTuple, cast

import msgspec
from aiohttp import web

from gateway.api.admin.adapters import read_filter
from gateway.api.scopes import PRINCIPAL
from gateway.errors import BadRequest
from gateway.pages.adapters.list import COLUMNS as ALL_COLUMNS
from gateway.pages.adapters.list import STATE_OPTIONS, idle_options
from gateway.pages.console.access import Console, ConsolePages, needs
from gateway.pages.widgets.states import TONES
from gateway.pages.widgets.tables import ROWS, Column, csv_response, read_table
from gateway.records.adapters.catalog import Adapter, Model
from gateway.records.adapters.list import MAX_PAGE, AdapterPage, ListedAdapter, ListFilter, Sort
from gateway.records.bases.base import FIRST, Base
from gateway.records.money.priced_names import AdapterPrices
from gateway.records.money.prices import Price
from gateway.records.tenants.tenants import Tenant
from wire.money import exact_money

QUERY = ("q", "state", "rank", "unused", "idle_days", "sort", "page", "format")
# Tenants do not see columns about engines and other tenants.
SHARED = {each.key: each for each in ALL_COLUMNS if each.key not in ("tenant", "base", "resident")}
PRICE = Column("price", "Price in / out", numeric=True, sortable=False, hint="Per million tokens, prompt and answer")
COLUMNS = (*SHARED.values(), PRICE)


class ModelRow(NamedTuple):
    """An adapter and its price per million tokens."""

    adapter: ListedAdapter
    price: Price


def _field(name: str, title: str | None = None) -> Column:
    return Column(title or name, title or name, value=lambda row: getattr(row.adapter, name))


CSV_COLUMNS = (
    *map(_field, ("name", "version", "state", "digest", "rank")),
    _field("num_bytes", "size_bytes"),
    *map(_field, ("created_at", "requests", "last_used")),
    Column("input", "input", value=lambda row: exact_money(row.price.input)),
    Column("cached", "cached", value=lambda row: exact_money(row.price.cached)),
    Column("output", "output", value=lambda row: exact_money(row.price.output)),
)


class ConsoleAdapters(ConsolePages):
    """Page of the tenant's models."""

    def __init__(self, console: Console, prices: AdapterPrices) -> None:
        super().__init__(console)
        self._prices = prices

    @needs("adapters")
    async def show(self, request: web.Request) -> web.StreamResponse:
        principal, errors = request[PRINCIPAL], dict[str, str]()
        table = read_table(request, "adapters", COLUMNS, "name")
        is_csv = request.query.get("format") == "csv"
        criteria, found, rows = ListFilter(), AdapterPage(adapters=[], total=0), list[ModelRow]()
        try:
            own = {"tenant": None, "tenant_id": principal.tenant.id, "names": principal.allowed_models}
            criteria = msgspec.structs.replace(read_filter(request), **own)
            page, limit = (1, MAX_PAGE) if is_csv else (table.page, ROWS)
            async with self.console.reads.place(principal.tenant.id):
                found = await self.console.records.adapter_list.page(
                    criteria, sort=cast(Sort, table.sort), descending=table.descending, page=page, limit=limit
                )
                rows = await self._priced(principal.tenant, found)
        except BadRequest as error:
            errors[error.param or ""] = error.message
        if is_csv and not errors:
            return csv_response("adapters", CSV_COLUMNS, rows)
        table.rows, table.total = rows, found.total
        return await self.console.frame.render_long(
            request,
            "console/adapters.html",
            title="Models and adapters",
            status=400 if errors else 200,
            table=table,
            errors=errors,
            states=STATE_OPTIONS,
            idle=idle_options(criteria.idle_days),
            idle_days=str(criteria.idle_days or ""),
            tones=TONES,
            is_filtered=any(request.query.get(name) for name in QUERY[:5]),
            bases=[
                (base, self._price_of(base, principal.tenant))
                for base in self.console.bases.listed
                if principal.may_use(base.name)
            ],
            may_ask="inference" in principal.scopes,
        )

    def _price_of(self, base: Base, tenant: Tenant) -> Price:
        model = Model(name=base.name, digest=None, base=base.id)
        return self._prices.list.price(tenant.name, model, tenant.plan)

    async def _priced(self, tenant: Tenant, page: AdapterPage) -> list[ModelRow]:
        fields = ("name", "version", "digest", "rank", "num_bytes", "created_at")
        named = [
            Adapter(**{name: getattr(each, name) for name in fields}, base=each.base_id or FIRST)
            for each in page.adapters
        ]
        prices = await self._prices.of(tenant, named)
        return [ModelRow(adapter, price) for adapter, price in zip(page.adapters, prices, strict=True)]
