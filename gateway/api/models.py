"""`/v1/models`: the base model, and the tenant's adapters and saved mixtures."""

import time
from typing import Any

from aiohttp import web

from gateway.access.scopes import PRINCIPAL
from gateway.api.requests.fields import json_response
from gateway.errors import ModelNotFound
from gateway.records.adapter_rows import READY, Version
from gateway.records.catalog import Adapter, Catalog
from gateway.records.mixtures import names_in, resolve_model
from gateway.records.saved_mixtures import SavedMixture
from gateway.records.tenants import Tenant
from wire.mixtures import is_mixture


class Models:
    """Routes for the models that a key may use."""

    def __init__(self, *, catalog: Catalog, base_model: str) -> None:
        self._catalog = catalog
        self._base_model = base_model
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
        named: list[Adapter | SavedMixture] = [*adapters, *saved]
        models = [self._base(), *(self._describe(each, principal.tenant) for each in named)]
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
            return json_response(self._base())
        if is_mixture(name):
            raise ModelNotFound(name)
        model = await resolve_model(self._catalog, principal.tenant, name)
        if model.version is None:
            return json_response(
                self._describe(await self._catalog.mixtures.get(principal.tenant, name), principal.tenant)
            )
        version = await self._catalog.versions.get(principal.tenant, model.name, model.version)
        return json_response(self._describe(version, principal.tenant, name))

    def _base(self) -> dict[str, Any]:
        return {"id": self._base_model, "object": "model", "created": self._started, "owned_by": "loraplex"}

    def _describe(
        self, adapter: Adapter | Version | SavedMixture, owner: Tenant, shown: str | None = None
    ) -> dict[str, Any]:
        assert adapter.created_at is not None
        created = int(adapter.created_at.timestamp())
        description = {"id": shown or adapter.name, "object": "model", "created": created, "owned_by": owner.name}
        return {**description, "root": self._base_model, "parent": self._base_model}
