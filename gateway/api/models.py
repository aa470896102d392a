"""`/v1/models`: the base model and the tenant's adapters."""

import time
from typing import Any

from aiohttp import web

from gateway.access.scopes import PRINCIPAL
from gateway.api.requests.fields import json_response
from gateway.errors import ModelNotFound
from gateway.records.adapter_rows import READY
from gateway.records.catalog import Adapter, Catalog
from gateway.records.tenants import Tenant


class Models:
    """Routes for the models that a key may use."""

    def __init__(self, *, catalog: Catalog, base_model: str) -> None:
        self._catalog = catalog
        self._base_model = base_model
        self._started = int(time.time())

    async def list(self, request: web.Request) -> web.Response:
        principal = request[PRINCIPAL]
        adapters = await self._catalog.list(principal.tenant)
        models = [
            self._base(),
            *(self._describe(adapter, principal.tenant) for adapter in adapters if adapter.state == READY),
        ]
        usable = [model for model in models if principal.may_use(model["id"])]
        return json_response({"object": "list", "data": usable})

    async def get(self, request: web.Request) -> web.Response:
        principal = request[PRINCIPAL]
        name = request.match_info["name"]
        principal.check_model(name)
        if name == self._base_model:
            return json_response(self._base())
        for adapter in await self._catalog.list(principal.tenant):
            if adapter.name == name and adapter.state == READY:
                return json_response(self._describe(adapter, principal.tenant))
        raise ModelNotFound(name)

    def _base(self) -> dict[str, Any]:
        return {"id": self._base_model, "object": "model", "created": self._started, "owned_by": "loraplex"}

    def _describe(self, adapter: Adapter, owner: Tenant) -> dict[str, Any]:
        created = int(adapter.created_at.timestamp())
        description = {"id": adapter.name, "object": "model", "created": created, "owned_by": owner.name}
        return {**description, "root": self._base_model, "parent": self._base_model}
