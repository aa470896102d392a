"""`/v1/models`: the base models, and the tenant's adapters and saved mixtures."""

import time
from typing import Any

import msgspec
from aiohttp import web

from gateway.api.requests.fields import json_response
from gateway.api.scopes import PRINCIPAL
from gateway.errors import ModelNotFound
from gateway.records.adapters.catalog import Adapter, Catalog, Model
from gateway.records.adapters.mixtures import names_in, resolve_model
from gateway.records.adapters.rows import Version
from gateway.records.adapters.saved_mixtures import SavedMixture
from gateway.records.bases.base import Base
from gateway.records.money.priced_names import AdapterPrices
from gateway.records.money.prices import FREE, Price
from gateway.records.tenants.tenants import Tenant
from gateway.records.version_state import READY
from wire.mixtures import is_mixture
from wire.money import exact_money


class Models:
    """Routes for the models that a key may use."""

    def __init__(self, *, catalog: Catalog, prices: AdapterPrices) -> None:
        self._catalog = catalog
        self._bases = catalog.bases
        self._prices = prices
        self._started = int(time.time())

    async def list(self, request: web.Request) -> web.Response:
        principal = request[PRINCIPAL]
        adapters = [each for each in await self._catalog.list(principal.tenant) if each.state == READY]
        adapters = [each for each in adapters if self._is_served(each.base)]
        by_name = {adapter.name: adapter.base for adapter in adapters}
        saved = [
            mixture
            for mixture in await self._catalog.mixtures.list(principal.tenant)
            if by_name.keys() >= {part.name for part in mixture.references}
        ]
        tenant = principal.tenant
        prices = await self._prices.of(tenant, adapters)
        models = [
            *(self._base(base, tenant) for base in self._bases.listed),
            *(self._describe(each, tenant, price, each.base) for each, price in zip(adapters, prices, strict=True)),
            # A mixture's price depends on its parts' versions, which only `get` reads.
            *(self._describe(each, tenant, FREE, by_name[each.references[0].name]) for each in saved),
        ]
        usable = [model for model in models if principal.may_use(model["id"])]
        return json_response({"object": "list", "data": usable})

    async def get(self, request: web.Request) -> web.Response:
        """Return a base model, a saved mixture, or the version that `name`, `name@3` or `name:alias` refers to now.

        Calls for an alias with weights return its versions in turn.
        """
        principal = request[PRINCIPAL]
        name = request.match_info["name"]
        for plain in names_in(name, self._bases):
            principal.check_model(plain)
        if (base := self._bases.named(name)) is not None and base.state != "retired":
            return json_response(self._base(base, principal.tenant))
        if is_mixture(name):
            raise ModelNotFound(name)
        tenant = principal.tenant
        model = await resolve_model(self._catalog, tenant, name)
        price = self._prices.list.price(tenant.name, model, tenant.plan)
        if model.version is None:
            return json_response(
                self._describe(await self._catalog.mixtures.get(tenant, name), tenant, price, model.base)
            )
        version = await self._catalog.versions.get(tenant, model.name, model.version)
        return json_response(self._describe(version, tenant, price, model.base, name))

    def _is_served(self, base_id: str) -> bool:
        base = self._bases.get(base_id)
        return base is not None and base.state != "retired"

    def _base(self, base: Base, tenant: Tenant) -> dict[str, Any]:
        price = self._prices.list.price(tenant.name, Model(name=base.name, digest=None, base=base.id), tenant.plan)
        description = {"id": base.name, "object": "model", "created": self._started, "owned_by": "loraplex"}
        return {**description, **self._size_and_price(base, price)}

    def _describe(
        self,
        adapter: Adapter | Version | SavedMixture,
        owner: Tenant,
        price: Price,
        base_id: str,
        shown: str | None = None,
    ) -> dict[str, Any]:
        assert adapter.created_at is not None
        created = int(adapter.created_at.timestamp())
        description = {"id": shown or adapter.name, "object": "model", "created": created, "owned_by": owner.name}
        base = self._bases.of_model(base_id)
        parents = {"root": base.name, "parent": base.name}
        return {**description, **parents, **self._size_and_price(base, price)}

    def _size_and_price(self, base: Base, price: Price) -> dict[str, Any]:
        """Return the context length, and the price per million tokens unless the model is free."""
        size = {"max_model_len": base.context_length, "context_length": base.context_length}
        if price == FREE:
            return size
        amounts = {name: exact_money(amount) for name, amount in msgspec.structs.asdict(price).items()}
        return {**size, "price": {**amounts, "currency": self._prices.list.currency}}
