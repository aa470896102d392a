"""Routes of probes: the result of a version's probe, and another one."""

import math
from datetime import datetime
from typing import Any, Literal

from aiohttp import web
from msgspec import Struct

from gateway.api.adapters.caller import find_caller, version_of
from gateway.api.requests.fields import json_response
from gateway.api.uploads.validating import Validation
from gateway.errors import Forbidden
from gateway.quota.quota import Quota
from gateway.records.adapters.probes import Probes
from gateway.records.tenants.tenants import Tenants
from wire.digests import digest_name
from wire.probes import AdapterProbe, ProbeReason

# Relative difference of two measurements that counts as a change: engines with other kernels round differently.
TOLERANCE = 0.05


class _ShownProbe(Struct, frozen=True, kw_only=True):
    object: Literal["adapter.probe"] = "adapter.probe"
    name: str
    version: int
    engine_version: str | None
    base: str | None
    digest: str
    rank: int
    modules: int
    host_bytes: int
    device_bytes: int
    device_pages: int
    largest_difference: float | None
    divergence: float | None
    reasons: tuple[ProbeReason, ...]


class RecordedProbe(_ShownProbe, frozen=True, kw_only=True):
    """The newest probe of a version. base: digest of the engine's weights; bound_to: that of the version's.

    largest_difference: the largest difference of a logit of the next token from the base model's. divergence: the
    divergence of the next token's distribution from the base model's, in nats. Both are null if a score is not finite.
    """

    probed_at: datetime
    bound_to: str | None


class ProbeChange(Struct, frozen=True, kw_only=True):
    """A field of a probe that differs from the newest one on record."""

    field: str
    before: str | float | tuple[ProbeReason, ...] | None
    now: str | float | tuple[ProbeReason, ...] | None


class NewProbe(_ShownProbe, frozen=True, kw_only=True):
    """Another probe of a version, as in RecordedProbe, with its changes since the newest one on record."""

    changes: list[ProbeChange]


class ProbeRoutes:
    """Routes for tenants and, under `/admin/api`, for operators."""

    def __init__(self, tenants: Tenants, probes: Probes, validation: Validation, quota: Quota) -> None:
        self._validation = validation
        self._quota = quota
        self._tenants = tenants
        self._probes = probes

    async def get(self, request: web.Request) -> web.Response:
        """Return the newest probe of a version, and the base model that the version is bound to."""
        caller = await find_caller(request, self._tenants)
        name, number = request.match_info["name"], version_of(request)
        found = await self._probes.get(caller.tenant, name, number)
        bound_to, fields = _base(found.base_digest), _fields(name, number, found.probe)
        return json_response(RecordedProbe(**fields, probed_at=found.probed_at, bound_to=bound_to))

    async def verify(self, request: web.Request) -> web.Response:
        """Probe a version again, and return the result with its changes since the newest probe on record.

        The state stays as it is. A version without a probe gets its first one. An operator may name the engine. Raises
        Unavailable if no engine can probe it now.
        """
        caller = await find_caller(request, self._tenants)
        name, number = request.match_info["name"], version_of(request)
        await caller.count_change(request, self._quota)
        engine = request.query.get("engine")
        if engine is not None and caller.principal is not None:
            raise Forbidden("engine: only an operator names an engine.", param="engine")
        before, now = await self._validation.verify(caller.tenant, name, number, engine)
        found = [] if before is None else changes(before, now)
        return json_response(NewProbe(**_fields(name, number, now), changes=found))


def changes(before: AdapterProbe, now: AdapterProbe) -> list[ProbeChange]:
    """Return the fields of a probe that differ by more than TOLERANCE, with both values."""
    found = []
    for field in ("base_digest", "engine_version", "reasons", "largest_difference", "divergence"):
        old, new = getattr(before, field), getattr(now, field)
        if isinstance(old, float) and isinstance(new, float) and math.isclose(old, new, rel_tol=TOLERANCE):
            continue
        if old != new:
            found.append(ProbeChange(field="base" if field == "base_digest" else field, before=old, now=new))
    return found


def _fields(name: str, version: int, probe: AdapterProbe) -> dict[str, Any]:
    return {
        "name": name,
        "version": version,
        "engine_version": probe.engine_version,
        "base": _base(probe.base_digest),
        "digest": probe.digest,
        "rank": probe.rank,
        "modules": probe.num_modules,
        "host_bytes": probe.host_bytes,
        "device_bytes": probe.device_bytes,
        "device_pages": probe.device_pages,
        "largest_difference": probe.largest_difference,
        "divergence": probe.divergence,
        "reasons": probe.reasons,
    }


def _base(digest: str | None) -> str | None:
    return None if digest is None else digest_name(digest)
