"""Backup of an installation: the database's rows at one moment, and the adapter store's digests or files.

Gateways may continue to run. See file.py for the form, restore.py for the way back.
"""

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import DateTime, MetaData, Table, create_engine, inspect, select
from sqlalchemy.ext.asyncio import AsyncConnection

from adapters.store import FILES, AdapterStore
from gateway.records.backup.file import (
    ADAPTERS,
    DIGESTS,
    FORMAT,
    HEADER,
    BackupError,
    BackupWriter,
    Header,
    new_backup,
)
from gateway.records.sql.database import Database, upgrade_schema
from gateway.records.sql.schema_version import migrations

# Tables that stay behind: the schema's version, which the header has, and its support of programs, which the migrations
# write; counters of changes, which depend on the server; and work in progress, which belongs to the running gateways:
# turns, browsers' sessions, unfinished uploads, and deliveries to webhooks, which a second installation must not
# repeat.
LEFT_OUT = frozenset(
    {
        *("alembic_version", "schema_support", "access_changes", "tenant_changes", "turns", "sessions"),
        *("adapter_uploads", "adapter_upload_parts", "event_deliveries"),
    }
)
# Rows that are read at a time.
AT_ONCE = 1000


class Copied(NamedTuple):
    """Size of a backup. missing: digests whose files were asked for and are not in the store.

    peppers: fingerprints that the header has.
    """

    rows: int
    adapters: int
    missing: list[str]
    peppers: tuple[str, ...]


def table_names(revision: str) -> list[str]:
    """Return the names of the schema's tables at a version. The database may have tables of other programs beside."""
    engine = create_engine("sqlite://")
    try:
        with engine.begin() as connection:
            upgrade_schema(connection, revision)
            return inspect(connection).get_table_names()
    finally:
        engine.dispose()


async def reflected(connection: AsyncConnection, names: Sequence[str]) -> list[Table]:
    """Return tables as the database has them, referenced ones first. An older schema needs no code of its own then."""
    found = MetaData()
    await connection.run_sync(lambda sync: found.reflect(sync, only=list(names)))
    return [table for table in found.sorted_tables if table.name in names]


def check_revision(revision: str | None, subject: str) -> str:
    """Return a schema's version. Raises BackupError if this release does not know it. subject: its name in errors."""
    known = [each.revision for each in migrations()]
    if revision not in known:
        raise BackupError(
            f"{subject} has the schema {revision}, newer than {known[0]}, the newest of this release; use a newer one"
            if revision
            else f"{subject} has no schema: it was never migrated"
        )
    return revision


async def write_backup(
    path: Path, database: Database, store: AdapterStore, peppers: tuple[str, ...], *, with_adapters: bool
) -> Copied:
    """Write a backup to a new file. peppers: fingerprints of the keys' peppers; empty: those that valid keys have.

    Raises BackupError, OSError of the store, and SQLAlchemy's errors.
    """
    revision = check_revision(await database.revision(), "the database")
    with new_backup(path) as writer:
        async with database.snapshot() as connection:
            names = [name for name in table_names(revision) if name not in LEFT_OUT]
            tables = await reflected(connection, names)
            now = datetime.now(UTC)
            peppers = peppers or await _peppers(connection, tables, now)
            header = Header(format=FORMAT, schema=revision, created_at=now, peppers=peppers)
            writer.add(HEADER, msgspec.json.encode(header))
            rows = sum([await _write_table(writer, connection, table) for table in tables])
            used = await used_digests(connection)
        # The store is listed after the rows are read, so it has every adapter that they name.
        stored = sorted(store.list())
        writer.add(DIGESTS, "".join(f"{digest}\n" for digest in stored).encode())
        missing = []
        for digest in used if with_adapters else []:
            if not _write_adapter(writer, store, digest):
                missing.append(digest)
            await asyncio.sleep(0)  # a signal may end the backup between two adapters
    return Copied(rows, len(used) - len(missing) if with_adapters else len(stored), missing, peppers)


async def _peppers(connection: AsyncConnection, tables: Sequence[Table], now: datetime) -> tuple[str, ...]:
    """Return the fingerprints of the peppers of valid keys. Older schemas and keys have none."""
    keys = next((table.c for table in tables if table.name == "api_keys"), None)
    if keys is None or "pepper" not in keys:
        return ()
    is_valid = keys.revoked_at.is_(None) & (keys.expires_at.is_(None) | (keys.expires_at > now))
    found = select(keys.pepper).where(is_valid, keys.pepper.is_not(None)).distinct().order_by(keys.pepper)
    return tuple((await connection.execute(found)).scalars())


async def used_digests(connection: AsyncConnection) -> list[str]:
    """Return the digests of all versions of adapters. A refused upload has an empty one."""
    [versions] = await reflected(connection, ["adapter_versions"])
    digest = versions.c.digest
    found = await connection.execute(select(digest).where(digest != "").distinct().order_by(digest))
    return list(found.scalars())


async def _write_table(writer: BackupWriter, connection: AsyncConnection, table: Table) -> int:
    """Write a table and return its number of rows."""
    times = [number for number, column in enumerate(table.columns) if isinstance(column.type, DateTime)]
    count = 0
    with writer.table(table.name) as write:
        write([str(name) for name in table.columns.keys()])  # noqa: SIM118 # plain strings
        async for rows in (await connection.stream(select(table))).partitions(AT_ONCE):
            for row in rows:
                values: list[Any] = list(row)
                for number in times:
                    if (at := values[number]) is not None and at.tzinfo is None:
                        values[number] = at.replace(tzinfo=UTC)  # SQLite drops the zone
                write(values)
            count += len(rows)
    return count


def _write_adapter(writer: BackupWriter, store: AdapterStore, digest: str) -> bool:
    """Write an adapter's files. Returns False if the store has none."""
    with store.use(digest) as folder:
        if folder is None:
            return False
        for name in FILES:
            with (folder / name).open("rb") as file:
                file.seek(0, 2)
                num_bytes = file.tell()
                file.seek(0)
                writer.add_file(f"{ADAPTERS}{digest}/{name}", file, num_bytes)
    # The local copy of a bucket's adapter is of no further use.
    store.discard(digest)
    return True
