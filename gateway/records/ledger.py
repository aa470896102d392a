"""Usage: one row per admitted request, written in batches by a background writer, exactly once, and summed.

The queue is bounded. When SQL is away the rows wait in it, `has_room` turns false and nothing more is admitted, so
that no request is ever served that could not be accounted for.
"""

import asyncio
import logging
from datetime import datetime

import msgspec
from sqlalchemy import func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DataError, IntegrityError, ProgrammingError

from gateway.errors import Unavailable
from gateway.records.database import Database
from gateway.records.tables import tenants, usage

log = logging.getLogger(__name__)

# Rows in one INSERT: PostgreSQL takes 32767 parameters, a row has 16.
MAX_BATCH = 500
# How long the first row of a batch may wait for company (seconds).
LINGER_SECONDS = 0.05
FIRST_RETRY_SECONDS = 0.1
LAST_RETRY_SECONDS = 2.0


class UsageRow(msgspec.Struct, frozen=True, kw_only=True):
    """status: "ok", "cancelled" (the client left), "refused" (the engine found the request bad; it cost nothing) or
    "error". Times in ms from the request's arrival."""

    request_id: str
    tenant_id: str
    tenant: str
    key_id: str
    endpoint: str
    model: str
    adapter_digest: str | None
    engine: str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    latency_ms: int
    ttft_ms: int | None
    status: str
    finish_reason: str | None
    created_at: datetime
    cost: int = 0


class ModelUsage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sums over the rows of one tenant and model. deleted: the tenant is no more; left out of JSON where False."""

    tenant: str
    model: str
    requests: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    deleted: bool = False


class Ledger:
    """`record` takes rows, `run` writes them until `close`."""

    def __init__(self, database: Database, max_rows: int) -> None:
        self._database = database
        self._queue: asyncio.Queue[UsageRow | None] = asyncio.Queue(maxsize=max_rows)
        dialect = {"sqlite": sqlite, "postgresql": postgresql}[database.dialect]
        self._insert = dialect.insert(usage).on_conflict_do_nothing(index_elements=["request_id"])

    @property
    def has_room(self) -> bool:
        """False when the writer is so far behind that no further request may be admitted."""
        return not self._queue.full()

    @property
    def waiting(self) -> int:
        """Rows not yet taken by the writer."""
        return self._queue.qsize()

    async def record(self, row: UsageRow) -> None:
        """Hands a row to the writer; waits while the queue is full. Cancelled meanwhile, it logs the row."""
        try:
            await self._queue.put(row)
        except asyncio.CancelledError:
            _log_unwritten(row)
            raise

    async def close(self) -> None:
        """Lets `run` return once everything recorded so far is written."""
        await self._queue.put(None)

    async def run(self) -> None:
        """The writer. Cancelled (SQL stayed away through the whole shutdown), it logs every row it still holds."""
        batch: list[UsageRow] = []
        try:
            while True:
                last = await self._gather(batch)
                await self._write_until_done(batch)
                batch.clear()
                if last:
                    return
        except asyncio.CancelledError:
            while not self._queue.empty():
                row = self._queue.get_nowait()
                if row is not None:
                    batch.append(row)
            for row in batch:
                _log_unwritten(row)
            raise

    async def _gather(self, batch: list[UsageRow]) -> bool:
        """Fills `batch` with at least one row unless the end was reached, which is the result."""
        item = await self._queue.get()
        if item is None:
            return True
        batch.append(item)
        await asyncio.sleep(LINGER_SECONDS)
        while len(batch) < MAX_BATCH and not self._queue.empty():
            item = self._queue.get_nowait()
            if item is None:
                return True
            batch.append(item)
        return False

    async def _write_until_done(self, batch: list[UsageRow]) -> None:
        delay = FIRST_RETRY_SECONDS
        while batch:
            try:
                await self._write(batch)
                return
            except (DataError, IntegrityError, ProgrammingError):
                # Retrying cannot help; find the row that the database refuses and let the others through.
                if len(batch) == 1:
                    log.critical("usage row refused: %s", msgspec.json.encode(batch[0]).decode(), exc_info=True)
                    return
                for row in batch:
                    await self._write_until_done([row])
                return
            except Unavailable:
                log.warning("usage: %d rows wait for the database", len(batch) + self.waiting)
                await asyncio.sleep(delay)
                delay = min(2 * delay, LAST_RETRY_SECONDS)

    async def _write(self, batch: list[UsageRow]) -> None:
        async with self._database.write() as connection:
            await connection.execute(self._insert, [msgspec.structs.asdict(row) for row in batch])


def _log_unwritten(row: UsageRow) -> None:
    """The last resort: an operator can read it back from the log."""
    log.critical("usage row not written: %s", msgspec.json.encode(row).decode())


class UsageReport:
    """Reads of what the ledger wrote."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def by_model(
        self,
        tenant_id: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        *,
        tenant: str | None = None,
    ) -> list[ModelUsage]:
        """Sums per tenant and model of the requests in `[since, until)`.

        tenant: by name instead of by id, which also finds what deleted tenants of that name have used.
        """
        columns = (usage.c.tenant, usage.c.model, tenants.c.id.is_(None).label("deleted"))
        query = select(
            *columns,
            func.count().label("requests"),
            func.sum(usage.c.prompt_tokens).label("prompt_tokens"),
            func.sum(usage.c.completion_tokens).label("completion_tokens"),
            func.sum(usage.c.cached_tokens).label("cached_tokens"),
        ).join_from(usage, tenants, tenants.c.id == usage.c.tenant_id, isouter=True)
        if tenant is not None:
            query = query.where(usage.c.tenant == tenant)
        if tenant_id is not None:
            query = query.where(usage.c.tenant_id == tenant_id)
        if since is not None:
            query = query.where(usage.c.created_at >= since)
        if until is not None:
            query = query.where(usage.c.created_at < until)
        async with self._database.read() as connection:
            rows = (await connection.execute(query.group_by(*columns).order_by(*columns))).all()
        # PostgreSQL sums bigints to a Decimal.
        return [
            ModelUsage(
                tenant=row.tenant,
                model=row.model,
                requests=row.requests,
                prompt_tokens=int(row.prompt_tokens),
                completion_tokens=int(row.completion_tokens),
                cached_tokens=int(row.cached_tokens),
                deleted=row.deleted,
            )
            for row in rows
        ]

    async def knows(self, tenant: str) -> bool:
        """Whether a tenant of this name, deleted or not, has used anything."""
        async with self._database.read() as connection:
            found = await connection.execute(select(usage.c.request_id).where(usage.c.tenant == tenant).limit(1))
        return found.first() is not None

    async def recent(self, tenant_id: str | None = None, limit: int = 50) -> list[UsageRow]:
        """The newest rows first."""
        query = select(usage).order_by(usage.c.created_at.desc(), usage.c.request_id).limit(limit)
        if tenant_id is not None:
            query = query.where(usage.c.tenant_id == tenant_id)
        async with self._database.read() as connection:
            rows = (await connection.execute(query)).all()
        return [UsageRow(**row._mapping) for row in rows]
