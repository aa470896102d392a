"""State of the adapter store, checked in a thread: a hung network file system must not stop the event loop, nor the
exit of the process.
"""

import asyncio
import logging
import threading
import time
from contextlib import suppress

from adapters.store import AdapterStore
from gateway.process.outage import Outage

log = logging.getLogger(__name__)

# Pause between two checks, and the time after which a check without an answer counts as a fault.
CHECK_SECONDS, PATIENCE_SECONDS = 5.0, 10.0
SLOW = "unavailable: it does not answer"


class StoreProbe:
    """Probe of the store. At most one check runs at a time, so that a hung store holds one thread."""

    def __init__(self, store: AdapterStore) -> None:
        self._store = store
        self._check: asyncio.Task[str] | None = None
        self._began = self._ended = 0.0
        self._text = "ok"
        self._outage = Outage(log, "the adapter store")

    async def state(self, seconds: float) -> str:
        """Return "ok" or the fault, without the store's path. seconds: longest wait for a check."""
        now = time.monotonic()
        if self._check is None and (not self._ended or now - self._ended >= CHECK_SECONDS):
            self._check, self._began = asyncio.create_task(self._run()), now
        if self._check is not None:
            await asyncio.wait({self._check}, timeout=seconds)
            if self._check.done():
                self._text, self._ended, self._check = self._check.result(), time.monotonic(), None
                self._outage.over() if self._text == "ok" else self._outage.failed(self._text)
            elif time.monotonic() - self._began >= PATIENCE_SECONDS:
                self._text = SLOW
        return self._text

    async def close(self) -> None:
        """Wait no longer for a check that runs."""
        if self._check is not None:
            self._check.cancel()
            await asyncio.wait({self._check})

    async def _run(self) -> str:
        """Check the store in a thread that the process does not wait for when it exits."""
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        found = []

        def check() -> None:
            found.append(self._look())
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(done.set)

        threading.Thread(target=check, name="adapter store", daemon=True).start()
        await done.wait()
        return found[0]

    def _look(self) -> str:
        try:
            self._store.check()
        except OSError as error:
            return f"unavailable: {error.strerror or type(error).__name__}"
        except Exception:
            log.exception("the check of the adapter store failed")
            return "unavailable: its check failed"
        return "ok"
