"""Delivery of the events in the outbox, by one gateway process at a time."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial

from gateway.alerts.sending import Sender
from gateway.errors import Unavailable
from gateway.process.background import running
from gateway.records.maintenance.leadership import Leadership
from gateway.records.webhooks.targets import Pending, Webhooks

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
# Maximum concurrent deliveries. Each webhook has at most one, so a slow webhook occupies one place.
AT_ONCE = 256


class Outbox:
    """Deliverer of pending events. Each is delivered at least once.

    An event is delivered twice if the process ends between the target's answer and its record; its id is the same.
    """

    def __init__(
        self, webhooks: Webhooks, leadership: Leadership, sender: Sender, look_seconds: float = LOOK_SECONDS
    ) -> None:
        self._webhooks = webhooks
        self._leadership = leadership
        self._sender = sender
        self._look_seconds = look_seconds
        self._running: dict[str, asyncio.Task[None]] = {}
        self._ended = asyncio.Event()

    async def running(self, _: object) -> AsyncIterator[None]:
        """Deliver beside an application."""
        async with running(self.run()):
            yield
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        await self._sender.close()
        await self._leadership.leave()

    async def run(self) -> None:
        """Deliver while this process leads, until cancelled. Run it as a task."""
        while True:
            try:
                if await self._leadership.take():
                    await self._start_due()
            except Unavailable as error:
                # `Database` logs the outage.
                log.debug("events wait: %s", error)
            except Exception:
                log.exception("events could not be delivered")
            # After a delivery, its webhook may have another pending event.
            with suppress(TimeoutError):
                async with asyncio.timeout(self._look_seconds):
                    await self._ended.wait()
            self._ended.clear()

    async def _start_due(self) -> None:
        # A delivery that ends during the query may still be pending in its result.
        busy = set(self._running)
        for pending in await self._webhooks.due():
            target = pending.webhook.id
            if target not in busy and len(self._running) < AT_ONCE:
                task = self._running[target] = asyncio.create_task(self._deliver(pending))
                task.add_done_callback(partial(self._end, target))

    def _end(self, target: str, task: "asyncio.Task[None]") -> None:
        del self._running[target]
        self._ended.set()
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, Unavailable):
            log.error("the result of a delivery could not be recorded", exc_info=error)

    async def _deliver(self, pending: Pending) -> None:
        webhook = pending.webhook
        try:
            error = await self._sender.send(
                webhook, pending.event_id, pending.type, pending.tenant, pending.data, pending.created_at
            )
        except Exception as failure:
            # A bug. It counts as an attempt, or this event would be tried again at once and hold up all others.
            log.exception("the event %s could not be sent to the webhook %s", pending.event_id, webhook.name)
            error = f"it could not be sent: {type(failure).__name__}"
        if error is not None and webhook.failures == 0:
            log.warning("the webhook %s fails: %s", webhook.name, error)
        await self._webhooks.attempted(pending, error)
