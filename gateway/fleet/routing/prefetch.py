"""Hints to engines: load an adapter into host memory while its request waits in the gateway's queue. Best effort."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from msgspec import MsgspecError

from gateway.fleet.engines.engine import EngineRecord
from gateway.fleet.engines.problems import EngineProblems
from wire.bounded_dict import BoundedDict
from wire.http_errors import HTTP_ERRORS

log = logging.getLogger(__name__)

# A hint for one adapter to one engine is not repeated within this time.
REPEAT_SECONDS = 10.0
# Maximum hints in flight of one tenant and of all tenants, and maximum remembered hints.
MAX_OF_TENANT, MAX_IN_FLIGHT, MAX_SENT = 4, 64, 4096


class SendHint(Protocol):
    async def __call__(self, engine: EngineRecord, digest: str, tenant_id: str) -> bool:
        """Send a hint and return whether the engine has the adapter in memory. Raises ClientError, OSError,
        TimeoutError, MsgspecError.
        """


class Prefetch:
    """Hints of one process. They are limited for each tenant; engines limit the loaded bytes too."""

    def __init__(self, send: SendHint) -> None:
        self._send = send
        self._in_flight: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        # Time of the last hint by engine and digest, oldest first.
        self._sent = BoundedDict[tuple[str, str], float](MAX_SENT)
        self._problems = EngineProblems(log)

    def hint(self, engine: EngineRecord, digests: Sequence[str], tenant_id: str) -> None:
        """Tell the engine to load the adapters that it does not hold. Ignored by kinds that take no hints."""
        if not engine.address.traits.takes_hints:
            return
        for digest in digests:
            if not (engine.holds(digest) or engine.prefetched.has(digest)) and self._may_send(
                engine, digest, tenant_id
            ):
                self._in_flight[tenant_id] += 1
                # Counts as loaded from now on, so that routing prefers this engine.
                engine.prefetched.add(digest)
                task = asyncio.create_task(self._hint(engine, digest, tenant_id))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Cancel the hints in flight."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _may_send(self, engine: EngineRecord, digest: str, tenant_id: str) -> bool:
        if self._in_flight[tenant_id] >= MAX_OF_TENANT or len(self._tasks) >= MAX_IN_FLIGHT:
            return False
        key, now = (engine.url, digest), time.monotonic()
        if now - self._sent.get(key, -REPEAT_SECONDS) < REPEAT_SECONDS:
            return False
        self._sent.put(key, now)
        return True

    async def _hint(self, engine: EngineRecord, digest: str, tenant_id: str) -> None:
        is_loaded = False
        try:
            with engine.requests.loading_for(tenant_id):
                is_loaded = await self._send(engine, digest, tenant_id)
            self._problems.ended(engine)
        except (*HTTP_ERRORS, MsgspecError) as error:
            self._problems.found(engine, "takes no prefetch hints", type(error).__name__)
        finally:
            self._in_flight[tenant_id] -= 1
            if not self._in_flight[tenant_id]:
                del self._in_flight[tenant_id]
            if not is_loaded:
                engine.prefetched.remove(digest)
