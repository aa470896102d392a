"""Usage from where it is safe to where it is kept: out of Redis' streams, or this host's journal, into SQL, once each.

The quota's script adds a request's event to its tenant's stream in the same step that settles it. The process that
settled has the row in memory and writes it within a moment; the entry is deleted after that. What a process leaves
behind (it died, SQL was away) is found by a sweep of any process. SQL drops what it has seen.
"""

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable

from gateway.billing.journal import Journal
from gateway.billing.stream import UsageStream
from gateway.billing.usage_row import UsageRow, encode
from gateway.billing.writer import UsageWriter
from gateway.errors import Unavailable
from gateway.process.outage import Outage

log = logging.getLogger(__name__)

# The jitter has its own generator, so that it never changes the state of Python's shared one.
JITTER = random.Random()

# Rows in one transaction, and how long the first of them may wait for company (seconds). A transaction of SQLite's
# costs the event loop a millisecond or two beside its rows.
MAX_BATCH = 500
LINGER_SECONDS = 0.2
# Rows held in memory beside the stream; what is beyond it the sweep finds.
MAX_HELD = 5_000
SWEEP_SECONDS = 5.0
# Younger entries are about to be written by the process that settled them.
LEFT_BEHIND_SECONDS = 3.0
FIRST_RETRY_SECONDS = 0.1
LAST_RETRY_SECONDS = 2.0
AWAY = {"quota_unavailable": "redis does not answer", "database_unavailable": "the database does not answer"}


class Ledger:
    """`run` moves rows until it is cancelled; `close` then writes what can be written at once."""

    def __init__(self, writer: UsageWriter, stream: UsageStream, journal: Journal, max_rows: int) -> None:
        """max_rows: that may wait anywhere for the database; beyond them no request should be admitted."""
        self._writer = writer
        self._stream = stream
        self._journal = journal
        self._max_rows = max_rows
        self._held: deque[tuple[bytes, UsageRow]] = deque()
        self._arrived = asyncio.Event()
        # Entries in all streams at the last sweep of any gateway.
        self._left_behind = 0
        self._ended = False

    @property
    def has_room(self) -> bool:
        """False when the database is so far behind that no further request may be admitted."""
        return self.waiting < self._max_rows and self._journal.has_room

    @property
    def waiting(self) -> int:
        """Rows not yet in the database, the journal's aside."""
        return max(len(self._held), self._left_behind)

    @property
    def journal_bytes(self) -> int:
        return self._journal.bytes

    @property
    def rejected(self) -> int:
        """Events that this process set aside because they are no rows."""
        return self._writer.rejected

    def settled(self, entry_id: bytes, row: UsageRow) -> None:
        """Redis has the row in its tenant's stream, as this entry."""
        if len(self._held) < MAX_HELD:
            self._held.append((entry_id, row))
            self._arrived.set()

    async def keep(self, row: UsageRow) -> None:
        """Redis does not have the row: returns once the disk does. One that no disk takes is in the log."""
        try:
            await self._journal.append(encode(row))
        except OSError:
            log.critical("usage row not written: %s", encode(row).decode(), exc_info=True)

    async def run(self) -> None:
        self._ended = False
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._forever(self._arrived, None, self._write_held, self._describe_rows))
            tasks.create_task(self._forever(None, SWEEP_SECONDS, self._sweep, self._describe_rows))
            appended = self._journal.appended
            tasks.create_task(self._forever(appended, SWEEP_SECONDS, self._replay, self._describe_journal))
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                # A cancellation may be lost within a database's or Redis' driver as its call ends in time.
                self._ended = True

    async def close(self) -> None:
        """One last try. What cannot be written stays in Redis or on the disk, for whoever comes next."""
        try:
            await self._write_held()
            await self._replay()
        except (Unavailable, OSError) as error:
            log.warning("usage rows stay behind, to be written by the next gateway: %s", error)
        await self._journal.close()

    def _describe_rows(self) -> str:
        return f"{self.waiting} rows wait" if self.waiting else ""

    def _describe_journal(self) -> str:
        return f"{self.journal_bytes} bytes of the journal wait" if self.journal_bytes else ""

    async def _forever(
        self,
        event: asyncio.Event | None,
        seconds: float | None,
        work: Callable[[], Awaitable[bool | None]],
        describe: Callable[[], str],
    ) -> None:
        """Do the work at each event and about every so many seconds; retry, ever later, while something is away.

        work: returns False where it was another process' turn. describe: returns what waits for the work, if anything
        does. Outages have their own log.
        """
        delay = FIRST_RETRY_SECONDS
        outage = Outage(log, "writing usage down")
        while not self._ended:
            try:
                is_done = await work()
            except (Unavailable, OSError) as error:
                if waiting := describe():
                    outage.failed(_what_fails(error), waiting)
                await asyncio.sleep(delay)
                delay = min(2 * delay, LAST_RETRY_SECONDS)
                continue
            except Exception:
                # A fault of ours; the ledger must not end with it, for the rows are there.
                log.exception("usage could not be written; tried again")
                await asyncio.sleep(delay)
                delay = min(2 * delay, LAST_RETRY_SECONDS)
                continue
            delay = FIRST_RETRY_SECONDS
            if is_done is not False:
                outage.over()
            if self._ended:
                return
            if event is None:
                # Uneven, so that no process is always the first to ask for its turn: one may be cut off from SQL.
                await asyncio.sleep((seconds or 0) * JITTER.uniform(0.5, 1.5))
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await event.wait()
            event.clear()

    async def _write_held(self) -> None:
        while self._held:
            if len(self._held) < MAX_BATCH:
                await asyncio.sleep(LINGER_SECONDS)
            batch = [self._held[i] for i in range(min(MAX_BATCH, len(self._held)))]
            await self._writer.write(row for _, row in batch)
            for _ in batch:
                self._held.popleft()
            # Where Redis went away meanwhile the sweep will find these again, and SQL that it has them.
            with contextlib.suppress(Unavailable):
                await self._stream.remove((row.tenant_id, entry_id) for entry_id, row in batch)

    async def _sweep(self) -> bool:
        """Write down the events that dead processes left in Redis, as the one process of all that does; every process
        learns how many there are. Returns False where another process is at it."""
        turn = SWEEP_SECONDS / 2
        if not await self._stream.is_first(turn):
            self._left_behind = await self._stream.backlog()
            return False
        await self._stream.move_tenants()
        lengths: dict[str, int] = {}
        async for found in self._stream.lengths():
            lengths |= found
            # The sum so far is published where it is more than was known.
            await self._stream.publish(max(self._left_behind, sum(lengths.values())), turn)
        self._left_behind = sum(lengths.values())
        await self._stream.publish(self._left_behind, turn)
        batch: list[tuple[str, bytes, bytes]] = []
        for tenant_id in lengths:
            async for page in self._stream.left_behind(tenant_id, LEFT_BEHIND_SECONDS):
                batch += [(tenant_id, entry_id, event) for entry_id, event in page]
                if len(batch) >= MAX_BATCH:
                    await self._move(batch, turn)
                    batch = []
        if batch:
            await self._move(batch, turn)
        return True

    async def _move(self, batch: list[tuple[str, bytes, bytes]], turn: float) -> None:
        """Write events, of many tenants in one transaction, and remove them from their streams."""
        await self._writer.write_events(event for _, _, event in batch)
        await self._stream.remove((tenant_id, entry_id) for tenant_id, entry_id, _ in batch)
        self._left_behind = max(0, self._left_behind - len(batch))
        await self._stream.publish(self._left_behind, turn)

    async def _replay(self) -> None:
        async for events in self._journal.batches():
            await self._writer.write_events(events)


def _what_fails(error: Unavailable | OSError) -> str:
    """Which of those that usage passes through."""
    if isinstance(error, OSError):
        return f"the journal's disk: {error}"
    return AWAY.get(error.code or "", error.message)
