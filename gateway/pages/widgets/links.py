"""URLs of other pages, for links from a record to the tenants, adapters and requests in it.

A URL is None if this gateway does not serve the page.
"""

from collections.abc import Mapping
from urllib.parse import quote, urlencode

from aiohttp import web

from gateway.records.requests.log import LogEntry

TENANT, ADAPTER = "/admin/tenants/{tenant}", "/admin/tenants/{tenant}/adapters/{name}"
ADAPTERS, ENGINE, KEYS, REQUESTS, REFUSALS, USAGE = (
    *("/admin/adapters", "/admin/engines/one", "/admin/keys"),
    *("/admin/requests", "/admin/refusals", "/admin/usage"),
)


class Links:
    """URLs of the pages that the request's application serves."""

    requests_path = REQUESTS

    def __init__(self, request: web.Request) -> None:
        self._served = {resource.canonical for resource in request.app.router.resources()}

    def tenant(self, name: str) -> str | None:
        return self._url(TENANT, tenant=name) if name else None

    def adapter(self, tenant: str, name: str) -> str | None:
        """Return the page of the adapter, or the list of adapters with only this name."""
        return self._url(ADAPTER, tenant=tenant, name=name) or self._with(ADAPTERS, {"tenant": tenant, "q": name})

    def model(self, entry: LogEntry) -> str | None:
        """Return the page of the request's adapter; None for base models and mixtures."""
        return self.adapter(entry.tenant, entry.model) if entry.version is not None and entry.model else None

    def engine(self, url: str | None) -> str | None:
        return self._with(ENGINE, {"url": url}) if url else None

    def key(self, key_id: str) -> str | None:
        return self._with(KEYS, {"q": key_id}) if key_id else None

    def request(self, request_id: str) -> str:
        return f"{self.requests_path}/{quote(request_id, safe='')}"

    def requests(self, **query: str | int | None) -> str:
        """Return the URL of the request log with these filters."""
        return self._query(self.requests_path, query)

    def refusals(self, **query: str | int | None) -> str:
        return self._query(REFUSALS, query)

    def usage(self, **query: str | int | None) -> str:
        return self._query(USAGE, query)

    def _url(self, pattern: str, **names: str) -> str | None:
        if pattern not in self._served:
            return None
        for name, value in names.items():
            pattern = pattern.replace(f"{{{name}}}", quote(value, safe=""))
        return pattern

    def _with(self, path: str, query: Mapping[str, str]) -> str | None:
        return self._query(path, query) if path in self._served else None

    def _query(self, path: str, query: Mapping[str, str | int | None]) -> str:
        given = {name: value for name, value in query.items() if value not in (None, "")}
        return f"{path}?{urlencode(given)}" if given else path
