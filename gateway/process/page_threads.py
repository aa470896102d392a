"""Threads for long reports and pages: those of the default pool may all wait for a store or an engine."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_THREADS = ThreadPoolExecutor(2, thread_name_prefix="pages")


async def in_page_thread(do: Callable[..., T], *arguments: object) -> T:
    """Return `do(*arguments)`, run in one of these threads."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, do, *arguments)
