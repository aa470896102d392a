"""Suspects of engines' deaths, and the requests that an ending process leaves on engines."""

from typing import NamedTuple

import msgspec


class Suspect(NamedTuple):
    """Something of a tenant that may be the cause of a death.

    kind: "request" (mark: its HMAC), "adapter" or "probe" (mark: the adapter's name in the quarantine), or "tenant"
    (all its requests; mark: "").
    """

    kind: str
    tenant_id: str
    mark: str


class OrphanedRequests(msgspec.Struct):
    """Requests that an ending process has left on an engine's instance, whose death may follow: tenants and names."""

    engine: str
    instance: str | None
    tenants: list[str]
    suspects: list[Suspect]
