"""Leadership: work that one gateway process does at a time, by a lease in SQL.

The lease is in SQL, not in Redis, because the work needs SQL anyway and must not stop while Redis is away.
"""

import asyncio
import math
import time
import uuid
from contextlib import suppress
from datetime import UTC, datetime, timedelta

from sqlalchemy import delete, insert, or_, update
from sqlalchemy.exc import IntegrityError

from gateway.errors import Unavailable
from gateway.records.events.tables import turns
from gateway.records.sql.database import Database

# Maximum wait for the database when a process stops.
LEAVE_SECONDS = 1.0
# Part of the lease's lifetime after which the leader prolongs it.
PROLONGED_AFTER = 1 / 3


class Leadership:
    """Leadership in one kind of work, by its name.

    The leader loses it after `seconds` without a call of `take`, by its own clock. It prolongs it after a third of that
    time. The clocks of the gateways' machines may differ by less than two thirds of `seconds`; after a larger
    difference two gateways lead, and the work must bear that.
    """

    def __init__(self, database: Database, name: str, seconds: float) -> None:
        self._database = database
        self._name = name
        self._seconds = timedelta(seconds=seconds)
        self._owner = uuid.uuid4().hex
        # Time (monotonic) until which the leadership needs no prolongation.
        self._led_until = -math.inf

    async def take(self) -> bool:
        """Take or prolong the leadership. Return whether this process leads. Raises Unavailable."""
        if time.monotonic() < self._led_until:
            return True
        now, begun = datetime.now(UTC), time.monotonic()
        values = {"owner": self._owner, "until": now + self._seconds}
        free = or_(turns.c.owner == self._owner, turns.c.until < now)
        async with self._database.write() as connection:
            if (
                await connection.execute(update(turns).where(turns.c.name == self._name, free).values(**values))
            ).rowcount:
                self._led_until = begun + PROLONGED_AFTER * self._seconds.total_seconds()
                return True
        try:
            async with self._database.write() as connection:
                await connection.execute(insert(turns).values(name=self._name, **values))
        except IntegrityError:
            return False
        self._led_until = begun + PROLONGED_AFTER * self._seconds.total_seconds()
        return True

    async def leave(self) -> None:
        """End the leadership, if this process leads. While the database is unavailable, it only expires."""
        self._led_until = -math.inf
        mine = (turns.c.name == self._name) & (turns.c.owner == self._owner)
        with suppress(Unavailable, TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS), self._database.write() as connection:
                await connection.execute(delete(turns).where(mine))
