"""Background tasks of a gateway."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")
# Longest wait for the work of `run_to_end` at the end of the gateway.
END_SECONDS = 10.0
# Work of `run_to_end`. The event loop itself keeps only weak references to tasks.
_to_end: set[asyncio.Task[Any]] = set()


async def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run work to its end even if the caller is cancelled, because its client has left.

    It is for steps of which none may be missing once the first is done. A failure after the caller's end is logged.
    """
    task = asyncio.create_task(work)
    _to_end.add(task)
    task.add_done_callback(_to_end.discard)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_report_failure)
        raise


async def all_ended() -> None:
    """Wait, for at most END_SECONDS, until the work of callers that were cancelled has ended."""
    if _to_end:
        await asyncio.wait(_to_end, timeout=END_SECONDS)


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


def _report_failure(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.error("a change whose client had left failed", exc_info=task.exception())


def _report_death(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and task.exception() is not None:
        log.critical("a background task died", exc_info=task.exception())
