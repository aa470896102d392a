"""Quarantine: a request that two engines had when they died is not given to a third.

Any of the requests that an engine has when it dies may be the cause. So a request, or a tenant's adapter, is
quarantined only if no other tenant had requests on the engine at each of the deaths. A tenant's requests can therefore
never put another tenant's into quarantine. Only an HMAC of a request is kept, under this process's own key.
"""

import hashlib
import hmac
import logging
import math
import os
import time
from collections.abc import Callable
from typing import Any

import msgspec

from gateway.errors import GatewayError
from gateway.fleet.registry import EngineRecord

log = logging.getLogger(__name__)

# Deaths until a request, or an adapter with any requests, is quarantined.
DEATHS = {"request": 2, "adapter": 3}
# Broken connections to an engine within this time (seconds) count as a single death.
ONE_DEATH_SECONDS = 2.0
# Fields that may differ between retries and do not change the computation.
VOLATILE = ("user", "metadata", "store", "prompt_cache_key", "safety_identifier", "stream", "stream_options")
# Stands for the tenants of other gateways' requests, which this process does not know.
UNKNOWN_TENANTS = "?"
MAX_SUSPECTS = 10_000

Key = tuple[str, str, bytes]
"""Kind, tenant id, and the request's HMAC or the adapter's digest."""


class Quarantined(GatewayError):
    """Engines died repeatedly with this request or this adapter."""

    status, kind, code = 422, "invalid_request_error", "request_quarantined"

    def __init__(self, what: str, seconds: float) -> None:
        super().__init__(
            f"Engines ended while they worked on this {what}; it is not tried again for {math.ceil(seconds)} s.",
            headers={"Retry-After": str(math.ceil(seconds))},
        )


class Death(msgspec.Struct, frozen=True):
    """An engine's death, and the tenants whose requests it had."""

    at: float
    tenants: frozenset[str]


class Quarantine:
    """seconds: how long a death is remembered and a quarantine lasts. count: called with the kind of each new
    quarantine.
    """

    def __init__(
        self,
        seconds: float,
        count: Callable[[str], None] = lambda kind: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds = seconds
        self._count = count
        self._clock = clock
        self._secret = os.urandom(32)
        self._last: dict[str, Death] = {}
        self._deaths: dict[Key, list[Death]] = {}
        self._until: dict[Key, float] = {}

    def check(self, tenant_id: str, digest: str | None, body: dict[str, Any]) -> None:
        """Raise Quarantined for a request or an adapter in quarantine."""
        if not self._until:
            return
        now = self._clock()
        self._until = {key: until for key, until in self._until.items() if until > now}
        for key in self._keys(tenant_id, digest, body) if self._until else ():
            if (until := self._until.get(key)) is not None:
                raise Quarantined(key[0], until - now)

    def died(self, engine: EngineRecord, tenant_id: str, digest: str | None, body: dict[str, Any]) -> None:
        """Note that an engine died with this request."""
        death = self._death(engine, tenant_id)
        recent = death.at - self._seconds
        for key in self._keys(tenant_id, digest, body):
            deaths = [known for known in self._deaths.pop(key, []) if known.at > recent and known != death]
            # The newest last, so that the oldest is forgotten first.
            self._deaths[key] = [*deaths, death]
            if len(self._deaths[key]) >= DEATHS[key[0]] and self._is_alone(key, self._deaths[key]):
                self._until[key] = death.at + self._seconds
                self._count(key[0])
                log.error("quarantine: a tenant's %s was with %d engines that died: tenant %s", *_said(key, deaths))
        while len(self._deaths) > MAX_SUSPECTS:
            del self._deaths[next(iter(self._deaths))]

    def _death(self, engine: EngineRecord, tenant_id: str) -> Death:
        now = self._clock()
        last = self._last.get(engine.url)
        if last is not None and now - last.at < ONE_DEATH_SECONDS:
            return last
        unknown = {UNKNOWN_TENANTS} if engine.others else set()
        death = self._last[engine.url] = Death(now, frozenset(engine.tenants) | {tenant_id} | unknown)
        return death

    def _is_alone(self, key: Key, deaths: list[Death]) -> bool:
        return frozenset.intersection(*(death.tenants for death in deaths)) == {key[1]}

    def _keys(self, tenant_id: str, digest: str | None, body: dict[str, Any]) -> list[Key]:
        lasting = {name: value for name, value in sorted(body.items()) if name not in VOLATILE}
        message = msgspec.json.encode([tenant_id, digest, lasting])
        keys = [("request", tenant_id, hmac.digest(self._secret, message, hashlib.sha256))]
        return keys if digest is None else [*keys, ("adapter", tenant_id, digest.encode())]


def _said(key: Key, before: list[Death]) -> tuple[str, int, str]:
    return key[0], len(before) + 1, key[1]
