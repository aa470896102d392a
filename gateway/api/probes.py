"""Routes of probes: the result of a version's probe, and the base models to which versions are bound."""

from collections import defaultdict
from typing import Any

from aiohttp import web

from gateway.access.scopes import PRINCIPAL
from gateway.api.requests.fields import json_response
from gateway.fleet.registry import Registry
from gateway.records.adapter_rows import unknown_version
from gateway.records.probes import Probes
from gateway.records.tenants import Tenant, Tenants
from wire.digests import digest_name
from wire.model_names import parse_reference, version_name


class ProbeRoutes:
    """Routes for tenants and, under `/admin/api`, for operators."""

    def __init__(self, tenants: Tenants, probes: Probes, registry: Registry) -> None:
        self._tenants = tenants
        self._probes = probes
        self._registry = registry

    async def get(self, request: web.Request) -> web.Response:
        """Return the newest probe of a version."""
        tenant, name = await self._tenant(request), request.match_info["name"]
        reference = parse_reference(f"a@{request.match_info['version']}")
        if reference is None or reference.version is None:
            raise unknown_version()
        at, probe = await self._probes.get(tenant, name, reference.version)
        return json_response(
            {
                "object": "adapter.probe",
                "name": name,
                "version": reference.version,
                "probed_at": at,
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
        )

    async def bases(self, _: web.Request) -> web.Response:
        """List the base models, with the engines that serve each and the versions that were probed on it."""
        engines, versions = defaultdict(list), defaultdict(list)
        for engine in self._registry.up:
            engines[engine.state.base_digest].append(engine.url)
        for bound in await self._probes.bound():
            name = f"{bound.tenant}/{version_name(bound.name, bound.version)}"
            versions[bound.base_digest].append({"name": name, "state": bound.state})
        known = sorted({*versions, *(digest for digest in engines if digest is not None)})
        data = [
            {
                "object": "base",
                "digest": _base(digest),
                "engines": sorted(engines[digest]),
                "versions": versions[digest],
            }
            for digest in known
        ]
        return json_response({"object": "list", "data": data})

    async def _tenant(self, request: web.Request) -> Tenant:
        if (name := request.match_info.get("tenant")) is not None:
            return await self._tenants.get(name)
        principal = request[PRINCIPAL]
        principal.check_model(request.match_info["name"])
        tenant: Tenant = principal.tenant
        return tenant


def _base(digest: str | None) -> Any:
    return None if digest is None else digest_name(digest)
