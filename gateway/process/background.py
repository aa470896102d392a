"""Endless work beside requests."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

log = logging.getLogger(__name__)


@asynccontextmanager
async def running(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs endless work beside the block."""
    task = asyncio.create_task(work)
    task.add_done_callback(_report_death)
    try:
        yield
    finally:
        # A library may take a cancellation for the end of its own patience: asked until it is heard.
        while not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=1.0)


def _report_death(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and task.exception() is not None:
        log.critical("a background task died", exc_info=task.exception())
