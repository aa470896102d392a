"""List of the usage events that could not become rows, for an operator's inspection."""

from datetime import datetime

import msgspec
from sqlalchemy import func, select

from gateway.records.sql.database import Database
from gateway.records.sql.tables import usage_rejected


class RejectedEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A usage event that the database refused. id: its SHA-256. event: its text."""

    id: str
    rejected_at: datetime
    reason: str
    event: str


class RejectedUsage:
    """Query of these events. Raises Unavailable while the database is away."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def page(self, *, limit: int = 50, offset: int = 0) -> tuple[list[RejectedEvent], int]:
        """Return a page of the events, the newest first, and the number of all."""
        columns = [usage_rejected.c[name] for name in RejectedEvent.__struct_fields__]
        query = select(*columns).order_by(usage_rejected.c.rejected_at.desc(), usage_rejected.c.id)
        async with self._database.read() as connection:
            rows = (await connection.execute(query.limit(limit).offset(offset))).all()
            total = (await connection.execute(select(func.count()).select_from(usage_rejected))).scalar_one()
        return [RejectedEvent(**row._mapping) for row in rows], total
