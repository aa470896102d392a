"""Subject of an adapter's page: its owner, its URLs, and whether the visitor may change it.

The same pages serve operators under `/admin/tenants/{tenant}/adapters` and tenants under `/console/adapters`.
"""

from typing import NamedTuple

from aiohttp import web

from gateway.access.sessions import VISITOR
from gateway.api.adapters.caller import AdapterCaller, find_caller
from gateway.errors import Forbidden
from gateway.records.tenants.tenants import Tenant, Tenants

ADMIN, CONSOLE = "/admin/tenants/{tenant}/adapters", "/console/adapters"
SCOPE = "adapters"


class PageAdapter(NamedTuple):
    """A tenant's adapter on a page. name: empty on pages without an adapter. may_change: whether the visitor may."""

    caller: AdapterCaller
    name: str
    may_change: bool

    @property
    def tenant(self) -> Tenant:
        return self.caller.tenant

    @property
    def is_operators(self) -> bool:
        return self.caller.principal is None

    @property
    def folder(self) -> str:
        """Return the URL below which the pages of the tenant's adapters are."""
        return ADMIN.format(tenant=self.tenant.name) if self.is_operators else CONSOLE

    @property
    def list(self) -> str:
        return f"/admin/adapters?tenant={self.tenant.name}" if self.is_operators else CONSOLE

    @property
    def home(self) -> str:
        """Return the URL of the adapter's page."""
        return f"{self.folder}/{self.name}"

    @property
    def upload(self) -> str:
        """Return the URL of the upload form."""
        return f"{self.folder.removesuffix('s')}-upload"

    @property
    def playground(self) -> str:
        return f"/admin/playground?tenant={self.tenant.name}" if self.is_operators else "/console/playground?"


async def find_adapter(request: web.Request, tenants: Tenants) -> PageAdapter:
    """Return the adapter of a page. Raises RecordNotFound, Forbidden for a key that may not see the adapter."""
    caller, visitor = await find_caller(request, tenants), request[VISITOR]
    if caller.principal is not None and SCOPE not in visitor.scopes:
        raise Forbidden(f"Your key does not have the '{SCOPE}' scope.")
    may_change = visitor.role == "operator" or caller.principal is not None
    return PageAdapter(caller, request.match_info.get("name", ""), may_change)
