"""`/healthz` and `/readyz`, which need no key, and `/metrics`."""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from typing import Literal

from aiohttp import web
from msgspec import Struct

from gateway.api.requests.fields import json_response, read_flag
from gateway.billing.ledger import Ledger
from gateway.errors import GatewayError
from gateway.fleet.discovery.registry import Registry
from gateway.metrics import CONTENT_TYPE, Metrics
from gateway.process.admin_port import is_admin_port
from gateway.process.background import running
from gateway.process.drain import Drain
from gateway.process.store_probe import StoreProbe
from gateway.quota.quota import Quota
from gateway.records.caches.lookups import Lookups
from gateway.records.sql.database import Database
from gateway.settings import Settings

# Time-out for the probe of a part.
PROBE_SECONDS = 2.0
# Period of the probes that keep the metrics current; `/readyz` probes as well.
LOOK_SECONDS = 1.0
# Parts whose fault always means not ready: the process drains, or `LORAPLEX_REDIS_CHECK` is `refuse`.
ALWAYS_NEEDED = {"process", "redis_settings"}
# Parts without which other requests are served: those for base models, and for adapters that engines have loaded.
PARTLY_NEEDED = {"adapter_store"}
NO_ENGINE = "none is up: the log, the dashboard and GET /admin/api/engines have the reason for each"
NO_ENGINE_KNOWN = "none is known: LORAPLEX_ENGINES lists none that resolves, and no engine has announced itself"


class State(Struct, frozen=True):
    """The state of a part: "ok", "ok: ..." or its fault. since: the time of the last change between ok and fault."""

    text: str
    since: datetime

    @property
    def ok(self) -> bool:
        return self.text == "ok" or self.text.startswith("ok: ")


class Live(Struct, frozen=True, kw_only=True):
    status: Literal["ok"] = "ok"


class Readiness(Struct, frozen=True, kw_only=True):
    """State of the gateway.

    parts: "ok", "ok: ..." or the fault.
    since: start of each fault, by part.
    engine_problems: problems of engines without requests.
    """

    status: Literal["ready", "degraded", "not ready"]
    parts: dict[str, str]
    since: dict[str, datetime]
    engines_up: int
    engine_problems: list[str]


class HealthRoutes:
    """Routes for liveness and readiness. `tokenizer` is always "ok": it is loaded before the gateway listens.

    With the readiness `degraded` a gateway stays in its load balancer while its shared dependencies are unavailable:
    clients get 503 with Retry-After instead of refused connections, and the admin API and the dashboard stay reachable.
    If the operators have a port of their own, only there `/readyz` has engines' addresses and the reasons of their
    faults.
    """

    def __init__(
        self,
        *,
        database: Database,
        quota: Quota,
        ledger: Ledger,
        registry: Registry,
        drain: Drain,
        metrics: Metrics,
        store: StoreProbe,
        settings: Settings,
    ) -> None:
        self._admin_port = settings.admin_port
        self._drain = drain
        self._database = database
        self._quota = quota
        self._ledger = ledger
        self._registry = registry
        self._metrics = metrics
        self._store = store
        self._degraded_is_ready = settings.readiness == "degraded"
        self._states: dict[str, State] = {}
        # Concurrent requests share one probe of each part.
        self._looks: Lookups[None, None] = Lookups(self._look)

    @property
    def states(self) -> Mapping[str, State]:
        """Return the states of the parts as the last probe found them."""
        return self._states

    async def live(self, _: web.Request) -> web.Response:
        return json_response(Live())

    async def ready(self, request: web.Request) -> web.Response:
        """Answer 200 if the gateway should receive requests, else 503, with each part's state.

        `?strict=true` answers 503 while any part that requests need is away.
        """
        strict = read_flag(request, "strict") or not self._degraded_is_ready
        await self._looks.get(None)
        # `LORAPLEX_QUOTA_FALLBACK` may serve requests without Redis.
        faulty = [name for name, state in self._states.items() if not state.ok and name != "redis"]
        needed = {name for name in faulty if name not in PARTLY_NEEDED}
        ready = not needed or not (strict or ALWAYS_NEEDED & needed)
        body = Readiness(
            status=("degraded" if faulty else "ready") if ready else "not ready",
            parts={name: state.text for name, state in self._states.items()},
            since={name: state.since for name, state in self._states.items() if not state.ok},
            engines_up=len(self._registry.up),
            engine_problems=self._faults(is_operators=is_admin_port(request, self._admin_port)),
        )
        return json_response(body, status=200 if ready else 503)

    async def watching(self, _: web.Application) -> AsyncIterator[None]:
        """Probe the parts periodically for the metrics while the application runs."""
        async with running(self._watch()):
            yield
        await self._looks.close()
        await self._store.close()

    async def _watch(self) -> None:
        while True:
            await self._looks.get(None)
            await asyncio.sleep(LOOK_SECONDS)

    async def _look(self, _: None) -> None:
        database, redis, store = await asyncio.gather(
            self._probe(self._database), self._probe(self._quota), self._store.state(PROBE_SECONDS)
        )
        texts = {
            "database": database,
            "redis": redis,
            "quota": self._quota_state(redis),
            "redis_settings": self._quota.store_warnings,
            "engines": self._engines_state(),
            "tokenizer": "ok",
            "adapter_store": store,
            "ledger": "ok" if self._ledger.has_room else "full",
            "process": "stopping" if self._drain.begun else "ok",
        }
        now = datetime.now(UTC)
        for name, text in texts.items():
            before, state = self._states.get(name), State(text, now)
            if before is not None and before.ok == state.ok:
                state = State(text, before.since)
            self._states[name] = state
            self._metrics.part_up(name, state.ok)

    def _faults(self, *, is_operators: bool) -> list[str]:
        """Return the state of each engine that gets no requests.

        is_operators: add its address and the reason, which help an attacker. Clients need no key for this route.
        """
        faults = self._registry.faults
        if is_operators:
            return [f"{url} is {why}" for url, why in faults.items()]
        return sorted(re.split("[:,]", why)[0] for why in faults.values())

    def _engines_state(self) -> str:
        if any(engine.drained is None for engine in self._registry.up) or self._registry.is_asleep:
            return "ok"
        return NO_ENGINE if self._registry.engines else NO_ENGINE_KNOWN

    def _quota_state(self, redis: str) -> str:
        if redis == "ok":
            return "ok"
        modes = ", ".join(f"{name} {mode}" for name, mode in self._quota.fallback.items())
        return f"unavailable: {modes}" if self._quota.is_closed_without_redis else f"ok: without redis, {modes}"

    async def _probe(self, part: Database | Quota) -> str:
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                await part.ping()
        except (GatewayError, TimeoutError):
            return "unavailable"
        return "ok"


class MetricsPage:
    """Route for Prometheus. The operators' own port serves it without a key."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    async def get(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})
