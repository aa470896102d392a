"""Partitions of `usage` as those of an installation that was partitioned in an earlier month."""

from datetime import date

from sqlalchemy import text

from gateway.records.partitions.partitions import FIRST, Partitions, first_id
from gateway.records.sql.database import Database


async def end_first(database: Database, month: date) -> None:
    """Make the first partition of an empty table end before a month, and make this month's and later partitions."""
    async with database.write() as connection:
        await connection.execute(text(f"ALTER TABLE usage DETACH PARTITION {FIRST}"))
        bounds = f"FROM (MINVALUE) TO ('{first_id(month)}')"
        await connection.execute(text(f"ALTER TABLE usage ATTACH PARTITION {FIRST} FOR VALUES {bounds}"))
    await Partitions(database).make()
