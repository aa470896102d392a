"""`/v1/adapters` and `/v1/usage`: what a tenant does with its own adapters, and what it has used."""

import asyncio
from typing import Any

from aiohttp import web

from adapters.manifest import BaseShape
from adapters.store import Store
from gateway.admission.auth import Authenticator
from gateway.api.bodies import json_response
from gateway.api.idempotency import Idempotency
from gateway.api.upload import receive
from gateway.records.catalog import Adapter, Catalog
from gateway.records.tenants import Tenant

# Uploads that are read and checked at once: each may hold a core and a temporary folder.
MAX_UPLOADS = 4


class AdapterIntake:
    """Takes uploads in: form, checks, store, catalog. Used for a tenant by itself and by an admin on its behalf."""

    def __init__(
        self, *, catalog: Catalog, store: Store, base: BaseShape, max_bytes: int, idempotency: Idempotency
    ) -> None:
        self._catalog = catalog
        self._store = store
        self._base = base
        self._max_bytes = max_bytes
        self._idempotency = idempotency
        self._uploads = asyncio.Semaphore(MAX_UPLOADS)

    async def push(self, request: web.Request, tenant: Tenant, actor: str) -> web.Response:
        """201 and the new version; in use from the moment of the answer.

        Raises BadRequest and TooLarge for the form, AdapterError for an adapter that cannot be served.
        """
        async with self._uploads, receive(request, self._max_bytes) as upload:
            self._catalog.check_name(upload.name)
            checkpoint = await asyncio.to_thread(self._store.put, upload.folder, self._base)
            name = upload.name

        async def add_version() -> web.Response:
            adapter = await self._catalog.add_version(
                tenant,
                name,
                digest=checkpoint.digest,
                rank=checkpoint.rank,
                num_bytes=checkpoint.num_bytes,
                actor=actor,
            )
            return json_response(describe(adapter), status=201)

        return await self._idempotency.once(request, actor, f"{name} {checkpoint.digest}".encode(), add_version)

    async def list(self, tenant: Tenant) -> web.Response:
        adapters = await self._catalog.list(tenant)
        return json_response({"object": "list", "data": [describe(adapter) for adapter in adapters]})


class Adapters:
    """The tenant's routes."""

    def __init__(self, *, auth: Authenticator, catalog: Catalog, intake: AdapterIntake) -> None:
        self._auth = auth
        self._catalog = catalog
        self._intake = intake

    async def push(self, request: web.Request) -> web.Response:
        principal = await self._auth.tenant(request.headers.get("Authorization"), "adapters")
        return await self._intake.push(request, principal.tenant, principal.key_id)

    async def list(self, request: web.Request) -> web.Response:
        principal = await self._auth.tenant(request.headers.get("Authorization"), "adapters")
        return await self._intake.list(principal.tenant)

    async def get(self, request: web.Request) -> web.Response:
        principal = await self._auth.tenant(request.headers.get("Authorization"), "adapters")
        return json_response(describe(await self._catalog.get(principal.tenant, request.match_info["name"])))

    async def delete(self, request: web.Request) -> web.Response:
        principal = await self._auth.tenant(request.headers.get("Authorization"), "adapters")
        name = request.match_info["name"]
        await self._catalog.delete(principal.tenant, name, principal.key_id)
        return json_response({"object": "adapter", "name": name, "deleted": True})


def describe(adapter: Adapter) -> dict[str, Any]:
    """An adapter as the API shows it."""
    return {
        "object": "adapter",
        "name": adapter.name,
        "version": adapter.version,
        "digest": f"sha256:{adapter.digest}",
        "rank": adapter.rank,
        "size_bytes": adapter.num_bytes,
        "created_at": adapter.created_at,
    }
