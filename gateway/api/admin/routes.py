"""`/admin/api/...`: a tenant's adapters, usage and the queue.

Tenants, keys, prices, engines and audit have their own modules.
"""

from importlib.metadata import version
from typing import Any, Literal

from aiohttp import web
from msgspec import UNSET, Struct, UnsetType

from gateway.api.adapters.caller import find_caller
from gateway.api.adapters.handlers import AdapterIntake
from gateway.api.answers import row_struct
from gateway.api.reports.usage import usage_answer
from gateway.api.requests.fields import json_response, read_flag
from gateway.api.scopes import ACTOR
from gateway.api.uploads.resumable import ResumableUploads
from gateway.errors import RecordNotFound
from gateway.fleet.discovery.registry import Registry
from gateway.fleet.queueing.base_queues import BaseQueues
from gateway.fleet.queueing.queue import TenantPlaces
from gateway.fleet.queueing.waits import EngineQueues, Waits
from gateway.quota.uploading import ReceivedBytes
from gateway.records.audit import Audit
from gateway.records.tenants.tenants import TENANT_NAME, Tenant, Tenants
from gateway.records.usage.report import UsageReport


class Collection(Struct, frozen=True, kw_only=True):
    """Stored contents that were removed and their bytes; with dry_run, those that would be removed."""

    object: Literal["collection"] = "collection"
    removed: int
    bytes: int
    dry_run: Literal[True] | UnsetType = UNSET


class GatewayVersion(Struct, frozen=True, kw_only=True):
    object: Literal["version"] = "version"
    version: str


QueuedTenant: Any = row_struct(
    "QueuedTenant", TenantPlaces, waited=float | None, waiting_in_gateway=int, waiting_on_engines=int | None
)


class QueueAnswer(Struct, frozen=True, kw_only=True):
    """Requests that wait, and the places that this process's admitted requests take of the engines' `places`.

    waiting: in the queues of this process and of the engines. waiting_on_engines: on the engines, of all gateways; null
    if no engine reports it. waited: the longest of these waits so far, in seconds; 0 if none waits, null if it is not
    known. data: the least served first.
    """

    object: Literal["queue"] = "queue"
    waiting: int
    waiting_in_gateway: int
    waiting_on_engines: int | None
    waited: float | None
    inside: int
    places: int
    data: list[QueuedTenant]


class Admin:
    """Operator's routes for adapters, usage and the queue."""

    def __init__(
        self,
        *,
        tenants: Tenants,
        intake: AdapterIntake,
        uploads: ResumableUploads,
        report: UsageReport,
        registry: Registry,
        queues: BaseQueues,
        audit: Audit,
        currency: str,
    ) -> None:
        self._tenants = tenants
        self._intake = intake
        self._uploads = uploads
        self._report = report
        self._registry = registry
        self._queues = queues
        self._audit = audit
        self._currency = currency

    async def push_adapter(self, request: web.Request) -> web.Response:
        return await self._intake.push(request, await find_caller(request, self._tenants), ReceivedBytes())

    async def list_adapters(self, request: web.Request) -> web.Response:
        return await self._intake.list(await self._tenant(request))

    async def collect(self, request: web.Request) -> web.Response:
        """Remove stored content of deleted names and tenants; with `?dry_run=true`, only count it.

        The audit entry precedes the removal.
        """
        dry_run = read_flag(request, "dry_run")
        if not dry_run:
            await self._audit.add(request[ACTOR], "adapter.collect", "store", {})
        removed, num_bytes = await self._intake.collect(dry_run=dry_run)
        if not dry_run:
            await self._uploads.sweep()
        return json_response(Collection(removed=removed, bytes=num_bytes, dry_run=True if dry_run else UNSET))

    async def usage(self, request: web.Request) -> web.Response:
        """Report the usage of one tenant (`?tenant=`, also of a deleted one) or of all."""
        name = request.query.get("tenant")
        if name is not None:
            try:
                await self._tenants.get(name)
            except RecordNotFound:
                if not (TENANT_NAME.fullmatch(name) and await self._report.knows(name)):
                    raise
        return await usage_answer(request, self._report, self._currency, tenant=name)

    async def version(self, _: web.Request) -> web.Response:
        return json_response(GatewayVersion(version=version("loraplex")))

    async def queue(self, request: web.Request) -> web.Response:
        """Report the requests of the process that answers, and those that wait on the engines.

        Counters and shares are those of all processes.
        """
        capacity, engines = self._registry.capacity, EngineQueues(self._registry.up)
        total = engines.total(self._queues.waiting, self._queues.longest_wait)
        rows = sorted(self._queues.tenants().items(), key=lambda item: item[1].service)
        return json_response(
            QueueAnswer(
                **total.counts,
                waited=total.oldest,
                inside=self._queues.inside,
                places=capacity.ordered_places if capacity is not None else 0,
                data=[_describe(row, engines.of(tenant_id, row.waiting, row.waited)) for tenant_id, row in rows],
            )
        )

    async def _tenant(self, request: web.Request) -> Tenant:
        return await self._tenants.get(request.match_info["tenant"])


def _describe(row: TenantPlaces, waits: Waits) -> Any:
    return QueuedTenant(**row._asdict() | waits.counts | {"waited": waits.oldest})
