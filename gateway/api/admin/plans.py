"""`/admin/api/plans`: plans, which are named terms and prices of tenants."""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from gateway.access.auth import Authenticator
from gateway.api.admin.prices import NewPrice
from gateway.api.admin.shown_terms import with_terms
from gateway.api.admin.tenants import ModelName, TermFields, read_terms_body
from gateway.api.requests.fields import json_response, read_body
from gateway.api.scopes import ACTOR
from gateway.errors import BadRequest
from gateway.records.bases.registry import Bases
from gateway.records.money.plans import Plans, TenantPlan
from gateway.records.money.prices import ALL_ADAPTERS, EVERYTHING, Price, PriceList
from gateway.records.tenants.terms import FIELDS, Source, Terms, resolve, sources

PriceTable = Annotated[dict[ModelName, NewPrice], Meta(max_length=100)]


class NewPlan(TermFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body for a plan. An absent term is the default of a tenant without a plan. prices: in micro-units."""

    prices: PriceTable = msgspec.field(default_factory=dict)

    def terms(self) -> Terms:
        return Terms(**{name: value for name, value in self.given().items() if name in FIELDS})


class PlanPrices(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prices: PriceTable


class NamedPlan(Struct, frozen=True, kw_only=True):
    object: Literal["plan"] = "plan"
    name: str


_WithTerms: Any = with_terms(NamedPlan)


class ShownPlan(_WithTerms, NamedPlan, frozen=True, kw_only=True):
    """A plan with its terms. sources: "plan" for the terms that it sets. prices: by model. tenants: their number."""

    sources: dict[str, Source]
    prices: dict[str, Price]
    tenants: int
    updated_at: datetime


class PlanList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ShownPlan]


class DeletedPlan(Struct, frozen=True, kw_only=True):
    object: Literal["plan"] = "plan"
    name: str
    deleted: bool = True


class AdminPlans:
    """Routes for plans. A change takes effect here at once and on every other gateway within a second."""

    def __init__(self, *, auth: Authenticator, plans: Plans, known: PriceList, bases: Bases) -> None:
        self._auth = auth
        self._plans = plans
        self._known = known
        self._bases = bases

    async def list(self, request: web.Request) -> web.Response:
        return json_response(PlanList(data=[describe_plan(plan) for plan in await self._plans.list()]))

    async def get(self, request: web.Request) -> web.Response:
        return json_response(describe_plan(await self._plans.get(request.match_info["plan"])))

    async def put(self, request: web.Request) -> web.Response:
        given = await read_terms_body(request, NewPlan)
        prices = self._prices(given.prices)
        plan = await self._plans.put(request.match_info["plan"], given.terms(), prices, request[ACTOR])
        return await self._changed(plan)

    async def put_prices(self, request: web.Request) -> web.Response:
        given = await read_body(request, PlanPrices)
        plan = await self._plans.put_prices(request.match_info["plan"], self._prices(given.prices), request[ACTOR])
        return await self._changed(plan)

    async def delete(self, request: web.Request) -> web.Response:
        name = request.match_info["plan"]
        await self._plans.delete(name, request[ACTOR])
        return json_response(DeletedPlan(name=name))

    async def _changed(self, plan: TenantPlan) -> web.Response:
        await self._known.refresh()
        await self._auth.catch_up()
        return json_response(describe_plan(plan))

    def _prices(self, new_prices: Mapping[str, NewPrice]) -> dict[str, Price]:
        known = (*self._bases.names, ALL_ADAPTERS, EVERYTHING)
        for model in new_prices:
            if model not in known:
                raise BadRequest(
                    f"prices: expected prices of a base model ({self._bases.shown}), of all adapters "
                    f"('{ALL_ADAPTERS}') or of everything ('{EVERYTHING}'), got '{model}'.",
                    param="prices",
                    code="unknown_model",
                )
        return {model: price.price() for model, price in new_prices.items()}


def describe_plan(plan: TenantPlan) -> ShownPlan:
    """Return the plan as the API shows it."""
    unset = Terms()
    return ShownPlan(
        name=plan.name,
        **resolve(plan.terms, unset),
        sources=sources(plan.terms, unset),
        prices=plan.prices,
        tenants=plan.num_tenants,
        updated_at=plan.updated_at,
    )
