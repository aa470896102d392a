"""Ids of requests, the keys of the ledger. With a partitioned `usage`, an id begins with its time.

The partitions of `usage` are ranges of request ids (partitions.py). Ids of the other form are random;
they stay the only form while `usage` is a plain table, so that they all precede the ids with a time.
"""

import asyncio
import os
import uuid
from contextlib import suppress
from datetime import UTC, datetime

from gateway.errors import Unavailable
from gateway.records.partitions.partitions import TIMED, is_partitioned
from gateway.records.sql.database import Database

# Pause between two readings of the form of `usage`.
LOOK_SECONDS = 60.0


class RequestIds:
    """Maker of request ids. is_timed: whether ids begin with their time."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.is_timed = False

    async def look(self) -> None:
        """Read the form of `usage`. While the database is away, the known form stays."""
        with suppress(Unavailable):
            self.is_timed = await is_partitioned(self._database)

    async def watch(self) -> None:
        """Follow the form of `usage` until cancelled. Run it as a task."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look()

    def new(self) -> str:
        """Return a new id of 36 characters: random, or of the time and 68 random bits."""
        if self.is_timed:
            return f"{TIMED}{datetime.now(UTC):%Y%m%d%H%M%S}{os.urandom(9).hex()[:17]}"
        return f"req_{uuid.uuid4().hex}"
