"""Records of refused requests: rows for the request log, and exact counts by minute, hour and day.

A request never waits for these records and never fails because of them. Rows wait in bounded memory and are written in
batches; beyond a limit of rows per minute, a tenant's refusals are only counted. So a tenant can neither fill the
database nor displace another tenant's rows.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

import msgspec
from sqlalchemy import ColumnElement, delete, func, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError

from gateway.error_codes import DATABASE_UNAVAILABLE
from gateway.errors import Exceeded, Unavailable
from gateway.process.outage import Outage
from gateway.records.requests.refusal_tables import refusal_counts, refused_requests
from gateway.records.sql.database import Database
from gateway.sql_states import is_datas_fault

log = logging.getLogger(__name__)

MINUTE, HOUR, DAY = 60, 3600, 86400
# Id in `refusal_counts` of the counts over all tenants. No tenant has this id.
ALL_TENANTS = "*"
LEVELS = (MINUTE, HOUR, DAY)
# Limits of a tenant's rows a minute in this process: of all codes, and of each code.
ROWS_A_MINUTE, ROWS_A_CODE = 60, 30
# Maximum number of rows in memory, and of counts by minute, tenant and code.
MAX_ROWS, MAX_COUNTS = 5_000, 50_000
MAX_BATCH = 500
FLUSH_SECONDS = 2.0
# Maximum rows kept per tenant, the same number as of audit entries.
KEPT_ROWS = 50_000
SWEPT_AT_ONCE = 1000


class RefusedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was refused before its admission.

    tenant_id, tenant, key_id: empty without a verified key. status: HTTP status. code: the error's code. param: the
    field at fault. exceeded: the limit of a 429, None for other errors. end_user: the request's `user`.
    """

    request_id: str
    at: datetime
    tenant_id: str
    tenant: str
    key_id: str
    method: str
    route: str
    status: int
    code: str
    latency_ms: int
    model: str | None = None
    end_user: str | None = None
    param: str | None = None
    exceeded: Exceeded | None = None
    address: str | None = None


class Counted(msgspec.Struct, frozen=True):
    """Key of the count of refused requests in a minute. tenant: its name."""

    start: int
    tenant_id: str
    code: str
    status: int
    limit_name: str
    tenant: str


class RefusalLog:
    """Recorder of this process. dropped: called with the number of rows that are only counted."""

    def __init__(self, database: Database, dropped: Callable[[int], None]) -> None:
        self._database = database
        self._dropped = dropped
        self._dialect = {"sqlite": sqlite, "postgresql": postgresql}[database.dialect]
        self._rows: deque[RefusedRequest] = deque()
        self._counts: Counter[Counted] = Counter()
        # Rows of the present minute by tenant, and by tenant and code.
        self._minute = 0
        self._used: Counter[tuple[str, str]] = Counter()
        self._outage = Outage(log, "writing refused requests")

    def note(self, refused: RefusedRequest) -> None:
        """Count a refusal, and queue its row if it is a tenant's and within the tenant's limit."""
        minute = int(refused.at.timestamp()) // MINUTE * MINUTE
        limit = "" if refused.exceeded is None else refused.exceeded.name
        counted = Counted(minute, refused.tenant_id, refused.code, refused.status, limit, refused.tenant)
        if counted in self._counts or len(self._counts) < MAX_COUNTS:
            self._counts[counted] += 1
        if not refused.tenant_id:
            return
        if minute != self._minute:
            self._minute = minute
            self._used.clear()
        of_all, of_code = (refused.tenant_id, ""), (refused.tenant_id, refused.code)
        if self._used[of_all] >= ROWS_A_MINUTE or self._used[of_code] >= ROWS_A_CODE or len(self._rows) >= MAX_ROWS:
            self._dropped(1)
            return
        self._used[of_all] += 1
        self._used[of_code] += 1
        self._rows.append(refused)

    async def run(self) -> None:
        """Write rows and counts until cancelled. Run it as a task."""
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            await self.flush()

    async def flush(self) -> None:
        """Write the waiting rows and counts. They stay in memory while the database is unavailable."""
        try:
            await self._write_counts()
            while self._rows:
                await self._write_rows()
            self._outage.over()
        except Unavailable as error:
            self._outage.failed(error.message, f"{len(self._rows)} rows wait")
        except Exception:
            # A bug or a row that the database refuses must not end the task.
            log.exception("writing refused requests failed")

    async def _write_rows(self) -> None:
        batch = [self._rows[i] for i in range(min(MAX_BATCH, len(self._rows)))]
        await self._insert(batch)
        self._forget(len(batch))

    async def _insert(self, batch: Sequence[RefusedRequest]) -> None:
        """Insert rows. If the database refuses them, bisect them, so that only the bad row is dropped and counted."""
        try:
            async with self._database.write() as connection:
                insert = self._dialect.insert(refused_requests).on_conflict_do_nothing()
                await connection.execute(insert, [_columns(refused) for refused in batch])
        except DBAPIError as error:
            if not is_datas_fault(error):
                raise Unavailable("The database cannot take refused requests.", code=DATABASE_UNAVAILABLE) from error
            if len(batch) == 1:
                self._dropped(1)
                log.error("the database refuses a row of a refused request: %s", type(error).__name__)
                return
            middle = len(batch) // 2
            await self._insert(batch[:middle])
            await self._insert(batch[middle:])

    def _forget(self, number: int) -> None:
        for _ in range(number):
            self._rows.popleft()

    async def _write_counts(self) -> None:
        if not self._counts:
            return
        counts, self._counts = self._counts, Counter()
        try:
            async with self._database.write() as connection:
                insert = self._dialect.insert(refusal_counts)
                total = refusal_counts.c.requests + insert.excluded.requests
                keys = list(refusal_counts.primary_key.columns)
                upsert = insert.on_conflict_do_update(index_elements=keys, set_={"requests": total})
                await connection.execute(upsert, sums_of(counts))
        except Unavailable:
            self._counts += counts
            raise

    async def prune(self, kept: timedelta, now: datetime) -> int:
        """Remove rows that are older than `kept` or beyond a tenant's newest KEPT_ROWS. Returns their number."""
        table = refused_requests
        removed = await self._remove(table.c.at < now - kept)
        many = select(table.c.tenant_id).group_by(table.c.tenant_id).having(func.count() > KEPT_ROWS)
        async with self._database.read() as connection:
            excessive = list((await connection.execute(many)).scalars())
        for tenant_id in excessive:
            newest = select(table.c.at).where(table.c.tenant_id == tenant_id).order_by(table.c.at.desc())
            async with self._database.read() as connection:
                oldest_kept = (await connection.execute(newest.offset(KEPT_ROWS - 1).limit(1))).scalar_one_or_none()
            if oldest_kept is not None:
                removed += await self._remove(table.c.tenant_id == tenant_id, table.c.at < oldest_kept)
        return removed

    async def _remove(self, *which: ColumnElement[bool]) -> int:
        """Remove rows in short transactions, so that no other writer waits for long."""
        removed, table = 0, refused_requests
        some = select(table.c.request_id).where(*which).limit(SWEPT_AT_ONCE)
        while True:
            async with self._database.write() as connection:
                count = (await connection.execute(delete(table).where(table.c.request_id.in_(some)))).rowcount
            removed += count
            if count < SWEPT_AT_ONCE:
                return removed


def sums_of(counts: Counter[Counted]) -> list[dict[str, object]]:
    """Return the rows of `refusal_counts` to add, in the order of its primary key, in which all writers lock them."""
    numbers: Counter[tuple[int, int, str, str, int, str]] = Counter()
    tenants = {ALL_TENANTS: ""}
    for counted, number in counts.items():
        tenants[counted.tenant_id] = counted.tenant
        for level in LEVELS:
            for tenant_id in (counted.tenant_id, ALL_TENANTS):
                start = counted.start // level * level
                numbers[level, start, tenant_id, counted.code, counted.status, counted.limit_name] += number
    names = ("level", "start", "tenant_id", "code", "status", "limit_name")
    return [
        {**dict(zip(names, key, strict=True)), "tenant": tenants[key[2]], "requests": number}
        for key, number in sorted(numbers.items())
    ]


def _columns(refused: RefusedRequest) -> dict[str, object]:
    values = msgspec.structs.asdict(refused)
    exceeded = values.pop("exceeded")
    return {
        **values,
        "limit_name": None if exceeded is None else exceeded.name,
        "limit_owner": None if exceeded is None else exceeded.owner,
        "limit_value": None if exceeded is None else exceeded.value,
        "needed": None if exceeded is None else exceeded.needed,
        "remaining": None if exceeded is None else exceeded.remaining,
        "retry_after": None if exceeded is None else exceeded.retry_after,
    }
