"""Routes of an adapter's use and changes, for a tenant itself and for operators; and the operator's prefetch."""

from typing import Literal

import msgspec
from aiohttp import web
from msgspec import Struct

from gateway.api.adapters.caller import find_caller, version_of
from gateway.api.requests.fields import json_response
from gateway.errors import BadRequest
from gateway.fleet.routing.operator_prefetch import OperatorPrefetch
from gateway.records.adapters.catalog import Catalog
from gateway.records.adapters.probes import Probes
from gateway.records.adapters.use import AdapterUses, Change, Use
from gateway.records.tenants.tenants import Tenant, Tenants
from gateway.sharing.concurrency import ConcurrencyLimiter
from wire.money import exact_money

# Maximum concurrent queries, at most one per tenant; and a tenant's pause after a query, as a factor of its duration.
READS, REST = 2, 1.0


class ShownUse(Struct, frozen=True, kw_only=True):
    """Requests of a key, an end user or a version. name: the key's label, the end user, or the number. id: a key's."""

    name: str
    id: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost: str
    cost_micros: int


class AdapterUseAnswer(Struct, frozen=True, kw_only=True):
    """Use of an adapter in the last 24 h, the most requests first, and its changes. currency: the costs' currency.

    is_partial: whether users and versions leave out older requests, because there are too many.
    """

    object: Literal["adapter.use"] = "adapter.use"
    name: str
    currency: str
    keys: list[ShownUse]
    users: list[ShownUse]
    versions: list[ShownUse]
    is_partial: bool
    changes: list[Change]


class Prefetched(Struct, frozen=True, kw_only=True):
    """A version that was loaded into the host memory of an engine. engine: its URL."""

    object: Literal["adapter.prefetch"] = "adapter.prefetch"
    name: str
    version: int
    engine: str


class AdapterUseRoutes:
    """Routes of use. currency: the costs' currency. reads: limiter of the queries, also of the adapter's page."""

    def __init__(
        self,
        *,
        tenants: Tenants,
        catalog: Catalog,
        uses: AdapterUses,
        probes: Probes,
        operator_prefetch: OperatorPrefetch,
        currency: str,
    ) -> None:
        self._tenants = tenants
        self._catalog = catalog
        self._uses = uses
        self._probes = probes
        self._operator_prefetch = operator_prefetch
        self._currency = currency
        self.reads = ConcurrencyLimiter(READS, rest=REST)

    async def use(self, request: web.Request) -> web.Response:
        """Return the keys, end users and versions of an adapter's requests of the last 24 h, and its changes."""
        caller, name = await find_caller(request, self._tenants), request.match_info["name"]
        async with self.reads.place(caller.tenant.id):
            # Raises RecordNotFound for an unknown name.
            await self._catalog.versions.list(caller.tenant, name)
            found = await self._uses.of(caller.tenant, name)
            changes = await self._uses.changes(caller.tenant, name, by_tenant=caller.principal is not None)
        return json_response(
            AdapterUseAnswer(
                name=name,
                currency=self._currency,
                keys=[_describe(use) for use in found.keys],
                users=[_describe(use) for use in found.users],
                versions=[_describe(use) for use in found.versions],
                is_partial=found.is_partial,
                changes=changes,
            )
        )

    async def prefetch(self, request: web.Request) -> web.Response:
        """Load a version into the host memory of an engine. Answers after the load."""
        caller, name, number = (
            await find_caller(request, self._tenants),
            request.match_info["name"],
            version_of(request),
        )
        engine = await self.load(caller.tenant, name, number, request.query.get("engine", ""))
        return json_response(Prefetched(name=name, version=number, engine=engine))

    async def load(self, tenant: Tenant, name: str, number: int, url: str) -> str:
        """Load a version into the host memory of the engine at `url`, and return its URL.

        Raises RecordNotFound, BadRequest, Unavailable.
        """
        version = await self._catalog.versions.get(tenant, name, number)
        if not version.is_served:
            raise BadRequest(f"version: the version is {version.state}; expected a ready one.", param="version")
        binding = await self._probes.binding(tenant, name, number)
        return (await self._operator_prefetch.load(url, version.digest, binding, tenant.id)).url


def _describe(use: Use) -> ShownUse:
    fields = msgspec.structs.asdict(use) | {"cost": exact_money(use.cost)}
    return ShownUse(**fields, cost_micros=use.cost)
