"""Ledger: moves usage rows from Redis' streams or this host's journal into SQL, each exactly once.

The quota's script adds a request's event to its tenant's stream in the same step that settles it. The process that
settled it has the row in memory, writes it to SQL soon, and then deletes the entry from the stream. Entries that a
process leaves behind (it died, SQL was away) are found by a sweep of any process. SQL ignores rows that it has already.
"""

import asyncio
import contextlib
import logging
import random
from collections import Counter, deque
from collections.abc import Awaitable, Callable

import msgspec

from gateway.billing.journal import Journal
from gateway.billing.stream import UsageStream
from gateway.billing.writer import UsageWriter
from gateway.error_codes import DATABASE_UNAVAILABLE, QUOTA_UNAVAILABLE
from gateway.errors import Unavailable
from gateway.process.outage import Outage
from gateway.usage_row import UsageRow, encode

log = logging.getLogger(__name__)

# The jitter has its own generator, so that it never changes the state of Python's shared one.
JITTER = random.Random()

# Maximum number of rows in one transaction, and how long the first of them waits for others (seconds). A transaction of
# SQLite costs the event loop a millisecond or two in addition to its rows.
MAX_BATCH = 500
LINGER_SECONDS = 0.2
# Maximum number of rows in memory, besides the stream. The sweep finds the others.
MAX_HELD = 5_000
SWEEP_SECONDS = 5.0
# Minimum age of entries that the sweep writes. Younger ones are written by the process that settled them.
LEFT_BEHIND_SECONDS = 3.0
FIRST_RETRY_SECONDS = 0.1
LAST_RETRY_SECONDS = 2.0
AWAY = {QUOTA_UNAVAILABLE: "redis does not answer", DATABASE_UNAVAILABLE: "the database does not answer"}


class Ledger:
    """Ledger of this process. `run` moves rows until it is cancelled; `close` then tries once to write the rest."""

    def __init__(self, writer: UsageWriter, stream: UsageStream, journal: Journal, max_rows: int) -> None:
        """max_rows: the number of rows waiting for the database beyond which no request should be admitted."""
        self._writer = writer
        self._stream = stream
        self._journal = journal
        self._max_rows = max_rows
        self._held: deque[tuple[bytes, UsageRow]] = deque()
        self._arrived = asyncio.Event()
        # Rows in memory by tenant.
        self._held_of: Counter[str] = Counter()
        # Entries in all streams at the last sweep of any gateway, and those of the tenants with most of them.
        self._left_behind = 0
        self._left_behind_of: dict[str, int] = {}
        self._ended = False

    @property
    def has_room(self) -> bool:
        """Return whether the ledger has room for the usage of further requests."""
        return self.waiting < self._max_rows and self._journal.has_room

    def has_room_for(self, tenant_id: str) -> bool:
        """Return whether the ledger has room for further requests of this tenant.

        A tenant may have as many rows waiting as it leaves free, so alone it gets half of the queue, and each further
        tenant half of the rest (the dynamic thresholds of Choudhury and Hahne, 1998).
        """
        rows = max(self._held_of[tenant_id], self._left_behind_of.get(tenant_id, 0))
        return self.has_room and rows < self._max_rows - self.waiting

    @property
    def waiting(self) -> int:
        """Return the number of rows that are not in the database yet, without the journal's."""
        return max(len(self._held), self._left_behind)

    @property
    def journal_bytes(self) -> int:
        return self._journal.bytes

    @property
    def rejected(self) -> int:
        """Return the number of events that this process has set aside as invalid rows."""
        return self._writer.rejected

    def settled(self, entry_id: bytes, row: UsageRow) -> None:
        """Queue a row that Redis has in its tenant's stream as this entry."""
        if len(self._held) < MAX_HELD:
            self._held.append((entry_id, row))
            self._held_of[row.tenant_id] += 1
            self._arrived.set()

    async def keep(self, row: UsageRow) -> None:
        """Write a row that Redis does not have to the journal. If that fails, write it to the log."""
        try:
            await self._journal.append(encode(row))
        except OSError:
            # The end user is the client's own text, which no log contains.
            known = msgspec.structs.replace(row, end_user=None)
            log.critical("usage row not written: %s", encode(known).decode(), exc_info=True)

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
                # A driver of the database or Redis may lose a cancellation that coincides with the end of a call.
                self._ended = True

    async def close(self) -> None:
        """Try once to write the remaining rows. The others stay in Redis or in the journal for the next process."""
        try:
            # No further row comes, so the last ones wait for no others.
            await self._write_held(lingers=False)
            await self._replay()
        except (Unavailable, OSError) as error:
            log.warning("unwritten usage rows are left to the next gateway: %s", error)
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
        """Do the work at each event and about every `seconds`; retry with growing delays while a part is away.

        work: returns False if it was another process's turn. describe: returns the amount of work that waits, as
        text. An outage is logged only if some work waits.
        """
        delay = FIRST_RETRY_SECONDS
        outage = Outage(log, "writing usage rows")
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
                # A bug must not end the ledger, because the rows still have to be written.
                log.exception("writing usage rows failed; the gateway retries")
                await asyncio.sleep(delay)
                delay = min(2 * delay, LAST_RETRY_SECONDS)
                continue
            delay = FIRST_RETRY_SECONDS
            if is_done is not False:
                outage.over()
            if self._ended:
                return
            if event is None:
                # Jitter, so that no process always gets the turn: it may be cut off from SQL.
                await asyncio.sleep((seconds or 0) * JITTER.uniform(0.5, 1.5))
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await event.wait()
            event.clear()

    async def _write_held(self, *, lingers: bool = True) -> None:
        """Write the rows in memory in batches. lingers: whether a small batch waits for further rows."""
        while self._held:
            if lingers and len(self._held) < MAX_BATCH:
                await asyncio.sleep(LINGER_SECONDS)
            batch = [self._held[i] for i in range(min(MAX_BATCH, len(self._held)))]
            await self._writer.write(row for _, row in batch)
            for _, row in batch:
                self._held.popleft()
                self._held_of[row.tenant_id] -= 1
            self._held_of = +self._held_of
            # If Redis is away, the sweep finds these entries again and SQL ignores them.
            with contextlib.suppress(Unavailable):
                await self._stream.remove((row.tenant_id, entry_id) for entry_id, row in batch)

    async def _sweep(self) -> bool:
        """Write the events that processes left behind in Redis, if it is this process's turn, and publish their number.

        Returns False if it is another process's turn; then only read the published number.
        """
        turn = SWEEP_SECONDS / 2
        if not await self._stream.is_first(turn):
            self._left_behind, self._left_behind_of = await self._stream.backlog()
            return False
        await self._stream.move_tenants()
        lengths: dict[str, int] = {}
        async for found in self._stream.lengths():
            lengths |= found
            # Publish the sum so far if it exceeds the last known number.
            known = self._left_behind_of | lengths
            await self._stream.publish(max(self._left_behind, sum(lengths.values())), known, turn)
        self._left_behind, self._left_behind_of = sum(lengths.values()), lengths
        await self._stream.publish(self._left_behind, lengths, turn)
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
        """Write events of many tenants in one transaction and remove them from their streams."""
        await self._writer.write_events(event for _, _, event in batch)
        await self._stream.remove((tenant_id, entry_id) for tenant_id, entry_id, _ in batch)
        self._left_behind = max(0, self._left_behind - len(batch))
        for tenant_id, _, _ in batch:
            self._left_behind_of[tenant_id] -= 1
        await self._stream.publish(self._left_behind, self._left_behind_of, turn)

    async def _replay(self) -> None:
        async for events in self._journal.batches():
            await self._writer.write_events(events)


def _what_fails(error: Unavailable | OSError) -> str:
    """Return the part that fails: the journal's disk, Redis or the database."""
    if isinstance(error, OSError):
        return f"the journal's disk: {error}"
    return AWAY.get(error.code or "", error.message)
