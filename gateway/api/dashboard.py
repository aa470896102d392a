"""`/admin/`: the status page. It is read-only and rendered here, without scripts, so there is nothing to forge.

The browser's own dialog asks for the admin key (HTTP Basic, any user name). No cookie is set, and the JSON routes
accept a Bearer key only, so a request that a browser makes by itself cannot change anything.
"""

from datetime import UTC, datetime, timedelta
from importlib import resources
from typing import Any

import jinja2
from aiohttp import web

from gateway.access.auth import Authenticator
from gateway.access.credentials import basic_password
from gateway.errors import BadRequest, Forbidden, InvalidKey, Unavailable
from gateway.fleet.registry import Registry
from gateway.quota.kinds import REQUEST_KINDS
from gateway.records.catalog import Catalog
from gateway.records.prices import format_money
from gateway.records.tenants import Tenants
from gateway.records.usage_report import UsageReport

RECENT_ROWS = 50
# Bounded, because a tenant decides how many models it uses.
USAGE_ROWS = 500
REFRESH_SECONDS = 15
PERIODS = {
    "hour": timedelta(hours=1),
    "day": timedelta(days=1),
    "week": timedelta(days=7),
    "month": timedelta(days=30),
    "all": None,
}
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
ASK = {"WWW-Authenticate": 'Basic realm="Loraplex admin key", charset="UTF-8"', **PAGE_HEADERS}


class Dashboard:
    """Routes for the page and its style. While the database is away, the page shows the engines only."""

    def __init__(
        self, *, auth: Authenticator, tenants: Tenants, catalog: Catalog, report: UsageReport, registry: Registry
    ) -> None:
        self._auth = auth
        self._tenants = tenants
        self._catalog = catalog
        self._report = report
        self._registry = registry
        environment = jinja2.Environment(
            loader=jinja2.PackageLoader("gateway.api"), autoescape=True, undefined=jinja2.StrictUndefined
        )
        environment.filters["money"] = format_money
        environment.globals["kinds"] = [kind for kind in REQUEST_KINDS if kind.takes != "cost"]
        self._template = environment.get_template("status.html")
        self._style = resources.files("gateway.api").joinpath("static/style.css").read_text("utf-8")

    async def page(self, request: web.Request) -> web.Response:
        try:
            await self._auth.admin_key(_basic_password(request.headers.get("Authorization")))
        except InvalidKey as error:
            error.headers.update(ASK)
            raise
        except Forbidden as error:
            # 401 as well: after a 403 the browser would keep sending the key, which is not an admin key.
            refused = InvalidKey("An admin key is needed.")
            refused.headers.update(ASK)
            raise refused from error
        period, now = request.query.get("period", "day"), datetime.now(UTC)
        if period not in PERIODS:
            raise BadRequest(f"period: expected one of {', '.join(PERIODS)}.", param="period")
        try:
            records = await self._records(PERIODS[period], now)
        except Unavailable as error:
            records = {"missing": error.message}
        html = self._template.render(
            now=now,
            refresh=REFRESH_SECONDS,
            periods=list(PERIODS),
            period=period,
            engines=self._registry.engines,
            **records,
        )
        return web.Response(text=html, content_type="text/html", headers=PAGE_HEADERS)

    async def _records(self, length: timedelta | None, now: datetime) -> dict[str, Any]:
        """Return the page's data from the database. Raises Unavailable."""
        month = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
        return {
            "missing": None,
            "tenants": await self._tenants.list(),
            "adapters": await self._catalog.by_tenant(),
            "spent": {sums.tenant: sums.cost for sums in await self._report.sums((), since=month) if not sums.deleted},
            "usage": await self._report.page(since=None if length is None else now - length, limit=USAGE_ROWS),
            "recent": await self._report.recent(limit=RECENT_ROWS),
        }

    async def redirect(self, _: web.Request) -> web.Response:
        """Redirect `/admin` to the page, whose links are relative to `/admin/`."""
        return web.Response(status=308, headers={"Location": "/admin/"})

    async def style(self, _: web.Request) -> web.Response:
        return web.Response(text=self._style, content_type="text/css", headers={"X-Content-Type-Options": "nosniff"})


def _basic_password(authorization: str | None) -> str:
    scheme, _, encoded = (authorization or "").partition(" ")
    if scheme.lower() != "basic":
        raise InvalidKey("An admin key is needed.")
    password = basic_password(encoded)
    if password is None:
        raise InvalidKey
    return password
