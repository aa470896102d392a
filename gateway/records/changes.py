"""How often keys, tenants and adapters' names have changed: one number, by which a gateway learns that it must ask."""

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.records.tables import access_changes


async def count_change(connection: AsyncConnection) -> None:
    """The last statement of each transaction that changes a key, a tenant or what a name means.

    From here to the commit other such transactions wait, so whoever reads a number sees all that it counts.
    """
    await connection.execute(update(access_changes).values(changes=access_changes.c.changes + 1))


async def read_changes(connection: AsyncConnection) -> int:
    return int((await connection.execute(select(access_changes.c.changes))).scalar_one())
