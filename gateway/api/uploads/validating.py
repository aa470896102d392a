"""Probe of each new version before it is ready: at once after its upload, and again until an engine has answered."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Literal

import msgspec

from gateway.errors import BadRequest, RecordNotFound, Unavailable
from gateway.fleet.adapter_probes import AdapterProber, AdapterRefused, NotProbed
from gateway.fleet.failures.quarantine import Quarantined
from gateway.process.background import running
from gateway.records.adapters.catalog import Adapter, Catalog
from gateway.records.adapters.probes import Probes, Unprobed
from gateway.records.adapters.rows import Reason
from gateway.records.bases.base import Binding
from gateway.records.caches.cached_query import CachedQuery
from gateway.records.tenants.tenants import Tenant, Tenants
from gateway.records.version_state import READY, State
from gateway.redis.errors import REDIS_ERRORS
from gateway.redis.keys import probe_key
from gateway.redis.sweeps import Client, is_first
from gateway.sharing.concurrency import ConcurrencyLimiter
from wire.probes import AdapterProbe

log = logging.getLogger(__name__)

Mode = Literal["auto", "required", "off"]
# Probes of one process at once. Each tenant has one at a time. A probe holds its place while it waits in the engine, up
# to 60 s for a heavy tenant, and the engine computes one at a time anyway. Routing counts each as a request.
PROBES_AT_ONCE = 16
# Pause between searches for versions without a probe, and time after which another process may try one again. It is
# longer than a probe.
SEARCH_SECONDS, CLAIM_SECONDS = 2.0, 90.0
# Time for which an upload's response waits for the probe.
WAIT_SECONDS = 20.0
ACTOR = "probe"


class ProbeRefused(BadRequest):
    """The uploaded adapter failed its probe; it is on record as a rejected version."""

    def __init__(self, reasons: tuple[Reason, ...]) -> None:
        text = "; ".join(reason.message for reason in reasons)
        super().__init__(f"The adapter was refused: {text}.", param="file", code=reasons[0].code)


def _unavailable(error: NotProbed) -> Unavailable:
    """Return the tenant's error for an adapter that is not probed now. A quarantine says when it ends."""
    cause = error.__cause__
    seconds = int(cause.headers["Retry-After"]) if isinstance(cause, Quarantined) else 1
    return Unavailable(f"The adapter cannot be probed now: {str(error).rstrip('.')}.", retry_after=seconds)


class Validation:
    """Validator of versions.

    mode: `auto` probes while an engine that can probe is available, `required` always, `off` never. Without a probe a
    version is ready at once.
    """

    def __init__(
        self,
        catalog: Catalog,
        tenants: Tenants,
        probes: Probes,
        missing: CachedQuery[Sequence[Unprobed]],
        prober: AdapterProber,
        redis: Client,
        mode: Mode,
    ) -> None:
        """missing: `Probes.missing`."""
        self.catalog = catalog
        self._tenants = tenants
        self._probes = probes
        self._missing = missing
        self._prober = prober
        self._redis = redis
        self._mode = mode
        self._limiter = ConcurrencyLimiter(PROBES_AT_ONCE)
        self._running: dict[tuple[str, str, int], asyncio.Task[None]] = {}

    def first_state(self, base: str) -> State:
        """Return the initial state of a new version of a base model (its id): validating, or ready if probes are off,
        or if they are optional (`auto`) and no engine can probe.
        """
        if self._mode == "off" or (self._mode == "auto" and not self._prober.can_probe(base)):
            return READY
        return "validating"

    async def finish(self, tenant: Tenant, adapter: Adapter) -> Adapter:
        """Probe a validating version for at most WAIT_SECONDS, and return it with its new state.

        Raises ProbeRefused.
        """
        if adapter.state != "validating" or not self._prober.can_probe(adapter.base):
            return adapter
        await self._claim(tenant.id, adapter.name, adapter.version)
        task = self._begin(tenant, adapter)
        await asyncio.wait({task}, timeout=WAIT_SECONDS)
        try:
            found = await self.catalog.versions.get(tenant, adapter.name, adapter.version)
        except RecordNotFound:
            return adapter
        if found.state == "rejected":
            raise ProbeRefused(found.reasons)
        return msgspec.structs.replace(adapter, state=found.state)

    async def verify(
        self, tenant: Tenant, name: str, version: int, engine: str | None = None
    ) -> tuple[AdapterProbe | None, AdapterProbe]:
        """Probe a version again and keep the result. Return the previous result, if there is one, and the new one.

        engine: URL of the only engine to ask; its result is kept only if it serves the recorded base model, so that it
        does not bind the version to another one. Raises RecordNotFound, BadRequest for a version without content,
        ProbeRefused without a result, Unavailable.
        """
        found = await self.catalog.versions.get(tenant, name, version)
        if not found.digest or found.state == "deleted":
            raise BadRequest("version: the version has no content.", param="version")
        before, binding = None, await self._probes.binding(tenant, name, version)
        with suppress(RecordNotFound):
            before = (await self._probes.get(tenant, name, version)).probe
        async with self._limiter.place(tenant.id):
            try:
                now = await self._prober.probe(tenant, found.digest, binding, engine)
            except NotProbed as error:
                raise _unavailable(error) from error
            except AdapterRefused as refused:
                if refused.probe is None:
                    raise ProbeRefused(refused.reasons) from refused
                now = refused.probe
        if engine is not None and {now.base_digest} != (await self._probes.binding(tenant, name, version)).digests:
            return before, now
        if await self._probes.record(tenant, name, version, now):
            await self.catalog.rebound()
        return before, now

    async def running(self, _: object) -> AsyncIterator[None]:
        """Run `watch` while the application runs. Cancel the probes that still run when it stops."""
        async with running(self.watch()):
            yield
        await self.close()

    async def watch(self) -> None:
        """Probe versions that are still validating, such as those of a dead process, until cancelled."""
        while True:
            await asyncio.sleep(SEARCH_SECONDS)
            try:
                await self._search()
            except Unavailable as error:
                log.debug("versions without a probe could not be read: %s", error)
            except Exception:
                # The next search does not depend on this one.
                log.exception("versions without a probe could not be read")

    async def close(self) -> None:
        """Cancel the running probes; the versions stay validating."""
        tasks = [*self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _search(self) -> None:
        for found in await self._missing.get():
            if self._mode != "off" and not self._prober.can_probe(found.base):
                continue
            try:
                tenant = await self._tenants.get(found.tenant_name)
            except RecordNotFound:
                continue
            if self._mode == "off":
                # It was added before the probe was switched off.
                await self._set(tenant, found.name, found.version, READY)
                continue
            is_running = (tenant.id, found.name, found.version) in self._running
            if not is_running and await self._claim(tenant.id, found.name, found.version):
                self._begin(tenant, found)

    async def _claim(self, tenant_id: str, name: str, version: int) -> bool:
        """Return whether no process has tried the version recently. Without Redis this process tries it."""
        try:
            return await is_first(self._redis, probe_key(tenant_id, name, version), CLAIM_SECONDS)
        except REDIS_ERRORS:
            return True

    def _begin(self, tenant: Tenant, new: Adapter | Unprobed) -> "asyncio.Task[None]":
        key = (tenant.id, new.name, new.version)
        if key not in self._running:
            task = self._running[key] = asyncio.create_task(self._validate(tenant, new))
            task.add_done_callback(lambda done: self._end(key, done))
        return self._running[key]

    def _end(self, key: tuple[str, str, int], task: "asyncio.Task[None]") -> None:
        del self._running[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("version %d of an adapter could not be probed", key[2], exc_info=error)

    async def _validate(self, tenant: Tenant, new: Adapter | Unprobed) -> None:
        name, version = new.name, new.version
        async with self._limiter.place(tenant.id):
            try:
                base = self.catalog.bases.get(new.base)
                binding = Binding.of(new.base, None if base is None else base.digest)
                probe = await self._prober.probe(tenant, new.digest, binding)
            except NotProbed as error:
                log.info("an adapter of tenant %s stays validating: %s", tenant.id, error)
                return
            except AdapterRefused as refused:
                if refused.probe is not None:
                    await self._probes.record(tenant, name, version, refused.probe)
                await self._set(tenant, name, version, "rejected", refused.reasons)
                return
            await self._probes.record(tenant, name, version, probe)
            await self._set(tenant, name, version, READY)

    async def _set(
        self, tenant: Tenant, name: str, version: int, state: State, reasons: tuple[Reason, ...] = ()
    ) -> None:
        try:
            await self.catalog.versions.set_state(tenant, name, version, state, ACTOR, reasons)
        except (RecordNotFound, BadRequest):
            log.debug("version %d was deleted or validated during its probe", version)
