"""Background tasks of a gateway."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

log = logging.getLogger(__name__)


@asynccontextmanager
async def running(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run endless work as a task during the block."""
    task = asyncio.create_task(work)
    task.add_done_callback(_report_death)
    try:
        yield
    finally:
        # A library may take a cancellation for its own time-out and swallow it, so cancel until the task ends.
        while not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=1.0)


def _report_death(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and task.exception() is not None:
        log.critical("a background task died", exc_info=task.exception())
