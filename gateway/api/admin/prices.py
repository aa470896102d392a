"""`/admin/api/prices`: prices of tokens, by model."""

from datetime import datetime
from typing import Annotated, Literal

from aiohttp import web
from msgspec import Meta, Struct

from gateway.access.auth import Authenticator
from gateway.api.requests.fields import check_text, json_response, read_body, read_flag
from gateway.api.requests.named_models import FORCE, check_models
from gateway.api.scopes import ACTOR
from gateway.errors import BadRequest, RecordNotFound
from gateway.records.adapters.catalog import Catalog
from gateway.records.money.prices import EVERYTHING, Price, PricedModel, PriceList, Prices
from gateway.records.tenants.tenants import Tenants

# At most 1,000 currency units per million tokens: the quota script computes exactly up to this price.
MicroUnits = Annotated[int, Meta(ge=0, le=10**9)]


class NewPrice(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body for a price, in micro-units per million tokens. cached: by default the same as `input`."""

    input: MicroUnits
    output: MicroUnits
    cached: MicroUnits | None = None

    def price(self) -> Price:
        cached = self.input if self.cached is None else self.cached
        return Price(input=self.input, cached=cached, output=self.output)


class ShownPrice(Struct, frozen=True, kw_only=True):
    """Price of a model's tokens, in micro-units of the currency per million tokens."""

    object: Literal["price"] = "price"
    model: str
    input: int
    cached: int
    output: int
    currency: str
    updated_at: datetime


class ShownPrices(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ShownPrice]


class DeletedPrice(Struct, frozen=True, kw_only=True):
    object: Literal["price"] = "price"
    model: str
    deleted: bool = True


class AdminPrices:
    """Routes for prices. A change takes effect here at once and on every other gateway within a second."""

    def __init__(
        self, *, auth: Authenticator, prices: Prices, known: PriceList, tenants: Tenants, catalog: Catalog
    ) -> None:
        self._auth = auth
        self._prices = prices
        self._known = known
        self._tenants = tenants
        self._catalog = catalog

    async def list(self, request: web.Request) -> web.Response:
        entries = await self._prices.list()
        currency = self._known.currency
        return json_response(ShownPrices(data=[_describe(entry, currency) for entry in entries]))

    async def put(self, request: web.Request) -> web.Response:
        actor = request[ACTOR]
        price = (await read_body(request, NewPrice)).price()
        model = request.match_info["model"]
        check_text(model, "model")
        if model != EVERYTHING and self._catalog.bases.named(model) is None:
            await self._check_adapter(request, model)
        entry = await self._prices.put(model, price, actor)
        await self._known.refresh()
        await self._auth.catch_up()
        return json_response(_describe(entry, self._known.currency))

    async def delete(self, request: web.Request) -> web.Response:
        actor = request[ACTOR]
        model = request.match_info["model"]
        await self._prices.delete(model, actor)
        await self._known.refresh()
        await self._auth.catch_up()
        return json_response(DeletedPrice(model=model))

    async def _check_adapter(self, request: web.Request, model: str) -> None:
        """Raise BadRequest unless the adapter, or the tenant of `tenant/*`, exists or `?force=true` is given."""
        owner, _, adapter = model.partition("/")
        try:
            tenant = await self._tenants.get(owner)
        except RecordNotFound as error:
            if read_flag(request, "force"):
                return
            raise BadRequest(
                f"model: '{model}' is neither a base model ({self._catalog.bases.shown}) nor '*' nor an adapter as "
                f"tenant/name or tenant/*. {FORCE}.",
                param="model",
                code="unknown_model",
            ) from error
        await check_models(request, self._catalog, tenant, [adapter], "model", any_adapter=True)


def _describe(entry: PricedModel, currency: str) -> ShownPrice:
    price = entry.price
    return ShownPrice(
        model=entry.model,
        input=price.input,
        cached=price.cached,
        output=price.output,
        currency=currency,
        updated_at=entry.updated_at,
    )
