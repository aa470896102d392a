"""Locks of names on PostgreSQL, for records that a change creates if they are missing: an absent row has no lock."""

from hashlib import blake2b

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncConnection

_LOCK = text("SELECT pg_advisory_xact_lock(:key)")


async def lock_creation(connection: AsyncConnection, kind: str, name: str = "") -> None:
    """Wait for the other transactions that have locked this name of this kind, and lock it until this one ends.

    Call it first in a transaction, before it locks rows, so that no two transactions wait for each other. On SQLite the
    database's write lock already excludes other writers.
    """
    if connection.dialect.name == "postgresql":
        hashed = blake2b(f"{kind}\0{name}".encode(), digest_size=8).digest()
        await connection.execute(_LOCK, {"key": int.from_bytes(hashed, signed=True)})
