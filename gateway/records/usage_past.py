"""What was used up to a moment, as the ledger knows it: for quotas whose store has forgotten."""

from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Table, func, select, union_all

from gateway.records.database import Database
from gateway.records.tables import usage, usage_hourly
from gateway.records.usage_report import TIMES, segments


class UsagePast:
    """Of a tenant, or only of one of its keys or models. Exact to the microsecond of a row's `created_at`.

    Raises Unavailable when the database is away.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    async def cost(
        self, tenant_id: str, since: datetime, until: datetime, *, key_id: str | None = None, model: str | None = None
    ) -> int:
        """In micro-units, of the requests in `[since, until)`."""
        parts = [
            select(func.sum(table.c.cost).label("cost")).where(*_within(table, start, end, tenant_id, key_id, model))
            for table, start, end in segments(since, until)
        ]
        if not parts:
            return 0
        # One statement, so that a row that is being written is seen in the row and in the sums, or in neither.
        every = union_all(*parts).subquery()
        async with self._database.read() as connection:
            return int((await connection.execute(select(func.sum(every.c.cost)))).scalar() or 0)

    async def tokens_by_hour(
        self, tenant_id: str, since: datetime, until: datetime, *, key_id: str | None = None, model: str | None = None
    ) -> list[tuple[datetime, int]]:
        """Prompt and completion of the requests in `[since, until)`, by the hour's start, in order. since: an hour's
        start."""
        hour = until.replace(minute=0, second=0, microsecond=0)
        parts = [
            select(at.label("hour"), (table.c.prompt_tokens + table.c.completion_tokens).label("tokens")).where(
                *_within(table, start, end, tenant_id, key_id, model)
            )
            for table, at, start, end in (
                (usage_hourly, usage_hourly.c["hour"], since, hour),
                (usage, usage.c.created_at, hour, until),
            )
        ]
        every = union_all(*parts).subquery()
        async with self._database.read() as connection:
            rows = (await connection.execute(select(every.c.hour, every.c.tokens))).all()
        sums: dict[datetime, int] = {}
        for at, tokens in rows:
            start = min(at, hour)
            sums[start] = sums.get(start, 0) + tokens
        return sorted(sums.items())


def _within(
    table: Table, start: datetime | None, end: datetime | None, tenant_id: str, key_id: str | None, model: str | None
) -> list[ColumnElement[Any]]:
    at = TIMES[table]
    found: list[ColumnElement[Any]] = [table.c.tenant_id == tenant_id]
    found += [at >= start] if start is not None else []
    found += [at < end] if end is not None else []
    found += [table.c.key_id == key_id] if key_id is not None else []
    found += [table.c.model == model] if model is not None else []
    return found
