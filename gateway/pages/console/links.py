"""URLs of the console's pages, for links from a record."""

from aiohttp import web

from gateway.api.scopes import PRINCIPAL
from gateway.pages.widgets.links import Links

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
