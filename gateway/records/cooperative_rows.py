"""Work on many rows in batches, between which the event loop runs other tasks."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from sqlalchemy import Row, Select
from sqlalchemy.ext.asyncio import AsyncConnection

T = TypeVar("T")
Made = TypeVar("Made")
# Rows that are read or converted at a time: up to 12 ms of the event loop.
AT_ONCE = 50


async def read_rows(connection: AsyncConnection, query: Select[Any], read: Callable[[Row[Any]], Made]) -> list[Made]:
    """Return the query's rows, each converted by `read`."""
    found: list[Made] = []
    async for rows in (await connection.stream(query)).partitions(AT_ONCE):
        found += map(read, rows)
        await asyncio.sleep(0)
    return found


async def in_pieces(items: Sequence[T], make: Callable[[T], Made]) -> list[Made]:
    """Return `make` of each item, in their order."""
    found: list[Made] = []
    for first in range(0, len(items), AT_ONCE):
        found += map(make, items[first : first + AT_ONCE])
        await asyncio.sleep(0)
    return found
