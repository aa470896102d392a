"""Start and end of a gateway's parts, as contexts of the application that end in reverse order."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from datetime import UTC, datetime

from aiohttp import web

from gateway.build import Gateway
from gateway.errors import Conflict
from gateway.process.background import running
from gateway.records.keys.keys import Keys
from gateway.settings import OFF, Settings, SettingsError

log = logging.getLogger(__name__)

# Time limit for writing the last usage rows at shutdown, after the time limit of the running requests.
FLUSH_SECONDS = 20.0

Context = Callable[[web.Application], AsyncIterator[None]]


class Lifecycle:
    """Contexts of one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._resources = gateway.resources
        self._settings = gateway.resources.settings

    def contexts(self) -> Sequence[Context]:
        """Return the contexts in the order of their start. The accounts of requests end before the ledger."""
        parts = (
            self._templates,
            self._tracing,
            self._connections,
            self._schema,
            self._access,
            self._bases,
            self._prices,
            self._leases,
        )
        gateway = self._gateway
        others = (
            gateway.intake.run,
            gateway.intake.validation.running,
            gateway.upgrades.running,
            gateway.housekeeping.running,
            gateway.health.watching,
            gateway.alerts.outbox.running,
            gateway.alerts.watch.running,
            self._disks,
            self._compiled,
        )
        return (*parts, self._engines, self._usage, self._accounts, *others)

    async def _templates(self, _: web.Application) -> AsyncIterator[None]:
        """Compile the pages' templates during the start, so that no request blocks the event loop with it."""
        self._compiling = asyncio.create_task(asyncio.to_thread(self._gateway.frame.compile))
        yield

    async def _compiled(self, _: web.Application) -> AsyncIterator[None]:
        await self._compiling
        yield

    async def _tracing(self, _: web.Application) -> AsyncIterator[None]:
        yield
        if self._resources.tracing is not None:
            await asyncio.to_thread(self._resources.tracing.close)

    async def _connections(self, _: web.Application) -> AsyncIterator[None]:
        yield
        await self._resources.session.close()
        await self._resources.redis.aclose()
        await self._resources.database.close()

    async def _schema(self, _: web.Application) -> AsyncIterator[None]:
        database = self._resources.database
        await database.wait(self._settings.database_wait)
        if self._settings.migrate_on_start:
            await database.upgrade()
        await database.check_schema()
        await _check_admin_key(self._settings, self._gateway.records.keys)
        await self._gateway.records.request_ids.look()
        async with running(self._gateway.records.request_ids.watch()):
            yield

    async def _access(self, _: web.Application) -> AsyncIterator[None]:
        records = self._gateway.records
        async with (
            running(self._resources.lag.watch()),
            running(records.auth.watch()),
            running(records.sessions.watch()),
        ):
            yield
        await records.changes.close()

    async def _disks(self, _: web.Application) -> AsyncIterator[None]:
        async with running(self._gateway.disks.watch()):
            yield

    async def _bases(self, _: web.Application) -> AsyncIterator[None]:
        records = self._gateway.records
        try:
            await records.bases.start()
        except Conflict as error:
            raise SettingsError("LORAPLEX_BASE_MODEL", error.message) from error
        async with running(records.bases.watch(records.changes)):
            yield

    async def _prices(self, _: web.Application) -> AsyncIterator[None]:
        records = self._gateway.records
        await records.price_list.refresh()
        async with running(records.price_list.watch(records.changes)):
            yield

    async def _leases(self, _: web.Application) -> AsyncIterator[None]:
        quota = self._gateway.billing.quota
        async with running(quota.keep_leases()):
            yield
        await quota.close()

    async def _engines(self, _: web.Application) -> AsyncIterator[None]:
        serving, deliveries = self._gateway.serving, self._gateway.deliveries
        await serving.drains.read()
        await serving.registry.poll()
        watching = serving.registry.watch(serving.queues.admit)
        sharing = serving.shared_service.watch(serving.queues.count_service, serving.queues.admit)
        async with (
            running(watching),
            running(serving.drains.watch()),
            running(serving.history.watch()),
            running(serving.fairness.watch()),
            running(sharing),
            running(serving.engine_service.watch(serving.queues.count_service)),
            running(deliveries.watch()),
            running(serving.quarantine.watch()),
            running(serving.kept_engine.watch()),
            running(serving.pinning.watch()),
        ):
            yield
        await serving.quarantine.leave()
        await serving.dispatcher.prefetch.close()

    async def _usage(self, _: web.Application) -> AsyncIterator[None]:
        ledger, refusals = self._gateway.billing.ledger, self._gateway.records.refusals
        async with running(ledger.run()), running(self._gateway.recovery.run()), running(refusals.run()):
            yield
        try:
            async with asyncio.timeout(FLUSH_SECONDS):
                await ledger.close()
                await refusals.flush()
        except TimeoutError:
            log.warning("the last usage rows wait in Redis or in the journal for the next gateway")

    async def _accounts(self, _: web.Application) -> AsyncIterator[None]:
        yield
        await self._gateway.billing.accounting.drain(FLUSH_SECONDS)


async def _check_admin_key(settings: Settings, keys: Keys) -> None:
    """Raise SettingsError if there is no valid key for the admin API."""
    if settings.admin_key != OFF:
        return
    now = datetime.now(UTC)
    if not any(key.valid(now) for key in await keys.list(None)):
        raise SettingsError(
            "LORAPLEX_ADMIN_KEY",
            "is required while the database holds no valid admin key: set it, make one with `loraplex key create "
            "--admin`, then set it to 'off'",
        )
