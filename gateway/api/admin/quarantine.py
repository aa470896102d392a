"""`/admin/api/quarantine`: requests, adapters and tenants in quarantine, and its end for a tenant."""

import logging
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Literal, cast

from aiohttp import web
from msgspec import Struct

from gateway.api.requests.fields import json_response, read_limit
from gateway.api.scopes import ACTOR
from gateway.errors import Unavailable
from gateway.fleet.failures.deaths import QuarantinePeriod
from gateway.fleet.failures.quarantine import Quarantine
from gateway.process.background import run_to_end
from gateway.records.audit import Audit
from gateway.records.bases.base import suspect_digest
from gateway.records.tenants.tenants import Tenant, Tenants
from wire.digests import digest_name

log = logging.getLogger(__name__)

Kind = Literal["request", "adapter", "tenant"]
DEFAULT_ROWS, MAX_ROWS = 100, 1000


class ShownQuarantine(Struct, frozen=True, kw_only=True):
    """A request, an adapter or a whole tenant in quarantine.

    tenant: its name; null if the tenant is deleted or the database is unavailable. adapter: the adapter's digest.
    engines: the engines that died. A request has no text, because gateways keep none.
    """

    object: Literal["quarantine"] = "quarantine"
    kind: Kind
    tenant: str | None
    tenant_id: str
    adapter: str | None
    engines: list[str]
    began_at: datetime
    ends_at: datetime


class QuarantineList(Struct, frozen=True, kw_only=True):
    """Newest quarantines that the process which answers knows. has_more: whether there are older ones."""

    object: Literal["list"] = "list"
    data: list[ShownQuarantine]
    has_more: bool


class EndedQuarantine(Struct, frozen=True, kw_only=True):
    """End of a tenant's quarantine. ended: number of its entries; without any, evidence is forgotten all the same."""

    object: Literal["tenant.quarantine"] = "tenant.quarantine"
    tenant: str
    ended: int


class AdminQuarantine:
    """Operator's routes for the quarantine. Its end takes effect without an audit entry if SQL becomes unavailable."""

    def __init__(self, *, quarantine: Quarantine, tenants: Tenants, audit: Audit) -> None:
        self._quarantine = quarantine
        self._tenants = tenants
        self._audit = audit

    async def list(self, request: web.Request) -> web.Response:
        """List what is in quarantine, of all tenants or of `?tenant=`, the newest first."""
        limit, name = read_limit(request, DEFAULT_ROWS, MAX_ROWS), request.query.get("tenant")
        tenant_id = None if name is None else (await self._tenants.get(name)).id
        found = sorted(self._quarantine.quarantines(tenant_id), key=lambda period: -period.began)
        shown = found[:limit]
        names = await self._names({period.suspect.tenant_id for period in shown})
        data = [self._describe(period, names) for period in shown]
        return json_response(QuarantineList(data=data, has_more=len(found) > limit))

    async def end(self, request: web.Request) -> web.Response:
        """End a tenant's quarantine at all gateways, and forget the deaths that would begin it again."""
        tenant = await self._tenants.get(request.match_info["tenant"])
        ended = await run_to_end(self._end(tenant, request[ACTOR]))
        return json_response(EndedQuarantine(tenant=tenant.name, ended=ended))

    async def _end(self, tenant: Tenant, actor: str) -> int:
        found = await self._quarantine.clear_tenant(tenant.id)
        try:
            await self._audit.add(actor, "quarantine.end", tenant.name, {"ended": len(found)}, tenant=tenant.name)
        except Unavailable:
            log.warning("quarantine.end of %s by %s is not in the audit: the database is unavailable", tenant.id, actor)
        return len(found)

    async def _names(self, ids: set[str]) -> Mapping[str, str]:
        """Return the names of tenants by id; none while the database is unavailable."""
        try:
            return await self._tenants.names(ids) if ids else {}
        except Unavailable:
            return {}

    def _describe(self, period: QuarantinePeriod, names: Mapping[str, str]) -> ShownQuarantine:
        kind, tenant_id, mark = period.suspect
        now = datetime.now(UTC)
        return ShownQuarantine(
            kind=cast(Kind, kind),
            tenant=names.get(tenant_id),
            tenant_id=tenant_id,
            adapter=digest_name(suspect_digest(mark)) if kind == "adapter" else None,
            engines=sorted({death.engine for death in period.deaths}),
            began_at=now - timedelta(seconds=self._quarantine.age(period.began)),
            ends_at=now - timedelta(seconds=self._quarantine.age(period.ends)),
        )
