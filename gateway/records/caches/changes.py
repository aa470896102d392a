"""Change counters by tenant, by which a gateway finds the tenants whose cached keys and names are stale.

Each transaction that changes a tenant, its keys, names or prices increments the counter in that tenant's row. Ten times
a second while requests run, less often otherwise, a gateway reads the rows that have changed since a safe point. So a
tenant's changes invalidate no other tenant's cached records, and changes of two tenants never wait for each other.

No change is missed, in whatever order transactions commit. A row's stamp is the id of the transaction that wrote it,
and the safe point is the oldest transaction that a reading's snapshot saw running (`pg_snapshot_xmin`): a later commit
has this stamp or a newer one. A row that is read twice is recognised by its counter. SQLite has one writer at a time,
whose stamps are a plain counter.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any

from sqlalchemy import Row, TextClause, text
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.error_codes import DATABASE_UNAVAILABLE
from gateway.errors import Unavailable
from gateway.records.caches.lookups import Lookups
from gateway.records.sql.database import Database

# Scopes beside the tenants' ids: admin keys, the list of prices, and the base models.
OPERATORS, PRICES, BASES = "operators", "prices", "bases"

# Cached keys and names are trusted for this long after the last reading: a revoked key is refused everywhere within
# half a second, and the response to an adapter's deletion waits as long. A reading may fail without any effect.
TRUST_SECONDS = 0.5
ASK_SECONDS = 0.1
# Period of the readings while no request runs. With LOOK_SECONDS it is below TRUST_SECONDS, the time after which a
# change of a list in memory counts as known.
IDLE_SECONDS = 0.2
# Period of looking for changes of a list in memory. Without a change the list is read every RELOAD_SECONDS, in case a
# gateway of the previous release, or plain SQL, has changed it.
LOOK_SECONDS = 0.2
RELOAD_SECONDS = 60.0

# Above every stamp. The first reading thus returns the safe point only, and not a row of each tenant.
_NEVER = 2**62

_STAMPS = {
    "postgresql": "CAST(CAST(pg_current_xact_id() AS text) AS bigint)",
    "sqlite": "(SELECT coalesce(max(stamp), 0) + 1 FROM tenant_changes)",
}
_COUNT = {
    dialect: text(
        f"INSERT INTO tenant_changes (scope, changes, stamp) VALUES (:scope, 1, {stamp}) "
        "ON CONFLICT (scope) DO UPDATE SET changes = tenant_changes.changes + 1, stamp = excluded.stamp"
    )
    for dialect, stamp in _STAMPS.items()
}
_COUNT_PLAN = {
    dialect: text(
        f"INSERT INTO tenant_changes (scope, changes, stamp) SELECT id, 1, {stamp} FROM tenants WHERE plan = :plan "
        "ORDER BY id ON CONFLICT (scope) DO UPDATE SET changes = tenant_changes.changes + 1, stamp = excluded.stamp"
    )
    for dialect, stamp in _STAMPS.items()
}
# The server's start time identifies it after a failover: transaction ids of two servers are not comparable.
_SERVERS = {
    "postgresql": "SELECT CAST(pg_postmaster_start_time() AS text) AS server, pg_is_in_recovery() AS standby, "
    "CAST(CAST(pg_snapshot_xmin(pg_current_snapshot()) AS text) AS bigint) AS safe",
    "sqlite": "SELECT '' AS server, 0 AS standby, (SELECT coalesce(max(stamp), 0) + 1 FROM tenant_changes) AS safe",
}


def _reading(server: str) -> TextClause:
    """Build the statement that reads the safe point, and the rows since the previous safe point, in one snapshot."""
    return text(
        "SELECT now.server, now.standby, now.safe, now.others, rows.scope, rows.changes "
        f"FROM ({server}, (SELECT changes FROM access_changes) AS others) AS now "
        "LEFT JOIN tenant_changes AS rows ON rows.stamp >= :since"
    )


_READ = {dialect: _reading(server) for dialect, server in _SERVERS.items()}


async def count_change(connection: AsyncConnection, *scopes: str | None) -> None:
    """Increment the counters of tenants, by id, or of other scopes; None is OPERATORS.

    Call it last in a transaction, because other changes of the same tenants wait from here to the commit.
    """
    # The order is the same everywhere, so that transactions never deadlock.
    for scope in sorted({scope or OPERATORS for scope in scopes}):
        await connection.execute(_COUNT[connection.dialect.name], {"scope": scope})


async def count_changes_of_plan(connection: AsyncConnection, plan: str) -> None:
    """Increment the counters of all tenants of a plan, in the order of their ids."""
    await connection.execute(_COUNT_PLAN[connection.dialect.name], {"plan": plan})


class Changes:
    """Tracker of tenants that have changed. A cache keeps `mark`, taken before its query, with each answer.

    trust_seconds: how long answers are trusted after the last reading. It is above TRUST_SECONDS for a gateway that
    goes on serving cached keys while the database is away.
    """

    def __init__(self, database: Database, trust_seconds: float = TRUST_SECONDS) -> None:
        self._database = database
        self._trust_seconds = max(TRUST_SECONDS, trust_seconds)
        self._readings: Lookups[None, None] = Lookups(self._read)
        self._server: tuple[str, int] | None = None
        self._since = _NEVER
        self._counts: dict[str, int] = {}
        # A local clock of the changes read: an answer is stale if its tenant has changed after the answer's mark.
        self._clock = 0
        self._all_changed_at = 0
        # In the order of the changes, the newest last.
        self._changed_at: dict[str, int] = {}
        self._read_at = -math.inf

    @property
    def mark(self) -> int:
        return self._clock

    @property
    def age(self) -> float:
        """Return the seconds since the last successful reading began."""
        return time.monotonic() - self._read_at

    def holds(self, mark: int, scope: str) -> bool:
        """Return whether an answer of this mark is valid without a reading."""
        return self.age < self._trust_seconds and self.is_unchanged(mark, scope)

    def is_unchanged(self, mark: int, scope: str) -> bool:
        """Return whether no change after the mark is known."""
        return mark >= self._all_changed_at and mark >= self._changed_at.get(scope, 0)

    def since(self, mark: int) -> set[str] | None:
        """Return the scopes that have changed after the mark, as far as it is known; None if any may have changed."""
        if mark < self._all_changed_at:
            return None
        return set(takewhile(lambda scope: self._changed_at[scope] > mark, reversed(self._changed_at)))

    async def confirm(self, mark: int, scope: str) -> bool:
        """Return whether an answer of this mark is valid now; concurrent callers share a reading.

        After a stall of the event loop, a process thus makes one reading, not one for each key. Raises Unavailable.
        """
        if self.holds(mark, scope):
            return True
        if not self.is_unchanged(mark, scope):
            return False
        await self.read()
        return self.is_unchanged(mark, scope)

    async def read(self) -> None:
        """Read all changes up to now. Raises Unavailable."""
        await self._readings.get(None)

    async def follow(self, scope: str, refresh: Callable[[], Awaitable[None]]) -> None:
        """Call `refresh` after each change of a scope, and every RELOAD_SECONDS, until cancelled.

        refresh: reads a list; a call that raises Unavailable is repeated.
        """
        mark, read_at = -1, 0.0
        while True:
            if not self.is_unchanged(mark, scope) or time.monotonic() - read_at > RELOAD_SECONDS:
                before = self.mark
                # `Database` logs an outage; the previous list stays in force.
                with suppress(Unavailable):
                    await refresh()
                    mark, read_at = before, time.monotonic()
            await asyncio.sleep(LOOK_SECONDS)

    async def close(self) -> None:
        """Wait for a running reading."""
        await self._readings.close()

    async def catch_up(self) -> None:
        """Read a change that this process has just made, before its response is sent."""
        try:
            await self.read()
        except Unavailable:
            # The change is committed, so every cached answer is dropped.
            self._forget_all()

    async def _read(self, _: None) -> None:
        asked_at = time.monotonic()
        async with self._database.read(reserved=True) as connection:
            rows = (await connection.execute(_READ[connection.dialect.name], {"since": self._since})).all()
        first = rows[0]
        if first.standby:
            await self._database.reconnect("it is a standby")
            raise Unavailable("The database is a standby; try again shortly.", code=DATABASE_UNAVAILABLE)
        self._notice(rows)
        self._read_at = asked_at

    def _notice(self, rows: Sequence[Row[Any]]) -> None:
        first = rows[0]
        server = (first.server, first.others)
        if server != self._server or first.safe < self._since:
            # The server is another one, or a gateway of the previous release counted a change without its tenant.
            self._server = server
            self._forget_all()
        for row in rows:
            if row.scope is not None and self._counts.get(row.scope) != row.changes:
                self._clock += 1
                self._changed_at.pop(row.scope, None)
                self._counts[row.scope], self._changed_at[row.scope] = row.changes, self._clock
        self._since = first.safe

    def _forget_all(self) -> None:
        self._clock += 1
        self._all_changed_at = self._clock
        self._counts.clear()
        self._changed_at.clear()
