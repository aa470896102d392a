"""Reads at the same time."""

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar, overload

Read = TypeVar("Read")
First = TypeVar("First")
Second = TypeVar("Second")
Third = TypeVar("Third")


@overload
async def together(first: Awaitable[First], second: Awaitable[Second], /) -> tuple[First, Second]: ...
@overload
async def together(
    first: Awaitable[First], second: Awaitable[Second], third: Awaitable[Third], /
) -> tuple[First, Second, Third]: ...
@overload
async def together(*reads: Awaitable[Read]) -> Sequence[Read]: ...
async def together(*reads: Awaitable[Any]) -> Sequence[Any]:
    """Run the reads at the same time and return their results. If one fails, cancel the others and raise its error.

    No read runs or holds a connection after the end of the call.
    """
    tasks = [asyncio.ensure_future(read) for read in reads]
    try:
        return tuple(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
