"""Restoring of a backup (gateway/records/backup/file.py) into an empty installation, in one transaction."""

import asyncio
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import islice
from typing import Any, NamedTuple

from sqlalchemy import DateTime, MetaData, Table, insert, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from adapters.checkpoint import open_checkpoint
from adapters.manifest import AdapterError
from adapters.store import FILES, AdapterStore, sync_directory
from gateway.records.backup.file import BackupError, BackupFile, file_errors
from gateway.records.backup.write import LEFT_OUT, check_revision, reflected, table_names, used_digests
from gateway.records.partitions.partitions import has_partitions, make_months
from gateway.records.sql.database import Database, upgrade_schema
from gateway.records.sql.schema_version import read_revision
from gateway.records.sql.tables import usage

# Rows that are written at a time.
AT_ONCE = 500


class Restored(NamedTuple):
    """Size of a restored backup. missing: digests of adapters whose files the store lacks."""

    rows: int
    adapters: int
    missing: list[str]


def check_peppers(backup: BackupFile, fingerprints: Sequence[str]) -> None:
    """Raise BackupError if keys of the backup need other peppers than the given ones, by their fingerprints."""
    lacking = sorted(set(backup.header.peppers) - set(fingerprints))
    if fingerprints and lacking:
        raise BackupError(
            f"LORAPLEX_KEY_PEPPER: is not the pepper of the backup ({', '.join(lacking)}), so its keys would not work; "
            "unset it to restore them all the same"
        )


async def restore_backup(backup: BackupFile, database: Database, store: AdapterStore) -> Restored:
    """Write a backup's adapters and rows. The database is unchanged after an error.

    Raises BackupError, also if the database has rows or the store fails; NotUsableNow if the database cannot be used.
    """
    revision = check_revision(backup.header.schema, str(backup.path))
    async with database.changing_schema() as connection:
        await _make_schema(connection, revision)
        # Content under its digest harms no installation, so it may precede the rows, which refer to it.
        for digest in backup.stored_digests:
            with file_errors(f"--adapter-store: the adapter {digest} cannot be written"):
                _restore_adapter(backup, store, digest)
            await asyncio.sleep(0)  # a signal may end the restore between two adapters
        rows = 0
        for table in await reflected(connection, _carried(backup, revision)):
            rows += await _read_table(backup, connection, table)
        await connection.run_sync(upgrade_schema)
        # Gateways that run already forget everything that they have cached.
        await connection.execute(text("UPDATE access_changes SET changes = changes + 1"))
        used = await used_digests(connection)
        with file_errors("--adapter-store: it cannot be listed"):
            stored = set(store.list())
    return Restored(rows, len(backup.stored_digests), [digest for digest in used if digest not in stored])


def _carried(backup: BackupFile, revision: str) -> list[str]:
    """Return the tables of the backup. Raises BackupError if the schema has no such table."""
    unknown = sorted(set(backup.tables) - set(table_names(revision)) | set(backup.tables) & LEFT_OUT)
    if unknown:
        raise BackupError(f"{backup.path}: has the table {unknown[0]}, which the schema {revision} lacks")
    return backup.tables


async def _make_schema(connection: AsyncConnection, revision: str) -> None:
    """Give an empty database the schema of the backup. Raises BackupError if the database has rows."""
    present = await connection.run_sync(read_revision)
    if present is not None:
        tables = await reflected(connection, table_names(check_revision(present, "the database")))
        for table in tables:
            if table.name not in LEFT_OUT and (await connection.execute(select(table).limit(1))).first() is not None:
                raise BackupError(f"the database is not empty: {table.name} has rows; expected an empty database")
        if present != revision:
            await connection.run_sync(lambda sync: _drop(sync, tables))
    await connection.run_sync(upgrade_schema, revision)


def _drop(connection: Any, tables: Sequence[Table]) -> None:
    """Drop the tables of an empty database, so that the backup's older schema can be made."""
    metadata: MetaData = tables[0].metadata
    metadata.drop_all(connection, tables=list(tables), checkfirst=False)


async def _read_table(backup: BackupFile, connection: AsyncConnection, table: Table) -> int:
    """Write a table's rows and return their number."""
    lines = backup.rows(table.name)
    columns = next(lines, [])
    if unknown := [name for name in columns if name not in table.columns]:
        raise BackupError(f"{backup.path}: has the column {table.name}.{unknown[0]}, which the schema lacks")
    times = [name for name in columns if isinstance(table.columns[name].type, DateTime)]
    is_postgresql, count = connection.dialect.name == "postgresql", 0
    is_partitioned = table.name == usage.name and is_postgresql and await has_partitions(connection)
    while rows := list(islice(_values(lines, columns, times), AT_ONCE)):
        if is_partitioned:
            # Rows of a month without a partition would go to the default one, which each later month has to read.
            await make_months(connection, (row["request_id"] for row in rows))
        await connection.execute(insert(table), rows)
        count += len(rows)
    return count


def _values(lines: Iterator[list[Any]], columns: list[str], times: list[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        row = dict(zip(columns, line, strict=True))
        for name in times:
            if row[name] is not None:
                row[name] = datetime.fromisoformat(row[name])
        yield row


def _restore_adapter(backup: BackupFile, store: AdapterStore, digest: str) -> None:
    """Put an adapter into the store. Raises BackupError if its content is another adapter's, OSError."""
    with store.spool() as spool:
        folder = spool.folder / "adapter"
        folder.mkdir(mode=0o755)
        for name in FILES:
            backup.copy_adapter(digest, name, folder / name)
        try:
            found = open_checkpoint(folder).digest
        except AdapterError as error:
            raise BackupError(f"{backup.path}: the adapter {digest} is damaged: {error}") from error
        if found != digest:
            raise BackupError(f"{backup.path}: the files of the adapter {digest} are those of {found}")
        sync_directory(folder)
        store.stage(folder, digest)
        store.publish(folder, digest)
