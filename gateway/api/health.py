"""`/healthz`, `/readyz`, `/metrics` and `/openapi.json`: for whoever runs the gateway, not for its tenants."""

import asyncio

from aiohttp import web

from gateway.admission.auth import Authenticator
from gateway.admission.quota import Quota
from gateway.api.bodies import json_response
from gateway.api.description import gateway_description
from gateway.drain import Drain
from gateway.errors import GatewayError
from gateway.fleet.registry import Registry
from gateway.metrics import CONTENT_TYPE, Metrics
from gateway.records.database import Database
from gateway.records.ledger import Ledger

# A probe waits no longer than this for any part.
PROBE_SECONDS = 2.0


class Health:
    """The tokenizer was loaded before the gateway listened, so it is ready whenever this answers."""

    def __init__(self, *, database: Database, quota: Quota, ledger: Ledger, registry: Registry, drain: Drain) -> None:
        self._drain = drain
        self._database = database
        self._quota = quota
        self._ledger = ledger
        self._registry = registry

    async def describe(self, _: web.Request) -> web.Response:
        return json_response(gateway_description())

    async def live(self, _: web.Request) -> web.Response:
        return json_response({"status": "ok"})

    async def ready(self, _: web.Request) -> web.Response:
        """200 if requests can be served, 503 if not; each part's state either way."""
        database, redis = await asyncio.gather(self._probe(self._database), self._probe(self._quota))
        up = len(self._registry.healthy)
        parts = {
            "database": database,
            "redis": redis,
            "quota": self._quota_state(redis),
            "redis_settings": self._quota.store_warnings,
            "engines": "ok" if up else "; ".join(self._registry.problems) or "none is up",
            "tokenizer": "ok",
            "ledger": "ok" if self._ledger.has_room else "full",
            "process": "stopping" if self._drain.begun else "ok",
        }
        # Requests are served without Redis where the operator chose that.
        needed = {name: state for name, state in parts.items() if name != "redis"}
        ready = all(state == "ok" or state.startswith("ok: ") for state in needed.values())
        body = {
            "status": "ready" if ready else "not ready",
            "parts": parts,
            "engines_up": up,
            "engine_problems": self._registry.problems,
        }
        return json_response(body, status=200 if ready else 503)

    def _quota_state(self, redis: str) -> str:
        if redis == "ok":
            return "ok"
        modes = ", ".join(f"{name} {mode}" for name, mode in self._quota.fallback.items())
        return f"unavailable: {modes}" if self._quota.is_closed_without else f"ok: without redis, {modes}"

    async def _probe(self, part: Database | Quota) -> str:
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                await part.ping()
        except (GatewayError, TimeoutError):
            return "unavailable"
        return "ok"


class MetricsPage:
    """auth None: on the operators' own port, open to whoever reaches it. Else for admin keys."""

    def __init__(self, metrics: Metrics, auth: Authenticator | None) -> None:
        self._metrics = metrics
        self._auth = auth

    async def get(self, request: web.Request) -> web.Response:
        if self._auth is not None:
            await self._auth.admin(request.headers.get("Authorization"))
        return web.Response(body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})
