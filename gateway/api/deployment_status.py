"""Status of a deployment: versions, migrations, delays of the database and Redis now, and stored bytes."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
from sqlalchemy import Select, exists, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.billing.journal import SUFFIX, journal_folder
from gateway.errors import GatewayError
from gateway.process.disks import room
from gateway.records.events.events import KEPT
from gateway.records.sql.database import Database
from gateway.records.sql.schema_version import Migration, migrations
from gateway.records.sql.sums import int_sum
from gateway.records.sql.tables import adapter_versions, removed_versions
from gateway.settings import Settings

T = TypeVar("T")

PROBE_SECONDS = 2.0
# Lifetime of the cached sums over the adapters.
STORE_SECONDS = 30.0


class Dependency(msgspec.Struct, frozen=True, kw_only=True):
    """A server that the gateway needs. latency: seconds of one query just now; None without an answer."""

    kind: str
    latency: float | None
    num_bytes: int | None = None


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """Stored adapters. versions: number on record. num_bytes: bytes of their tensors; equal contents are stored
    once.
    """

    versions: int
    contents: int
    num_bytes: int


class Removed(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of removed versions that no version on record has and that no collection has removed yet. Contents of
    deleted tenants and of uploads that broke off are not among them: only a walk of the store finds those.
    """

    contents: int
    num_bytes: int


class DeploymentStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status of the gateway process that answers. stored, removed, revision: None while the database is away.

    journal_bytes: bytes of the journals of all processes on this host that use this database. disks: free and all bytes
    by folder. retention: seconds for which records are kept, by their kind; None: for ever.
    """

    version: str
    started_at: datetime
    process: int
    revision: str | None
    expected_revision: str
    migrations: list[Migration]
    database: Dependency
    redis: Dependency
    stored: Stored | None
    removed: Removed | None
    journal_bytes: int
    journal_limit: int
    disks: dict[str, tuple[int, int]]
    retention: dict[str, float | None]


class StatusReader:
    """Reads the status. ping_redis: raises a GatewayError if Redis does not answer."""

    def __init__(self, settings: Settings, database: Database, ping_redis: Callable[[], Awaitable[None]]) -> None:
        self._settings = settings
        self._database = database
        self._ping_redis = ping_redis
        self._started_at = datetime.now(UTC)
        self._stored = Kept(database, _read_stored)
        self._removed = Kept(database, _read_removed)

    async def read(self) -> DeploymentStatus:
        """Return the status. It waits at most PROBE_SECONDS for each part."""
        settings = self._settings
        database, redis = await asyncio.gather(_latency(self._database.ping), _latency(self._ping_redis))
        revision = stored = removed = num_bytes = None
        if database is not None:
            revision = await _result_or_none(self._database.revision())
            stored, removed, num_bytes = await asyncio.gather(
                _result_or_none(self._stored.get()),
                _result_or_none(self._removed.get()),
                _result_or_none(self._database.num_bytes()),
            )
        known = await asyncio.to_thread(migrations)
        folder = journal_folder(settings.journal_dir.expanduser(), settings.database_url)
        return DeploymentStatus(
            version=version("loraplex"),
            started_at=self._started_at,
            process=os.getpid(),
            revision=revision,
            expected_revision=known[0].revision,
            migrations=known,
            database=Dependency(kind=self._database.dialect, latency=database, num_bytes=num_bytes),
            redis=Dependency(kind="redis", latency=redis),
            stored=stored,
            removed=removed,
            journal_bytes=await asyncio.to_thread(_journal_bytes, folder),
            journal_limit=settings.journal_bytes,
            disks=await asyncio.to_thread(_disks, settings.disk_folders),
            retention=_retention(settings),
        )


class Kept(Generic[T]):
    """Sums of the database, read at most every STORE_SECONDS."""

    def __init__(self, database: Database, read: Callable[[AsyncConnection], Awaitable[T]]) -> None:
        self._database = database
        self._read = read
        self._last: tuple[float, T] | None = None

    async def get(self) -> T:
        now = time.monotonic()
        if self._last is None or now - self._last[0] >= STORE_SECONDS:
            async with self._database.read() as connection:
                self._last = now, await self._read(connection)
        return self._last[1]


async def _read_stored(connection: AsyncConnection) -> Stored:
    table = adapter_versions
    versions = (await connection.execute(select(func.count()).select_from(table))).scalar_one()
    contents = select(table.c.digest, func.max(table.c.num_bytes).label("num_bytes")).where(table.c.digest != "")
    number, num_bytes = await _sums(connection, contents.group_by(table.c.digest))
    return Stored(versions=versions, contents=number, num_bytes=num_bytes)


async def _read_removed(connection: AsyncConnection) -> Removed:
    table = removed_versions
    on_record = exists().where(adapter_versions.c.digest == table.c.digest)
    contents = select(table.c.digest, func.max(table.c.num_bytes).label("num_bytes"))
    # A collection sets the bytes to 0.
    contents = contents.where(table.c.num_bytes > 0, ~on_record).group_by(table.c.digest)
    number, num_bytes = await _sums(connection, contents)
    return Removed(contents=number, num_bytes=num_bytes)


async def _sums(connection: AsyncConnection, contents: Select[tuple[str, int]]) -> tuple[int, int]:
    """Return the number and the bytes of the contents."""
    rows = contents.subquery()
    number, num_bytes = (
        await connection.execute(select(func.count(), int_sum(rows.c.num_bytes)).select_from(rows))
    ).one()
    return number, num_bytes


def _retention(settings: Settings) -> dict[str, float | None]:
    day, hour = 86_400.0, 3600.0
    return {
        "usage rows": None if settings.usage_days is None else settings.usage_days * day,
        "sums by minute": settings.minute_sums_hours * hour,
        "sums by hour and day": None if settings.sums_days is None else settings.sums_days * day,
        "refused requests": settings.refused_days * day,
        "events": KEPT.total_seconds(),
        "audit entries of tenants": settings.tenant_audit_days * day,
        "audit entries of operators": None,
    }


async def _latency(ping: Callable[[], Awaitable[None]]) -> float | None:
    """Return the seconds until the answer, None without one."""
    at = time.perf_counter()
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            await ping()
    except (GatewayError, TimeoutError):
        return None
    return time.perf_counter() - at


async def _result_or_none(waited: Awaitable[T]) -> T | None:
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            return await waited
    except (GatewayError, TimeoutError):
        return None


def _journal_bytes(folder: Path) -> int:
    total = 0
    for path in folder.glob(f"*{SUFFIX}"):
        try:
            total += path.stat().st_size
        except OSError:
            # Another process has just removed the file.
            continue
    return total


def _disks(folders: Mapping[str, Path]) -> dict[str, tuple[int, int]]:
    found = {}
    for name, folder in folders.items():
        try:
            found[name] = room(folder)
        except OSError:
            continue
    return found
