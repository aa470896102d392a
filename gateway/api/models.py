"""`/v1/models`: the base model, and the tenant's adapters and saved mixtures."""

import time
from typing import Any

import msgspec
from aiohttp import web

from gateway.access.scopes import PRINCIPAL
from gateway.api.requests.fields import json_response
from gateway.errors import ModelNotFound
from gateway.records.adapters.catalog import Adapter, Catalog, Model
from gateway.records.adapters.mixtures import names_in, resolve_model
from gateway.records.adapters.rows import READY, Version
from gateway.records.adapters.saved_mixtures import SavedMixture
from gateway.records.money.priced_names import AdapterPrices
from gateway.records.money.prices import FREE, Price, exact_money
from gateway.records.tenants.tenants import Tenant
from wire.mixtures import is_mixture


class Models:
    """Routes for the models that a key may use. max_length: the context length in tokens."""

    def __init__(self, *, catalog: Catalog, base_model: str, max_length: int, prices: AdapterPrices) -> None:
        self._catalog = catalog
        self._base_model = base_model
        self._max_length = max_length
        self._prices = prices
        self._started = int(time.time())

    async def list(self, request: web.Request) -> web.Response:
        principal = request[PRINCIPAL]
        adapters = [each for each in await self._catalog.list(principal.tenant) if each.state == READY]
        names = {adapter.name for adapter in adapters}
        saved = [
            mixture
            for mixture in await self._catalog.mixtures.list(principal.tenant)
            if names.issuperset(part.name for part in mixture.references)
        ]
        tenant = principal.tenant
        prices = await self._prices.of(tenant, adapters)
        models = [
            self._base(tenant),
            *(self._describe(each, tenant, price) for each, price in zip(adapters, prices, strict=True)),
            # A mixture's price depends on its parts' versions, which only `get` reads.
            *(self._describe(each, tenant, FREE) for each in saved),
        ]
        usable = [model for model in models if principal.may_use(model["id"])]
        return json_response({"object": "list", "data": usable})

    async def get(self, request: web.Request) -> web.Response:
        """Return the base model, a saved mixture, or the version that `name`, `name@3` or `name:alias` refers to now.

        Calls for an alias with weights return its versions in turn.
        """
        principal = request[PRINCIPAL]
        name = request.match_info["name"]
        for plain in names_in(name, self._base_model):
            principal.check_model(plain)
        if name == self._base_model:
            return json_response(self._base(principal.tenant))
        if is_mixture(name):
            raise ModelNotFound(name)
        tenant = principal.tenant
        model = await resolve_model(self._catalog, tenant, name)
        price = self._prices.list.price(tenant.name, model, tenant.plan)
        if model.version is None:
            return json_response(self._describe(await self._catalog.mixtures.get(tenant, name), tenant, price))
        version = await self._catalog.versions.get(tenant, model.name, model.version)
        return json_response(self._describe(version, tenant, price, name))

    def _base(self, tenant: Tenant) -> dict[str, Any]:
        price = self._prices.list.price(tenant.name, Model(name=self._base_model, digest=None), tenant.plan)
        description = {"id": self._base_model, "object": "model", "created": self._started, "owned_by": "loraplex"}
        return {**description, **self._size_and_price(price)}

    def _describe(
        self, adapter: Adapter | Version | SavedMixture, owner: Tenant, price: Price, shown: str | None = None
    ) -> dict[str, Any]:
        assert adapter.created_at is not None
        created = int(adapter.created_at.timestamp())
        description = {"id": shown or adapter.name, "object": "model", "created": created, "owned_by": owner.name}
        parents = {"root": self._base_model, "parent": self._base_model}
        return {**description, **parents, **self._size_and_price(price)}

    def _size_and_price(self, price: Price) -> dict[str, Any]:
        """Return the context length, and the price per million tokens unless the model is free."""
        size = {"max_model_len": self._max_length, "context_length": self._max_length}
        if price == FREE:
            return size
        amounts = {name: exact_money(amount) for name, amount in msgspec.structs.asdict(price).items()}
        return {**size, "price": {**amounts, "currency": self._prices.list.currency}}
