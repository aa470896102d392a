"""URLs of the console's pages, for links from a record, and the address under which the visitor reaches the API."""

from collections.abc import Iterable

from aiohttp import web

from gateway.access.auth import TenantPrincipal
from gateway.access.caller import CALLER
from gateway.access.scopes import PRINCIPAL
from gateway.pages.parts.links import Links

ADAPTER = "/console/adapters/{name}"
KEYS, REQUESTS = "/console/keys", "/console/requests"


class ConsoleLinks(Links):
    """URLs of the pages that the session may open. Pages about engines and other tenants have none."""

    requests_path = REQUESTS

    def __init__(self, request: web.Request) -> None:
        super().__init__(request)
        self._scopes = request[PRINCIPAL].scopes

    def tenant(self, name: str) -> str | None:
        return None

    def adapter(self, tenant: str, name: str) -> str | None:
        return self._url(ADAPTER, name=name) if "adapters" in self._scopes else None

    def engine(self, url: str | None) -> str | None:
        return None

    def key(self, key_id: str) -> str | None:
        return self._with(KEYS, {"q": key_id}) if key_id and "keys" in self._scopes else None

    def refusals(self, **query: str | int | None) -> str:
        return self._query(REQUESTS, {"status": "not_admitted"})


def origin(request: web.Request) -> str:
    """Return the scheme and host under which the visitor's browser reaches this gateway."""
    caller = CALLER.get()
    scheme = "https" if caller is not None and caller.is_https else "http"
    return f"{scheme}://{request.host}"


def example_models(names: Iterable[str], principal: TenantPrincipal, base_names: Iterable[str]) -> list[str]:
    """Return the models for examples that the key may use: adapters first, then base models."""
    return [name for name in (*names, *base_names) if principal.may_use(name)]
